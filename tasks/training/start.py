"""The start of an attempt: the claim on the run, and the checkpoint that the ranks resume from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from prefect_torch.ckpt import Checkpoint, CheckpointCorruptError, CheckpointNotFoundError, CheckpointStore
from prefect_torch.ckpt.files.node_copy import NodeCopy
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, record_resumed_from
from prefect_torch.ckpt.runs.attempts.begun import has_begun
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.synced.first_download import download_run
from prefect_torch.tasks.options.config import RunConfig
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef

from .job import TrainJob
from .leadership import Claimant, claim_run
from .left_task_runs import end_left_task_runs
from .observers import CheckpointQuarantined, Observers
from .restarts import Restarts
from .source_pin import SourcePin


def claim(
    store: CheckpointStore, job: TrainJob, restarts: Restarts, raise_if_requested: Callable[[], None] = lambda: None
) -> Attempt:
    """Claim the next attempt of the run, which fences the process that led it before; for the last argument, see `claim_run`.

    Raises:
        RunBusyError: If another flow run that is alive leads this run, unless the job takes it over.
        ValueError: If the run is a sweep.
        RestartsUsedUpError: If the flow run was started again though a budget was used up.
        CheckpointNotFoundError: If the job must resume and there is no such run.
        OSError: If access to the storage is denied, or its directory cannot be created.

    """
    claimant = Claimant(
        restarts.owner,
        job.run_config,
        job.restarted,
        job.scaling.most_workers,
        asdict(job.policy),
        is_alone=job.scaling.cluster is None,
    )

    def check() -> None:
        restarts.refuse_if_used_up(store)
        if job.run_config.resume == "must" and job.initial_checkpoint is None and not has_begun(store):
            raise nothing_to_resume(store)  # a wrong name begins no run

    claimed, before = claim_run(store, claimant, check, raise_if_requested)
    if before is not None:
        end_left_task_runs(before, restarts.owner, store.run)
    return claimed


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that the ranks of an attempt start from.

    Attributes:
        restored: The checkpoint that all ranks restore, with its manifest, so that no rank reads that again; None on a fresh
            start.
        path: Its path or URL.
        own: Its manifest if it is a checkpoint of this run, else None.
        node_copy: The bytes that were read to verify it, to be released once the ranks have restored it.
        source_pin: Keeps the checkpoint of another run, to be removed once this run commits its own; an attempt that was killed
            right after its first commit may have left it. None if nothing is pinned.

    """

    restored: CheckpointRef | None = None
    path: str | None = None
    own: Manifest | None = None
    node_copy: NodeCopy = field(default_factory=NodeCopy)
    source_pin: SourcePin | None = None


def choose_start(store: CheckpointStore, job: TrainJob, attempt: Attempt, observers: Observers) -> Start:
    """Return the checkpoint that every rank of a claimed attempt starts from.

    To be called after the claim, so that no commit of an overtaken process is missed. Reads the manifest once, and every byte
    of a checkpoint in a bucket once for all ranks of this node. A checkpoint of another run is pinned first, since that run's
    prunes do not know that it is in use; a sweep has pinned the checkpoints that its trials start from.

    Raises:
        CheckpointNotFoundError: If the job must resume and there is nothing to resume from.
        CheckpointCorruptError: If there are checkpoints and all are damaged.

    """
    node_copy = NodeCopy()
    is_pinned_by_sweep = job.decisions is not None
    pin = None if job.initial_checkpoint is None or is_pinned_by_sweep else SourcePin(job.initial_checkpoint, store)
    try:
        checkpoint, is_own = _choose(store, job, attempt.lineage, observers, node_copy, pin)
        if checkpoint is None:
            return Start()
        record_resumed_from(store, attempt, checkpoint.path)
    except BaseException:
        node_copy.release()
        raise
    ref = CheckpointRef(job.storage, job.run, checkpoint.manifest.id) if is_own else job.initial_checkpoint
    assert ref is not None
    own = checkpoint.manifest if is_own else None
    return Start(ref.with_manifest(checkpoint.manifest), checkpoint.path, own, node_copy, pin)


def _choose(
    store: CheckpointStore,
    job: TrainJob,
    lineage: int,
    observers: Observers,
    node_copy: NodeCopy,
    pin: SourcePin | None,
) -> tuple[Checkpoint | None, bool]:
    """Return the checkpoint to start from, and whether it is of the run itself."""
    manifest = choose_checkpoint(
        store,
        lineage=lineage,
        verify=job.run_config.verify,
        prove=node_copy.verify,
        on_quarantine=lambda checkpoint_id, reason: observers.notify(CheckpointQuarantined(checkpoint_id, reason)),
    )
    if manifest is not None:
        return store.checkpoint(manifest), True
    if job.initial_checkpoint is not None:
        with missing_run_named(job.initial_checkpoint):
            return _open_initial(job.initial_checkpoint, store, job.run_config, node_copy, pin), False
    if job.run_config.resume == "must":
        raise nothing_to_resume(store)
    return None, False


def nothing_to_resume(run: Run) -> CheckpointNotFoundError:
    """Return the error of a run without a checkpoint that must resume."""
    return CheckpointNotFoundError(
        f"run {run.name!r} in {run.storage.url} has no checkpoint to resume from, and resume='must' asks for one: correct the "
        "name or the storage (`prefect-torch ls STORAGE` lists the runs), or give resume='auto'"
    )


def _open_initial(
    initial: CheckpointRef, opened: CheckpointStore, run: RunConfig, node_copy: NodeCopy, pin: SourcePin | None
) -> Checkpoint:
    """Return the checkpoint of another run, verified and pinned."""
    download_run(initial.storage, initial.run)
    source = initial.open_run(opened)
    if pin is not None:
        pin.set(source)
    try:
        checkpoint = initial.open(source)
        node_copy.verify(source, checkpoint.manifest, run.verify)
    except CheckpointCorruptError:
        if pin is not None:  # no later attempt can start from it and remove the pin
            pin.remove()
        raise
    return checkpoint


@contextmanager
def missing_run_named(initial: CheckpointRef) -> Iterator[None]:
    """Raise that the run does not exist if its checkpoint was not found for that reason: its name or the storage is wrong."""
    try:
        yield
    except CheckpointNotFoundError as exc:
        run = Run.open(initial.storage, initial.run)
        if has_begun(run):
            raise
        what = (
            f"there is no run {run.name!r} in {run.storage.url}, so it has no checkpoint {initial.checkpoint_id}: correct the "
            "name or the storage (`prefect-torch ls STORAGE` lists the runs)"
        )
        raise CheckpointNotFoundError(what) from exc
