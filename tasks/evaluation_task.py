"""The Prefect task that evaluates one checkpoint: a group of ranks runs the user's function, and its metrics are attached."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.transactions import CommitMode, transaction
from prefect_torch.ckpt import CheckpointError, CheckpointNotFoundError, CheckpointStore
from prefect_torch.ckpt.runs.attempts.begun import check_begun
from prefect_torch.ckpt.runs.evaluations import check_free
from prefect_torch.ckpt.runs.log_files import LogFiles
from prefect_torch.ckpt.runs.manifest import attempt_of
from prefect_torch.ckpt.runs.metrics import Metrics
from prefect_torch.tasks.gang.gang_run import GangRun
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.machine.lending import Lease, Machines
from prefect_torch.tasks.gang.machine.working_dir import WorkingDirectory
from prefect_torch.tasks.gang.rank_logs import RankLogs, rank_logs
from prefect_torch.tasks.gang.starting import first_rank, start_gang
from prefect_torch.tasks.gang.termination import Termination
from prefect_torch.tasks.options.config import LogLevel, LogRanks, ScalingConfig
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.errors import RankFailedError, show_traceback
from prefect_torch.tasks.rank.one_line_messages import shorten_message
from prefect_torch.tasks.rank.rendezvous import Address
from prefect_torch.tasks.rank.spec import RankSpec
from prefect_torch.tasks.rank.user_code.function import PackedFunction

from .run_logs import get_run_logger, library_logs_in_run


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """The evaluation of checkpoints.

    Attributes:
        function: The function that every rank runs.
        name: The name of the evaluation.
        scaling: The ranks and their devices.
        working_dir: The directory whose copy the ranks run in; None for the flow's own.
        log_ranks: The ranks whose lines go to Prefect; of the other ranks, only the last lines of one that fails.
        log_level: The lowest level of the lines that go to Prefect; None for all. All lines are stored beside the run if some
            do not go to Prefect.

    """

    function: PackedFunction
    name: str
    scaling: ScalingConfig
    working_dir: WorkingDirectory | None
    log_ranks: LogRanks
    log_level: LogLevel | None


@task(
    name="evaluate_checkpoint",
    task_run_name="{job.name}-{checkpoint.checkpoint_id}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
def evaluate_checkpoint(
    job: EvaluationJob,
    checkpoint: CheckpointRef,
    gpus: GpuAllocation | None = None,
    machines: Machines | None = None,
    termination: Termination | None = None,
) -> Metrics | None:
    """Return the metrics of `checkpoint`, which are attached to it when this returns; None if it was pruned meanwhile.

    Claims no attempt of the run, so it may run during its training. No rank's process outlives this call, however it ends.

    Args:
        job: The evaluation.
        checkpoint: The checkpoint.
        gpus: The GPUs of the ranks, which are taken for the duration of this call; None if they use no GPUs of this machine.
        machines: The machines of the ranks, which are leased for the duration of this call; None for this machine.
        termination: Whether the flow run is being terminated; None for a new Termination without grace.

    Raises:
        Exception: The exception of the failing rank's function, raised from the RankFailedError that has its traceback.
        RankFailedError: If a rank died, or its exception cannot be rebuilt here.
        ValueError: If the training itself reported a metric with the evaluation's name, or one below it.
        FileNotFoundError: If there is no such run.
        CheckpointError: If the checkpoint's manifest is damaged, or the storage fails.
        GpusBusyError: If others use the GPUs that the ranks need, longer than the evaluation waits for them.

    """
    gpus = gpus or GpuAllocation(0, None, job.name)
    store = CheckpointStore.open(checkpoint.storage, checkpoint.run)
    try:
        with library_logs_in_run():
            check_free(store.committed(checkpoint.checkpoint_id), job.name)  # fails before hours of work
            termination = termination or Termination(grace_s=0.0)
            metrics = termination.outlast(partial(_run, job, store, checkpoint, termination, gpus, machines))
            store.attach_metrics(checkpoint.checkpoint_id, metrics, job.name)
    except RankFailedError as exc:
        if _is_pruned(store, checkpoint.checkpoint_id):
            _log_skipped(checkpoint)
            return None
        if shown := show_traceback(exc):  # Prefect logs the exception alone
            get_run_logger().error("%s", shown)
        if exc.original is not None:
            raise shorten_message(exc.original) from exc
        raise
    except CheckpointNotFoundError:
        check_begun(store)  # else its run or the storage is misspelled
        _log_skipped(checkpoint)
        return None
    get_run_logger().info("%s of checkpoint %s: %s", job.name, checkpoint.checkpoint_id, metrics)
    return metrics


def _run(
    job: EvaluationJob,
    store: CheckpointStore,
    checkpoint: CheckpointRef,
    termination: Termination,
    gpus: GpuAllocation,
    machines: Machines | None,
) -> Metrics:
    try:
        gpus.take(termination.raise_if_requested)
        lent = nullcontext() if machines is None else machines.lend(termination.raise_if_requested)
        with lent as lease, _logs(job, store, checkpoint) as logs:
            if job.working_dir is not None:
                job.working_dir.store(store)  # only now: the machines may have been awaited for hours
            metrics = _run_ranks(job, checkpoint, termination, gpus, lease, logs)
    finally:
        gpus.release()
        if machines is not None:
            machines.close()
    if metrics is None:
        raise ValueError(f"{job.function.name} ended without metrics on rank 0: return a dict of them")
    return dict(metrics)


def _logs(job: EvaluationJob, store: CheckpointStore, checkpoint: CheckpointRef) -> AbstractContextManager[RankLogs]:
    files = LogFiles(store, store.layout.evaluation_logs(job.name, checkpoint.checkpoint_id))
    files.remove_former()
    return rank_logs(job.log_ranks, job.log_level, files)


def _run_ranks(
    job: EvaluationJob,
    checkpoint: CheckpointRef,
    termination: Termination,
    gpus: GpuAllocation,
    lease: Lease | None,
    logs: RankLogs,
) -> Any:
    # Without this transaction, Prefect marks the task runs of ranks as rolled back as soon as this task run fails.
    with transaction(commit_mode=CommitMode.EAGER):
        gang, key_value = start_gang(partial(_first_rank, job, checkpoint, gpus), None, termination, lease, logs)
        try:
            return GangRun(gang, key_value, None, termination).run()
        finally:
            gang.stop("the evaluation is over")
            key_value.close()


def _is_pruned(store: CheckpointStore, checkpoint_id: str) -> bool:
    try:
        store.committed(checkpoint_id)
    except CheckpointError as exc:  # if another one, such as of a storage that is away, that of the rank says more
        return isinstance(exc, CheckpointNotFoundError)
    return False


def _log_skipped(checkpoint: CheckpointRef) -> None:
    get_run_logger().warning(
        "checkpoint %s of run %r is skipped: it does not exist, or was pruned", checkpoint.checkpoint_id, checkpoint.run
    )


def _first_rank(job: EvaluationJob, checkpoint: CheckpointRef, gpus: GpuAllocation, rendezvous: Address) -> RankSpec:
    first = first_rank(
        job,
        gpus,
        rendezvous,
        storage=checkpoint.storage,
        run=checkpoint.run,
        attempt=attempt_of(checkpoint.checkpoint_id),
        restored=checkpoint,
    )
    return replace(first, evaluates=True)
