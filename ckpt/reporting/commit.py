"""The commit of one checkpoint: every rank stores its files, then rank 0 writes the manifest, last."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_torch.ckpt.errors import CheckpointError, CommitFailedError, StorageFullError
from prefect_torch.ckpt.runs.attempts import check_fence
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest, attempt_of
from prefect_torch.ckpt.runs.metrics import Metrics
from prefect_torch.ckpt.runs.pruning import collect_garbage
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.digest import digest_file
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import Transfer

from .agreement import Agreement, merge_files
from .peers import Peers
from .remote_error import RemoteError

if TYPE_CHECKING:
    from prefect_torch.ckpt.state.save import StagedState

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankPart:
    """One rank's part of a checkpoint.

    Attributes:
        directory: The directory of its files.
        files: Their paths.
        metadata: The user's metadata.
        state: Its share of a state, staged.
        problem: The error because of which it cannot store them after all.

    """

    directory: Path | None = None
    files: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    state: "StagedState | None" = None
    problem: Exception | None = None


@dataclass(frozen=True, slots=True)
class CommitJob:
    """One rank's share of a commit.

    Attributes:
        topic: The name of this report, unique in the attempt.
        agreement: The ranks' agreement, with an id.
        brought: This rank's files.
        metrics: Rank 0's metrics.
        started_s: When the report began, by this process's monotonic clock.
        stall_s: How long the training waited for the report; None where it waits for the commit.
        parent: The checkpoint that this one continues.
        stored: The files of it that this rank has stored, by path.
        decided: The topics under which rank 0 has sent its decisions on it.

    """

    topic: str
    agreement: Agreement
    brought: RankPart
    metrics: Metrics
    started_s: float = field(default_factory=time.monotonic)
    stall_s: float | None = None
    parent: str | None = None
    stored: dict[str, FileEntry] = field(default_factory=dict)
    decided: list[str] = field(default_factory=list)

    @property
    def checkpoint_id(self) -> str:
        """The id to commit under."""
        assert self.agreement.checkpoint_id is not None
        return self.agreement.checkpoint_id

    def elapsed_s(self) -> float:
        """Return how long ago the report began."""
        return time.monotonic() - self.started_s


@dataclass(frozen=True, slots=True)
class Part:
    """The files and the share of a state that one rank stored.

    Attributes:
        files: Its files.
        state: The index entries of its share of a state, or None.
        stall_s: How long its training waited for the report; None where it waits for the commit.
        stored_s: The time from the start of its report until all files were stored. Both times are by the rank's own clock:
            monotonic clocks of processes begin anywhere, and ranks do not begin a report together.

    """

    files: Sequence[FileEntry] = ()
    state: dict[str, Any] | None = None
    stall_s: float | None = None
    stored_s: float = 0.0


def commit(run: Run, peers: Peers, job: CommitJob) -> Manifest | None:
    """Store this rank's files and return once the manifest of all ranks is durable; rank 0 returns it.

    Costs a put per file and one for the manifest, one listing for the fence, and two exchanges between the ranks. An error on
    any rank is raised on all of them, and then there is no checkpoint. When the storage is full, garbage is removed from it
    and the commit is tried once more.

    Raises:
        CommitFailedError: If a rank could not store its part, or is lost.
        StorageFullError: If there is no space.
        FencedError: If a newer attempt owns the run.
        ReportMismatchError: If ranks reported different bytes under one name.

    """
    try:
        return _try_commit(run, peers, job)
    except StorageFullError as exc:  # every rank raises it, or none does
        room = f"{job.topic}/room"
        if peers.rank == 0:
            _logger.warning("%s; removing garbage and trying once more", exc)
            _remove("garbage", lambda: collect_garbage(run))
            job.decided.append(room)
            peers.decide(room, b"")
        else:
            peers.decision(room)
    try:
        return _try_commit(run, peers, replace(job, topic=f"{job.topic}/again"))
    except StorageFullError:
        if peers.rank == 0:  # else its parts would occupy the space that the next report needs
            _remove("what was stored of it", lambda: _discard(run, job.checkpoint_id))
        raise


def _remove(what: str, remove: Callable[[], object]) -> None:
    try:
        remove()
    except (CheckpointError, OSError) as exc:
        _logger.warning("%s could not be removed, so the storage stays as full as it is: %s", what, exc)


def _discard(run: Run, checkpoint_id: str) -> None:
    run.storage.delete([run.layout.manifest(checkpoint_id)])
    run.storage.delete([info.key for info in run.storage.list(run.layout.data(checkpoint_id))])


def _try_commit(run: Run, peers: Peers, job: CommitJob) -> Manifest | None:
    parts = peers.exchange(f"{job.topic}/files", _encode_part(lambda: store_part(run, job, peers.rank)))
    decided = f"{job.topic}/commit"
    if parts is None:
        data = peers.decision(decided)
        peers.forget(f"{job.topic}/files")
        _raise_refusal(data)
        return None
    manifest: Manifest | None = None

    def write() -> Part:
        nonlocal manifest
        manifest = write_manifest(run, job, [_decode_part(rank, part) for rank, part in enumerate(parts)])
        return Part()

    job.decided.append(decided)
    _raise_refusal(peers.decide(decided, _encode_part(write)))
    return manifest


def store_part(run: Run, job: CommitJob, rank: int) -> Part:
    """Store every file of this rank that is not stored yet, and its share of a state."""
    files = store_files(run, job, rank)
    if job.brought.state is None:
        return Part(files, None, job.stall_s, job.elapsed_s())

    def put(path: str, parts: Sequence[memoryview]) -> Transfer:
        if (known := job.stored.get(path)) is not None:
            return Transfer(known.bytes, known.digest)
        moved = run.storage.put_buffers(run.layout.data(job.checkpoint_id, path), parts)
        job.stored[path] = FileEntry(path, moved.bytes, moved.digest, rank)
        return moved

    of_state, state = job.brought.state.store(put)
    return Part([*files, *of_state], state, job.stall_s, job.elapsed_s())


def store_files(run: Run, job: CommitJob, rank: int) -> list[FileEntry]:
    """Store the files that this rank owns and that are not stored yet, several at a time, and digest the others."""
    directory, files = job.brought.directory, job.brought.files
    if job.brought.problem is not None:
        raise job.brought.problem
    if directory is None or not files:
        return []

    def store_file(path: str) -> FileEntry:
        if path in job.stored:
            return job.stored[path]
        if job.agreement.owners.get(path, rank) == rank:
            moved = run.storage.put_file(run.layout.data(job.checkpoint_id, path), directory / path)
        else:
            moved = digest_file(directory / path)
        job.stored[path] = FileEntry(path, moved.bytes, moved.digest, rank)
        return job.stored[path]

    return for_each(files, store_file)


def write_manifest(run: Run, job: CommitJob, parts: Sequence[Part]) -> Manifest:
    """Write the manifest: from here on the checkpoint exists."""
    all_stored_s = job.elapsed_s()
    files = merge_files([*(part.files for part in parts), _store_index(run, job, parts)])
    manifest = Manifest(
        id=job.checkpoint_id,
        step=job.agreement.step,
        attempt=attempt_of(job.checkpoint_id),
        metrics=job.metrics,
        files=files,
        world_size=len(parts),
        parent=job.parent,
        created_at=datetime.now(timezone.utc),
        metadata=job.agreement.metadata,
        timings=_timings(job, parts, all_stored_s),
    )
    check_fence(run, manifest.attempt)
    run.storage.put_bytes(run.layout.manifest(manifest.id), manifest.encode())  # last: this is the commit
    return manifest


def _store_index(run: Run, job: CommitJob, parts: Sequence[Part]) -> list[FileEntry]:
    if all(part.state is None for part in parts):
        return []
    from prefect_torch.ckpt.state.index_files import store_index  # noqa: PLC0415 - torch, for states only

    def put(path: str, buffers: Sequence[memoryview]) -> Transfer:
        return run.storage.put_buffers(run.layout.data(job.checkpoint_id, path), buffers)

    return store_index([part.state for part in parts], put)


def _timings(job: CommitJob, parts: Sequence[Part], all_stored_s: float) -> dict[str, float]:
    """Return the times of the commit; the rank whose report began first waited longest, so each counts by its own clock."""
    since_then_s = job.elapsed_s() - all_stored_s
    durable_s = max(all_stored_s, *(part.stored_s for part in parts)) + since_then_s
    return {"stall_s": max(durable_s if part.stall_s is None else part.stall_s for part in parts), "durable_s": durable_s}


def _encode_part(work: Callable[[], Part]) -> bytes:
    try:
        part = work()
    except Exception as exc:  # noqa: BLE001 - all ranks must receive any error rather than wait
        return json.dumps({"refusal": asdict(RemoteError.of(exc))}).encode()
    files = [asdict(entry) for entry in part.files]
    return json.dumps({"files": files, "state": part.state, "stall_s": part.stall_s, "stored_s": part.stored_s}).encode()


def _decode_part(rank: int, data: bytes) -> Part:
    part = json.loads(data)
    if "refusal" in part:
        kind = StorageFullError if part["refusal"]["kind"] == StorageFullError.__name__ else CommitFailedError
        raise kind(
            f"rank {rank} could not store its part: {part['refusal']['message']}; the previous checkpoint is still the latest"
        )
    return Part([FileEntry(**entry) for entry in part["files"]], part["state"], part["stall_s"], part["stored_s"])


def _raise_refusal(data: bytes) -> None:
    decision = json.loads(data)
    if "refusal" in decision:
        raise RemoteError(**decision["refusal"]).error()
