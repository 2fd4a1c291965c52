"""The start of an attempt: the claim on the run, and the checkpoint that the ranks resume from."""

from dataclasses import asdict, dataclass, field

from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, RunBusyError
from prefect_torch.ckpt.files.download import NodeCopy
from prefect_torch.ckpt.runs.attempts import Attempt, claim_attempt, claim_unless_led, newest_attempt, record_resumed_from
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.runs.standing import standing_of
from prefect_torch.ckpt.storage.synced.first_download import download_run
from prefect_torch.tasks.liveness import has_ended
from prefect_torch.tasks.options.config import RunConfig
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef

from .job import TrainJob
from .left_task_runs import end_left_task_runs
from .observers import CheckpointQuarantined, Observers
from .restarts import Restarts
from .unusable_storage import unusable_storage_explained


def claim(store: CheckpointStore, job: TrainJob, restarts: Restarts) -> Attempt:
    """Claim the next attempt of the run, which fences the process that led it before.

    Raises:
        RunBusyError: If another flow run that is alive leads this run, unless the job takes it over.
        RestartsUsedUpError: If the flow run was started again though a budget was used up.
        OSError: If the storage is refused, or its directory cannot be made.

    """
    with unusable_storage_explained(job.run_config.storage, store.storage.url):
        return _claim(store, job, restarts)


def _claim(store: CheckpointStore, job: TrainJob, restarts: Restarts) -> Attempt:
    owner = restarts.owner
    download_run(job.storage, job.run)
    restarts.refuse_if_used_up(store)

    before: Attempt | None = None

    def claim_after(previous: Attempt | None) -> Attempt:
        nonlocal before
        before = previous
        if previous is not None and previous.world_size == 0:
            raise ValueError(f"run {store.run!r} in {store.storage.url} is a sweep, so a training needs another name")
        return claim_attempt(
            store,
            owner,
            world_size=job.scaling.most_workers,
            lineage=lineage_of(previous, job.run_config, owner.flow_run_id),
            settings=asdict(job.policy),
        )

    if job.run_config.takeover:
        return claim_after(newest_attempt(store))
    claimed = claim_unless_led(store, lambda attempt: refuse_if_alive(store, attempt, owner.flow_run_id), claim_after)
    if before is not None:
        end_left_task_runs(before, owner)
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

    """

    restored: CheckpointRef | None = None
    path: str | None = None
    own: Manifest | None = None
    node_copy: NodeCopy = field(default_factory=NodeCopy)


def choose_start(store: CheckpointStore, job: TrainJob, attempt: Attempt, observers: Observers) -> Start:
    """Return the checkpoint that every rank of a claimed attempt starts from.

    To be called after the claim, so that no commit of an overtaken process is missed. Reads the manifest once, and every byte
    of a checkpoint in a bucket once for all ranks of this node.

    Raises:
        CheckpointNotFoundError: If the job must resume and there is nothing to resume from.
        CheckpointCorruptError: If there are checkpoints and all are damaged.

    """
    node_copy = NodeCopy()
    try:
        chosen = _choose(store, job, attempt.lineage, observers, node_copy)
        if chosen is None:
            return Start()
        checkpoint = chosen.open()
        record_resumed_from(store, attempt, checkpoint.path)
    except BaseException:
        node_copy.release()
        raise
    return Start(chosen, checkpoint.path, None if chosen == job.initial_checkpoint else checkpoint.manifest, node_copy)


def lineage_of(previous: Attempt | None, run: RunConfig, flow_run_id: str | None) -> int | None:
    """Return the first attempt whose checkpoints the next one may restore; None if that is the next one itself."""
    if previous is None:
        return None
    is_new_lineage = run.resume == "never" and previous.owner.flow_run_id != flow_run_id
    return None if is_new_lineage else previous.lineage


def _choose(
    store: CheckpointStore, job: TrainJob, lineage: int, observers: Observers, node_copy: NodeCopy
) -> CheckpointRef | None:
    manifest = choose_checkpoint(
        store,
        lineage=lineage,
        verify=job.run_config.verify,
        prove=node_copy.verify,
        on_quarantine=lambda checkpoint_id, reason: observers.notify(CheckpointQuarantined(checkpoint_id, reason)),
    )
    if manifest is not None:
        return CheckpointRef(job.storage, job.run, manifest.id).with_manifest(manifest)
    if job.initial_checkpoint is not None:
        download_run(job.initial_checkpoint.storage, job.initial_checkpoint.run)
        initial = job.initial_checkpoint.open()
        assert initial.store is not None
        node_copy.verify(initial.store, initial.manifest, job.run_config.verify)
        return job.initial_checkpoint.with_manifest(initial.manifest)
    if job.run_config.resume == "must":
        raise CheckpointNotFoundError(
            f"run {store.run!r} in {store.storage.url} has no checkpoint to resume from, and resume='must' asks for one"
        )
    return None


def refuse_if_alive(store: CheckpointStore, previous: Attempt, flow_run_id: str | None) -> None:
    """Raise RunBusyError if another flow run that is alive leads the run.

    Args:
        store: The run.
        previous: Its newest attempt.
        flow_run_id: The flow run that would lead it next; None if it is yet to be created.

    Raises:
        RunBusyError: If it does.

    """
    owner = previous.owner
    if flow_run_id is not None and owner.flow_run_id == flow_run_id:
        return  # this flow run's own earlier try
    if not standing_of(store, previous).may_be_alive:
        return
    if owner.flow_run_id is not None and has_ended(owner.flow_run_id):
        return
    raise RunBusyError(
        f"run {store.run!r} in {store.storage.url} is being trained by flow run {owner.flow_run_id} "
        f"(process {owner.pid} on {owner.machine}, attempt {previous.number}, since {previous.claimed_at}); "
        "wait for it, cancel it, choose another name, or give takeover=True"
    )
