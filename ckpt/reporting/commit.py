"""The commit of one checkpoint: every rank stores its files, then rank 0 writes the manifest, last."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.context import TrainContext
from prefect_torch.ckpt.errors import CommitFailedError, FencedError, ReportMismatchError, StorageError, StorageFullError
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from prefect_torch.ckpt.reporting.exchange.remote_error import RemoteError, raise_error
from prefect_torch.ckpt.runs.attempts.claims import check_fence
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest, attempt_of, merge_files
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.local_files.names import find_kept_as_one
from prefect_torch.ckpt.storage.machine.mounts import shared_mount_of
from prefect_torch.ckpt.storage.protocol import Transfer
from prefect_torch.ckpt.storage.sizes import OtherSizeError, find_other_size, wait_for_sizes
from prefect_torch.ckpt.storage.specs.location import is_one_place
from prefect_torch.ckpt.storage.synced.transport import Transport
from prefect_torch.ckpt.text import utc_now

from .background import BackgroundCommits
from .events import CommitEvent, EventSender, ReportEvent
from .overhead import CommitCosts
from .rank_part import CommitJob, RankPart, StagedReport, decode_parts, store_part

_logger = logging.getLogger(__name__)

_LOOKED_S = 60.0  # how long a look for newer attempts holds; their garbage collection spares an hour's data
_ALL_STORE = "a commit takes until every rank has stored its files"


class RankCommits:
    """The commits of one rank in one attempt, immediate or in the background: in order, each continuing the previous one.

    Args:
        run: The run.
        claim: The key of the attempt's claim; None if nothing is reported.
        peers: The ranks.
        background: This rank's background commits.
        events: The sender that reports to the leader.
        context: This rank's place in the attempt.
        restored: The checkpoint that the attempt begins from, which the first commit continues.

    Attributes:
        costs: The costs of these commits for the training.
        committed_step: The step of the run's newest checkpoint that is durable; -1 before the first.

    """

    def __init__(
        self,
        run: Run,
        claim: str | None,
        peers: Peers,
        background: BackgroundCommits,
        events: EventSender,
        context: TrainContext,
        restored: Checkpoint | None,
    ) -> None:
        self.costs = CommitCosts()
        self._run = run
        self._claim = claim
        self._peers = peers
        self._background = background
        self._events = events
        self._context = context
        self._decided: list[str] = []  # the topics of the previous commit
        self._has_warned_of_empty = False
        self._parent = None if restored is None else _name_from(run, restored)
        self.committed_step = restored.step if restored is not None and belongs_to(run, restored) else -1

    def commit(self, staged: StagedReport) -> None:
        """Commit the checkpoint of a report, if it has one, and send the report to the leader.

        When this returns, the checkpoint of a synchronous report is durable, and that of an asynchronous one is under way.
        """
        report, agreement = staged.report, staged.agreement
        if agreement.checkpoint_id is not None:
            self.costs.num_begun, self.costs.begun_s = self.costs.num_begun + 1, time.monotonic()
            if not agreement.is_background:
                self._commit(staged)
        if self._peers.rank == 0:
            record = MetricRecord(self._context.attempt, agreement.step, report.metrics, agreement.checkpoint_id, utc_now())
            self._events.send(ReportEvent(record, report.progress))
        if agreement.is_background:  # last: from here on two threads compete for the GIL
            self._background.submit(agreement.step, lambda: self._commit(staged))

    def _commit(self, staged: StagedReport) -> None:
        started_s = time.monotonic()
        assert self._claim is not None, "an attempt commits, and each has a claim"
        job = CommitJob(staged, self._claim, self._parent, self._context.local_world_size)
        try:
            manifest = commit(self._run, self._peers, job)
            if not staged.agreement.is_background:  # else `release` removes them
                staged.remove(job.moved)
            if manifest is not None:
                self.costs.stall_s = manifest.timings["stall_s"]
        finally:
            self.costs.num_ended += 1
            self._forget_decisions(job.decided)
            staged.release()
        self._parent, self.committed_step = staged.checkpoint_id, staged.agreement.step
        if manifest is not None:
            self._warn_if_empty(manifest)
            costs = (manifest.total_bytes, time.monotonic() - started_s, manifest.timings["stall_s"])
            self._events.send(CommitEvent(manifest.id, manifest.step, manifest.metrics, *costs))

    def _warn_if_empty(self, manifest: Manifest) -> None:
        """Warn, once, of a checkpoint in which no rank has stored anything: a training that resumes from it begins anew."""
        if manifest.files or manifest.metadata or self._has_warned_of_empty:
            return
        self._has_warned_of_empty = True
        _logger.warning(
            "the checkpoint of step %d is empty, since no rank had a file in the directory that it reported; write the files "
            "before the report, or report the metrics alone",
            manifest.step,
        )

    def _forget_decisions(self, decided: list[str]) -> None:
        """Drop the decisions on the previous commit: every rank has read them, since all have reached this one."""
        if decided:
            for topic in self._decided:
                self._peers.forget_decision(topic)
            self._decided = decided


def _name_from(run: Run, checkpoint: Checkpoint) -> str | None:
    """Return the checkpoint's id, or its path where it belongs to another run."""
    return checkpoint.id if belongs_to(run, checkpoint) else checkpoint.path


