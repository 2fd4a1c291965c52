"""The machines of a Slurm cluster."""

import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from pydantic import Field

from .cluster import Agents, Cluster, MachineRequest
from .starting import AGENT


class SlurmCluster(Cluster):
    """The machines of a Slurm allocation, on each of which one srun starts an agent.

    In a job (sbatch, salloc), these are the machines of the job; elsewhere, srun waits for an allocation of its own.
    """

    # Slurm's numbers of tasks are those of agents; Lightning takes them for its ranks.
    not_for_ranks: ClassVar[tuple[str, ...]] = (
        "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_NAME",
        "SLURM_CPU_BIND", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
    )  # fmt: skip

    kind: Literal["slurm"] = "slurm"
    partition: str | None = Field(default=None, title="Partition", description="Slurm's default partition when empty.")
    ranks_per_node: int | None = Field(
        default=None,
        ge=1,
        title="Ranks per node",
        description="For how many ranks a machine has room. When empty, its GPUs per node, or one.",
    )
    gpus_per_node: int | None = Field(default=None, ge=1, title="GPUs per node", description="The GPUs of each machine.")
    srun_arguments: list[str] = Field(
        default=[], title="Arguments of srun", description="More arguments of srun, such as --time=2:00:00."
    )
    python: str = Field(
        default=sys.executable, title="Python", description="The interpreter on the machines. The flow's own path by default."
    )

    @contextmanager
    def lend(self, wanted: MachineRequest, agents: Agents) -> Iterator[None]:
        """Start one agent on each machine by one srun, which waits for the allocation."""
        slots = self.ranks_per_node or self.gpus_per_node or 1
        in_job = os.environ.get("SLURM_JOB_NUM_NODES")
        nodes = _nodes(wanted, slots) if in_job is None else _nodes_of_job(wanted, slots, int(in_job))
        program = [self.python, "-m", AGENT, *agents.arguments(slots=slots)]
        agents.run(shlex.join([*self._srun(nodes, wanted, in_job is not None), *program]), ["Slurm"])
        yield

    def _srun(self, nodes: str, wanted: MachineRequest, in_job: bool) -> list[str]:
        return [
            "srun",
            f"--nodes={nodes}",
            "--ntasks-per-node=1",
            "--cpu-bind=none",  # the ranks of an agent are not one task's
            "--kill-on-bad-exit=0",  # one lost machine ends the attempt by the leader's will, not by Slurm's
            "--wait=0",
            "--no-kill",
            *(["--overlap"] if in_job else []),  # beside the step that the flow runs in
            *([f"--exclude={','.join(sorted(wanted.avoid))}"] if wanted.avoid else []),
            *([f"--partition={self.partition}"] if self.partition and not in_job else []),
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            *self.srun_arguments,
        ]


def _nodes(wanted: MachineRequest, slots: int) -> str:
    """Return how many machines srun is to wait for."""
    fewest, most = math.ceil(wanted.fewest / slots), math.ceil(wanted.most / slots)
    return f"{fewest}-{most}" if fewest < most else str(most)


def _nodes_of_job(wanted: MachineRequest, slots: int, in_job: int) -> str:
    """Return how many of the job's machines srun is to use, at most those that are left."""
    there = in_job - len(wanted.avoid)
    if there < math.ceil(wanted.fewest / slots):
        raise NotEnoughMachinesError(
            f"{wanted.fewest} ranks wanted, the cluster has room for {max(0, there) * slots}: the Slurm job "
            f"{os.environ.get('SLURM_JOB_ID', '')} has {in_job} machines, {len(wanted.avoid)} of them lost"
        )
    return str(min(math.ceil(wanted.most / slots), there))
