"""The start of a gang: rank 0 as a job defines it, the other ranks as copies of it, and the store that all share."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from prefect_torch.ckpt import StorageSpec
from prefect_torch.tasks.gang.machine.lending import Lease
from prefect_torch.tasks.gang.machine.working_dir import WorkingDirectory
from prefect_torch.tasks.options.config import ScalingConfig
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.rendezvous import Address, Rendezvous, TcpKeyValue, import_torch
from prefect_torch.tasks.rank.resources.cpus import count_cpus
from prefect_torch.tasks.rank.spec import RankSpec, on_machines
from prefect_torch.tasks.rank.user_code.function import PackedFunction

from .gang import Gang
from .gpus.allocation import GpuAllocation
from .rank_logs import RankLogs
from .termination import TerminatedError, Termination


class GangJob(Protocol):
    """The part of a training's or an evaluation's job that its ranks are made from."""

    @property
    def function(self) -> PackedFunction:
        """The function that every rank runs."""
        ...

    @property
    def scaling(self) -> ScalingConfig:
        """The ranks and their devices."""
        ...

    @property
    def working_dir(self) -> WorkingDirectory | None:
        """The directory whose copy the ranks run in; None for the flow's own."""
        ...


def num_ranks_here(scaling: ScalingConfig, gpus: GpuAllocation) -> int:
    """Return the number of ranks on this machine: one for each of the GPUs that are taken, without GPUs one for each CPU.

    Not fewer than the fewest, nor more than the most. More ranks than CPUs would take turns, and need as much memory each.
    """
    return len(gpus.locks) or min(scaling.most_workers, max(scaling.fewest_workers, count_cpus()))


def first_rank(
    job: GangJob,
    gpus: GpuAllocation,
    rendezvous: Address,
    *,
    storage: StorageSpec,
    run: str,
    attempt: int,
    restored: CheckpointRef | None,
) -> RankSpec:
    """Return rank 0 of as many ranks as there is room for, all on this machine.

    Args:
        job: The training or the evaluation.
        gpus: The GPUs of the ranks, which are taken.
        rendezvous: The address of the key-value store that the ranks share.
        storage: The storage of the run.
        run: The run's name.
        attempt: The attempt's number; of an evaluation, that of the checkpoint.
        restored: The checkpoint that the attempt resumes from, or None; of an evaluation, the one that is evaluated.

    """
    scaling = job.scaling
    num_ranks = num_ranks_here(scaling, gpus)
    return RankSpec(
        world_size=num_ranks,
        local_world_size=num_ranks,
        rendezvous=rendezvous,
        storage=storage,
        run=run,
        attempt=attempt,
        restored=restored,
        function=job.function,
        use_gpu=scaling.use_gpu,
        backend=scaling.backend,
        timeout_s=scaling.timeout_s,
        visible_gpus=gpus.environment,
        gpu_locks=gpus.locks,
        working_dir=None if job.working_dir is None else job.working_dir.stored,
    )


def start_gang(
    first_rank_at: Callable[[Address], RankSpec],
    hang_timeout_s: float | None,
    termination: Termination,
    lease: Lease | None = None,
    logs: RankLogs | None = None,
) -> tuple[Gang, TcpKeyValue]:
    """Start ranks and return them with the store that they share, which serves until it is closed.

    Args:
        first_rank_at: Returns rank 0 for the address of the store, as if all ranks were on this machine.
        hang_timeout_s: The longest time without a report; None for unlimited.
        termination: Whether the flow run is being terminated. As long as the store does not serve, the ranks have nothing to
            checkpoint, and get no grace.
        lease: The machines of the ranks; None for this one.
        logs: Where the ranks' lines go; None for all to Prefect.

    Raises:
        TerminatedError: If termination was requested before the store serves; by then, no rank runs.
        Exception: If not every rank could be started, or the store does not serve; by then, no rank runs.

    """
    rendezvous = Rendezvous() if lease is None else Rendezvous(lease.host)
    try:
        specs = _place(first_rank_at(rendezvous.address), lease)
        gang = Gang(specs, hang_timeout_s, () if lease is None else lease.machines, logs)
        try:
            gang.start()
            termination.wait_for(import_torch)  # while the ranks do so
            return gang, rendezvous.serve()
        except BaseException as exc:
            rendezvous.close()  # the ranks must not wait for it
            gang.stop(f"stopped: {exc}" if isinstance(exc, TerminatedError) else f"not every rank could be started: {exc!r}")
            raise
    finally:
        rendezvous.close()  # no effect once it serves


def _place(first: RankSpec, lease: Lease | None) -> list[RankSpec]:
    """Return the ranks of an attempt, on the machines of its lease, or all on this one."""
    if lease is None:
        return on_machines(first, (first.world_size,))
    machines = {machine.address: machine.name for machine in lease.machines}
    return on_machines(replace(first, master_host=lease.machines[0].address, machines=machines), lease.num_ranks, lease.names)