def belongs_to(run: Run, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a committed one of `run`: another run may have the same name in another storage."""
    store = checkpoint.store
    return store is not None and store.path == run.path and is_one_place(store.spec, run.spec)


def commit(run: Run, peers: Peers, job: CommitJob) -> Manifest | None:
    """Store this rank's files and return once the manifest of all ranks is durable; rank 0 returns it.

    Costs a put per file and one for the manifest, one listing for the fence, and two exchanges between the ranks. A bucket also
    costs a listing of the files and a request for the manifest's size, a directory a listing of the files if other machines
    stored some. An error on any rank is raised on all of them, and then there is no checkpoint. When the storage is full,
    garbage is removed from it and the commit is tried once more.

    Raises:
        CommitFailedError: If a rank could not store its part, or is lost, or rank 0 does not see another machine's files.
        StorageFullError: If there is no space.
        FencedError: If a newer attempt owns the run.
        ReportMismatchError: If ranks reported different bytes under one name.

    """
    topic = job.staged.agreement.topic
    try:
        return _try_commit(run, peers, job, topic)
    except StorageFullError as exc:  # every rank raises it, or none does
        room = f"{topic}/room"
        job.decided.append(room)
        if peers.rank == 0:
            _logger.warning("%s; removing garbage and trying once more", exc)
            _remove("garbage", lambda: collect_garbage(run))
            peers.decide(room, b"")
        else:
            peers.decision(room, reason="it removes garbage, since the storage is full")
    try:
        return _try_commit(run, peers, job, f"{topic}/again")
    except StorageFullError:
        if peers.rank == 0:  # else its parts would occupy the space that the next report needs
            _remove("the files of the failed commit", lambda: _discard(run, job.staged.checkpoint_id))
        raise


def _remove(what: str, remove: Callable[[], object]) -> None:
    try:
        remove()
    except Exception as exc:  # noqa: BLE001 - the other ranks wait for what follows
        _logger.warning("%s could not be removed, so the storage stays as full as it is: %s", what, exc)


def _discard(run: Run, checkpoint_id: str) -> None:
    run.storage.delete([run.layout.manifest(checkpoint_id)])
    run.storage.delete([info.key for info in run.storage.list(run.layout.data(checkpoint_id))])


def _try_commit(run: Run, peers: Peers, job: CommitJob, topic: str) -> Manifest | None:
    parts = peers.exchange(f"{topic}/files", store_part(run, job, peers.rank), reason=_ALL_STORE)
    decided = f"{topic}/commit"
    job.decided.append(decided)
    if parts is None:
        data = peers.decision(decided, reason=_ALL_STORE)
        peers.forget_message(f"{topic}/files")
        raise_error(data)
        return None
    peers.forget_message(f"{topic}/files")
    manifest: Manifest | None = None
    decision = b"{}"
    try:
        manifest = write_manifest(run, job, decode_parts(parts))
    except Exception as exc:  # noqa: BLE001 - raised below, and on the other ranks, which wait for the decision
        decision = RemoteError.of(exc).encode()
    raise_error(peers.decide(decided, decision))
    return manifest


def write_manifest(run: Run, job: CommitJob, parts: Sequence[RankPart]) -> Manifest:
    """Write the manifest: from here on the checkpoint exists."""
    staged = job.staged
    all_stored_s = staged.elapsed_s()
    files = merge_files([*(part.files for part in parts), _store_index(run, staged.checkpoint_id, parts)])
    key = run.layout.manifest(staged.checkpoint_id)
    has_to_be_asked = run.storage.local_path(key) is None  # a local file is compared before it gets its name
    if has_to_be_asked:
        _check_stored(run, job, files)
    elif Transport.of(run.spec.options) is None:  # else each machine has only its own files
        _check_seen(run, job, [entry for entry in files if entry.rank >= job.num_here])
    _check_distinct(run, staged.checkpoint_id, files)
    manifest = Manifest(
        id=staged.checkpoint_id,
        step=staged.agreement.step,
        attempt=attempt_of(staged.checkpoint_id),
        metrics=staged.report.metrics,
        files=files,
        world_size=len(parts),
        parent=job.parent,
        created_at=datetime.now(timezone.utc),
        metadata=staged.agreement.metadata,
        timings=_timings(staged, parts, all_stored_s),
    )
    data = manifest.encode()
    _put_last(run, job, key, manifest, data)
    if has_to_be_asked:
        _check_committed(run, job.claim, key, len(data))
    return manifest


def _put_last(run: Run, job: CommitJob, key: str, manifest: Manifest, data: bytes) -> None:
    """Commit, unless a newer attempt owns the run, which is looked for again if the manifest took long.

    A storage was away, or this machine slept. A newer attempt may have deleted the data as garbage meanwhile, and would keep
    the checkpoint for its score. A whole checkpoint stays: it was perhaps there in time, and that attempt restores it.

    Raises:
        FencedError: If a newer attempt owns the run.

    """
    check_fence(run, job.claim)
    looked_s = time.time()  # which goes on while a machine sleeps
    run.storage.put_bytes(key, data)  # last: this is the commit
    if time.time() - looked_s > _LOOKED_S:
        try:
            check_fence(run, job.claim)
        except FencedError:
            if not _has_data(run, job, manifest):
                run.storage.delete([key])
            raise


def _has_data(run: Run, job: CommitJob, manifest: Manifest) -> bool:
    """Return whether the files of a checkpoint are there; of a synced directory, those of this machine."""
    is_synced = Transport.of(run.spec.options) is not None
    folder = run.layout.data(manifest.id)
    here = [entry for entry in manifest.files if entry.rank < job.num_here or not is_synced]
    return find_other_size(run.storage, folder, {f"{folder}{entry.path}": entry.bytes for entry in here}) is None


def _check_committed(run: Run, claim: str, key: str, expected: int) -> None:
    """Compare a manifest with what the bucket has acknowledged; one that it does not have is deleted, should it appear.

    Raises:
        CommitFailedError: If the bucket does not have it until the retries end.
        FencedError: If the reason is that a newer attempt owns the run, or that the run was deleted.

    """
    try:
        _require_acknowledged(run, claim, key, {key: expected})
    except CommitFailedError:
        with suppress(StorageError, OSError):
            run.storage.delete([key])
        raise


def _check_distinct(run: Run, checkpoint_id: str, files: Sequence[FileEntry]) -> None:
    """Raise if a local storage keeps two stored files as one.

    Raises:
        ReportMismatchError: If it does so: the one that was stored first is lost.

    """
    folder = run.storage.local_path(run.layout.data(checkpoint_id))
    if (problem := find_kept_as_one(folder, (entry.path for entry in files))) is not None:
        raise ReportMismatchError(f"the filesystem of {run.path} {problem}: rename one of them")


def _check_stored(run: Run, job: CommitJob, files: Sequence[FileEntry]) -> None:
    """Compare what a bucket has with what it acknowledged: no prune may delete an older checkpoint for one without files.

    Raises:
        CommitFailedError: If a file is missing, or of another size, until the retries end.
        FencedError: If the reason is that a newer attempt owns the run, or that the run was deleted.

    """
    if files:
        folder = run.layout.data(job.staged.checkpoint_id)
        _require_acknowledged(run, job.claim, folder, {f"{folder}{entry.path}": entry.bytes for entry in files})


def _require_acknowledged(run: Run, claim: str, place: str, sizes: Mapping[str, int]) -> None:
    try:
        wait_for_sizes(run.storage, place, sizes, lambda: check_fence(run, claim))
    except OtherSizeError as exc:
        raise CommitFailedError(
            f"{run.storage.url} has acknowledged {sizes[exc.key]} bytes of {exc.key}, and has "
            f"{'no such object' if exc.size is None else exc.size}: it loses writes; the previous checkpoint is still "
            "the latest"
        ) from exc


def _check_seen(run: Run, job: CommitJob, files: Sequence[FileEntry]) -> None:
    """Wait until this machine sees the files that other machines have stored in a directory.

    A checkpoint that is committed earlier would count as damaged at a start on this machine.

    Raises:
        StorageError: If it does not see them until the retries end.
        FencedError: If the reason is that a newer attempt owns the run, or that the run was deleted.

    """
    if not files:
        return
    prefix = run.layout.data(job.staged.checkpoint_id)
    entries = {f"{prefix}{entry.path}": entry for entry in files}
    sizes = {key: entry.bytes for key, entry in entries.items()}
    try:
        wait_for_sizes(run.storage, prefix, sizes, lambda: check_fence(run, job.claim))
    except OtherSizeError as exc:
        mount = shared_mount_of(Path(run.storage.url))
        raise StorageError(
            f"rank 0's machine sees {exc.size or 0} of the {sizes[exc.key]} bytes that rank {entries[exc.key].rank} has stored "
            f"on another one in {exc.key}; mount the directory{'' if mount is None else f' ({mount})'} so that each machine "
            "immediately sees the files of others: rclone with --dir-cache-time 0s"
        ) from exc


def _store_index(run: Run, checkpoint_id: str, parts: Sequence[RankPart]) -> list[FileEntry]:
    if all(part.state is None for part in parts):
        return []
    from prefect_torch.ckpt.state.index_files import store_index  # noqa: PLC0415 - torch, for states only

    def put(path: str, buffers: Sequence[memoryview]) -> Transfer:
        return run.storage.put_buffers(run.layout.data(checkpoint_id, path), buffers)

    return store_index([part.state for part in parts], put)


def _timings(staged: StagedReport, parts: Sequence[RankPart], all_stored_s: float) -> dict[str, float]:
    """Return the times of the commit; the rank whose report began first waited longest, so each counts by its own clock."""
    since_then_s = staged.elapsed_s() - all_stored_s
    durable_s = max(all_stored_s, *(part.stored_s for part in parts)) + since_then_s
    return {"stall_s": max(durable_s if part.stall_s is None else part.stall_s for part in parts), "durable_s": durable_s}
