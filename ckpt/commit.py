"""The commit of one checkpoint: every rank stores its files, then rank 0 writes the manifest, last."""

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .agreement import Agreement, merge_files
from .attempts import check_fence
from .digest import digest_file
from .errors import CheckpointError, CommitFailedError, StorageFullError
from .manifest import FileEntry, Manifest, attempt_of
from .metrics import Metrics
from .peers import Peers
from .pruning import collect_garbage
from .refusal import Refusal
from .store import CheckpointStore

_PARALLEL_FILES = 8
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Brought:
    """What one rank brings to a checkpoint.

    Attributes:
        directory: Where its files are.
        files: Their paths.
        metadata: The user's.
        problem: Why it cannot store them after all.

    """

    directory: Path | None = None
    files: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    problem: OSError | None = None


@dataclass(frozen=True, slots=True)
class CommitJob:
    """One rank's share of a commit.

    Attributes:
        topic: Names this report among all of the attempt.
        agreement: What the ranks agreed on; it carries an id.
        brought: This rank's files.
        metrics: Rank 0's metrics.
        parent: What this checkpoint continues.
        stored: What this rank has stored of it, by path.

    """

    topic: str
    agreement: Agreement
    brought: Brought
    metrics: Metrics
    parent: str | None
    stored: dict[str, FileEntry] = field(default_factory=dict)

    @property
    def checkpoint_id(self) -> str:
        """The id to commit under."""
        assert self.agreement.checkpoint_id is not None
        return self.agreement.checkpoint_id


def commit(store: CheckpointStore, peers: Peers, job: CommitJob) -> Manifest | None:
    """Store this rank's files and return once the manifest of all ranks is durable; rank 0 returns it.

    Costs a put per file and one for the manifest, one listing for the fence, and two exchanges between the ranks. Whatever
    goes wrong on any rank is raised on all of them, and then there is no checkpoint. A storage that is full is rid of garbage
    and tried once more.

    Raises:
        CommitFailedError: If a rank could not store its part, or is gone.
        StorageFullError: If there is no space.
        FencedError: If a newer attempt owns the run.
        ReportMismatchError: If ranks brought different bytes under one name.

    """
    try:
        return _try_commit(store, peers, job)
    except StorageFullError as exc:  # all ranks are here, or none is
        room = f"{job.topic}/room"
        if peers.rank == 0:
            _logger.warning("%s; removing garbage and trying once more", exc)
            _remove("garbage", lambda: collect_garbage(store))
            peers.decide(room, b"")
        else:
            peers.decision(room)
    try:
        return _try_commit(store, peers, replace(job, topic=f"{job.topic}/again"))
    except StorageFullError:
        if peers.rank == 0:  # else its parts would fill what the next report needs
            _remove("what was stored of it", lambda: _discard(store, job.checkpoint_id))
        raise


def _remove(what: str, remove: Callable[[], object]) -> None:
    try:
        remove()
    except (CheckpointError, OSError) as exc:
        _logger.warning("%s could not be removed, so the storage stays as full as it is: %s", what, exc)


def _discard(store: CheckpointStore, checkpoint_id: str) -> None:
    store.storage.delete([store.layout.manifest(checkpoint_id)])
    store.storage.delete([info.key for info in store.storage.list(store.layout.data(checkpoint_id))])


def _try_commit(store: CheckpointStore, peers: Peers, job: CommitJob) -> Manifest | None:
    parts = peers.exchange(f"{job.topic}/files", _encode_part(lambda: store_files(store, job, peers.rank)))
    decided = f"{job.topic}/commit"
    if parts is None:
        data = peers.decision(decided)
        peers.forget(f"{job.topic}/files")
        _raise_refusal(data)
        return None
    manifest: Manifest | None = None

    def write() -> list[FileEntry]:
        nonlocal manifest
        manifest = write_manifest(store, job, [_decode_part(rank, part) for rank, part in enumerate(parts)])
        return []

    _raise_refusal(peers.decide(decided, _encode_part(write)))
    return manifest


def store_files(store: CheckpointStore, job: CommitJob, rank: int) -> list[FileEntry]:
    """Store the files that are this rank's to store and are not yet, several at a time, and digest the others."""
    directory, files = job.brought.directory, job.brought.files
    if job.brought.problem is not None:
        raise job.brought.problem
    if directory is None or not files:
        return []

    def store_file(path: str) -> FileEntry:
        if path in job.stored:
            return job.stored[path]
        if job.agreement.owners.get(path, rank) == rank:
            moved = store.storage.put_file(store.layout.data(job.checkpoint_id, path), directory / path)
        else:
            moved = digest_file(directory / path)
        job.stored[path] = FileEntry(path, moved.bytes, moved.digest, rank)
        return job.stored[path]

    if len(files) == 1:
        return [store_file(files[0])]
    with ThreadPoolExecutor(min(_PARALLEL_FILES, len(files)), "prefect-torch-upload") as pool:
        return list(pool.map(store_file, files))


def write_manifest(store: CheckpointStore, job: CommitJob, parts: Sequence[Sequence[FileEntry]]) -> Manifest:
    """Write the manifest: from here on the checkpoint exists."""
    manifest = Manifest(
        id=job.checkpoint_id,
        step=job.agreement.step,
        attempt=attempt_of(job.checkpoint_id),
        metrics=job.metrics,
        files=merge_files(parts),
        world_size=len(parts),
        parent=job.parent,
        created_at=datetime.now(timezone.utc),
        metadata=job.agreement.metadata,
    )
    check_fence(store, manifest.attempt)
    store.storage.put_bytes(store.layout.manifest(manifest.id), manifest.encode())  # last: this is the commit
    return manifest


def _encode_part(work: Callable[[], list[FileEntry]]) -> bytes:
    try:
        entries = work()
    except Exception as exc:  # noqa: BLE001 - whatever it is, all ranks must hear of it rather than wait
        return json.dumps({"refusal": asdict(Refusal.of(exc))}).encode()
    return json.dumps({"files": [asdict(entry) for entry in entries]}).encode()


def _decode_part(rank: int, data: bytes) -> list[FileEntry]:
    part = json.loads(data)
    if "refusal" in part:
        kind = StorageFullError if part["refusal"]["kind"] == StorageFullError.__name__ else CommitFailedError
        raise kind(
            f"rank {rank} could not store its part: {part['refusal']['message']}; the previous checkpoint is still the latest"
        )
    return [FileEntry(**entry) for entry in part["files"]]


def _raise_refusal(data: bytes) -> None:
    decision = json.loads(data)
    if "refusal" in decision:
        raise Refusal(**decision["refusal"]).error()
