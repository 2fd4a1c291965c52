"""The machines of a Dask cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

from pydantic import Field

from .client_process import check_client, run_client_process
from .cluster import Agents, Cluster, MachineRequest


class DaskCluster(Cluster):
    """The workers of a Dask cluster, each of which runs one agent as a task.

    Needs the extra `dask` on the flow's machine, and this package, in the same version, on Dask's machines.
    """

    # Dask's nanny sets these variables: to one thread, and so that malloc gives each freed tensor back to the kernel.
    not_for_ranks: ClassVar[tuple[str, ...]] = (
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_",
    )  # fmt: skip

    kind: Literal["dask"] = "dask"
    address: str = Field(min_length=1, title="Address", description="The address of the scheduler, such as tcp://head:8786.")
    ranks_per_worker: int | None = Field(
        default=None,
        ge=1,
        title="Ranks per worker",
        description="For how many ranks a worker has room. When empty, as many as it has GPUs; without GPUs, so many that all "
        "ranks are spread evenly over all workers.",
    )
    resources: dict[str, float] = Field(
        default={}, title="Resources", description="Only workers that were started with these resources, such as GPU: 1."
    )

    @contextmanager
    def lend(self, wanted: MachineRequest, agents: Agents) -> Iterator[None]:
        """Submit an agent to each worker that is not to be avoided, from a separate process."""
        check_client("distributed", "Dask", "dask")
        order = {
            "address": self.address,
            "ranks_per_worker": self.ranks_per_worker,
            "resources": self.resources,
            "use_gpu": wanted.use_gpu,
            "fewest": wanted.fewest,
            "most": wanted.most,
            "avoid": sorted(wanted.avoid),
        }
        run_client_process(agents, "dask_agents", f"Dask at {self.address}", order)
        yield
