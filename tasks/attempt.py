"""The beginning of an attempt: whether this process may lead the run, and from which checkpoint the ranks go on."""

from dataclasses import asdict

from prefect import get_run_logger
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, RunBusyError
from prefect_torch.ckpt.attempts import (
    Attempt,
    Owner,
    claim_attempt,
    newest_attempt,
    read_outcome,
    record_resumed_from,
)
from prefect_torch.ckpt.resume import choose_checkpoint

from .audience import Audience, CheckpointQuarantined
from .checkpoint_ref import CheckpointRef
from .errors import PreemptedTooOftenError
from .job import TrainJob
from .liveness import has_ended
from .restarts import UNLIMITED, count_failures


def claim(store: CheckpointStore, job: TrainJob, flow_run_id: str | None) -> Attempt:
    """Claim the next attempt of the run, which fences off whoever led it before.

    Raises:
        RunBusyError: If another living flow run leads this run, unless the job takes it over.
        PreemptedTooOftenError: If the flow run was ended from outside more often than the job allows.

    """
    previous = newest_attempt(store)
    if previous is not None and not job.takeover:
        _refuse_if_alive(store, previous, flow_run_id)
    if job.max_preemptions != UNLIMITED:
        _refuse_if_used_up(store, job, flow_run_id)
    return claim_attempt(
        store,
        Owner.current(flow_run_id),
        world_size=job.num_workers,
        lineage=_lineage(previous, job, flow_run_id),
        settings=asdict(job.policy),
    )


def choose_start(store: CheckpointStore, job: TrainJob, attempt: Attempt, audience: Audience) -> CheckpointRef | None:
    """Return the checkpoint that every rank of a claimed attempt restores, or None on a fresh start.

    After the claim, so that nothing which an overtaken process still commits can be missed.

    Raises:
        CheckpointNotFoundError: If the job must resume and there is nothing to resume from.
        CheckpointCorruptError: If there are checkpoints and none is whole.

    """
    chosen = _choose(store, job, attempt.lineage, audience)
    if chosen is None:
        get_run_logger().info("attempt %d: starting from the beginning", attempt.number)
        return None
    checkpoint = chosen.open()
    get_run_logger().info("attempt %d: resuming from %s, step %d", attempt.number, checkpoint.id, checkpoint.step)
    record_resumed_from(store, attempt, checkpoint.path)
    return chosen


def _lineage(previous: Attempt | None, job: TrainJob, flow_run_id: str | None) -> int | None:
    if previous is None:
        return None
    begins_anew = job.resume == "never" and previous.owner.flow_run_id != flow_run_id
    return None if begins_anew else previous.lineage


def _choose(store: CheckpointStore, job: TrainJob, lineage: int, audience: Audience) -> CheckpointRef | None:
    manifest = choose_checkpoint(
        store,
        lineage=lineage,
        verify=job.verify,
        on_quarantine=lambda checkpoint_id, reason: audience.tell(CheckpointQuarantined(checkpoint_id, reason)),
    )
    if manifest is not None:
        return CheckpointRef(job.storage, job.run, manifest.id)
    if job.seed is not None:
        job.seed.open().verify(job.verify)
        return job.seed
    if job.resume == "must":
        raise CheckpointNotFoundError(
            f"run {store.run!r} in {store.storage.url} has no checkpoint to resume from, and resume='must' asks for one"
        )
    return None


def _refuse_if_alive(store: CheckpointStore, previous: Attempt, flow_run_id: str | None) -> None:
    owner = previous.owner
    if flow_run_id is not None and owner.flow_run_id == flow_run_id:
        return  # this flow run's own earlier try
    if read_outcome(store, previous.number) is not None or owner.is_dead():
        return
    if owner.flow_run_id is not None and has_ended(owner.flow_run_id):
        return
    raise RunBusyError(
        f"run {store.run!r} in {store.storage.url} is being trained by flow run {owner.flow_run_id} "
        f"(process {owner.pid} on {owner.host.partition('/')[0]}, attempt {previous.number}, since {previous.claimed_at}); "
        "wait for it, cancel it, choose another name, or give takeover=True"
    )


def _refuse_if_used_up(store: CheckpointStore, job: TrainJob, flow_run_id: str | None) -> None:
    """Look before an attempt: the process of the one before may not have lived to decide."""
    preemptions = count_failures(store, flow_run_id)["preemption"]
    if preemptions > job.max_preemptions:
        raise PreemptedTooOftenError(
            f"flow run {flow_run_id} trained run {store.run!r} and was ended from outside {preemptions} times, with "
            f"max_preemptions={job.max_preemptions}; a new flow run with this name continues the run"
        )
