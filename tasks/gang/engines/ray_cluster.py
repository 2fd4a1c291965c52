"""The machines of a Ray cluster."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from .client_process import check_client, run_client_process
from .cluster import Agents, Cluster, MachineRequest

_ANSWER_S = 20.0  # for importing Ray, connecting, and a last placement after the wait
_ONE_GPU = "each rank has one GPU"


class RayCluster(Cluster):
    """The machines of a Ray cluster, on which a placement group has a bundle for each rank.

    Needs the extra `ray` on the flow's machine, and this package, in the same version, on Ray's machines.
    """

    # Ray sets the first to the number of CPUs of a bundle.
    not_for_ranks: ClassVar[tuple[str, ...]] = ("OMP_NUM_THREADS", "RAY_JOB_ID", "RAY_RAYLET_PID")
    waits_itself: ClassVar[bool] = True

    kind: Literal["ray"] = "ray"
    address: str = Field(
        default="auto",
        min_length=1,
        title="Address",
        description="Ray's address, such as head:6379, or ray://head:10001 from outside of the cluster. auto: the cluster that "
        "this machine belongs to.",
    )
    resources_per_worker: dict[str, float] = Field(
        default={},
        title="Resources per rank",
        description="What Ray reserves for each rank, such as CPU: 8; one CPU when empty. And one GPU if ranks have GPUs, "
        "which is all that a rank uses.",
    )
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", title="Placement", description="Whether ranks are on few machines, or spread over many."
    )

    @field_validator("resources_per_worker")
    @classmethod
    def _check_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        if resources.get("GPU", 1) not in {0, 1}:
            raise ValueError(f"{_ONE_GPU}, not {resources['GPU']:g}: leave GPU out, and give use_gpu=True")
        if not all(0 <= amount < math.inf for amount in resources.values()):
            raise ValueError("Ray reserves no negative and no infinite amounts: give numbers from 0 on")
        return resources

    @property
    def longest_wait_s(self) -> float:
        """How long to wait for the machines of one request: longer than Ray is asked, since its answer has the room."""
        return self.asks_for_s + _ANSWER_S

    @contextmanager
    def lend(self, wanted: MachineRequest, agents: Agents) -> Iterator[None]:
        """Reserve a placement group in a separate process, whose end releases it."""
        check_client("ray", "Ray", "ray")
        # Without a GPU in it, a group may be where all GPUs are lent to others.
        resources = {**({"GPU": 1.0} if wanted.use_gpu else {}), **(self.resources_per_worker or {"CPU": 1.0})}
        if not any(resources.values()):
            raise ValueError("Ray reserves nothing without an amount above 0: give one, or leave resources_per_worker out")
        if wanted.use_gpu and not resources["GPU"]:
            raise ValueError(f"{_ONE_GPU}, not 0: leave GPU out of resources_per_worker")
        order = {
            "address": self.address,
            "resources": resources,
            "strategy": self.placement_strategy,
            "fewest": wanted.fewest,
            "most": wanted.most,
            "avoid": sorted(wanted.avoid - wanted.in_use),
            "wait_s": max(0.0, min(self.longest_wait_s, wanted.avoids_for_s) - _ANSWER_S),
        }
        run_client_process(agents, "ray_agents", f"Ray at {self.address}", order)
        yield
