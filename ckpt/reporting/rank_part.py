"""One rank's part of a checkpoint: its files and its share of a state, which it stores, and its message on that to rank 0."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect_torch.ckpt.errors import CommitFailedError, StorageFullError
from prefect_torch.ckpt.files.folder import GROUPED, FileGroup, group_files
from prefect_torch.ckpt.reporting.exchange.remote_error import RemoteError
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.digest import digest_file
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import Transfer

from .rank_report import StagedReport


@dataclass(slots=True)
class CommitJob:
    """One rank's share of a commit, and how far it is; a second try goes on from there.

    Attributes:
        staged: The report.
        parent: The checkpoint that this one continues.
        stored: The files of it that this rank has stored, by path.
        linked: The paths of those that this rank's directory and the storage may both have, as one file with two names.
        decided: The topics of rank 0's decisions on it.

    """

    staged: StagedReport
    parent: str | None = None
    stored: dict[str, FileEntry] = field(default_factory=dict)
    linked: list[str] = field(default_factory=list)
    decided: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankPart:
    """The files and the share of a state that one rank stored.

    Attributes:
        files: Its files.
        state: The `StateIndex.fields` of its share of a state, or None.
        stall_s: How long its training waited for the report; None where it waits for the commit.
        stored_s: The time from the start of its report until all files were stored. Both times are by the rank's own clock:
            monotonic clocks of processes begin anywhere, and ranks do not begin a report together.

    """

    files: Sequence[FileEntry] = ()
    state: dict[str, Any] | None = None
    stall_s: float | None = None
    stored_s: float = 0.0

    def encode(self) -> bytes:
        """Return JSON, the files column by column: objects of their own for each would bring on a collection of all garbage."""
        files = [[getattr(entry, name) for entry in self.files] for name in FileEntry.__slots__]
        return json.dumps({"files": files, "state": self.state, "stall_s": self.stall_s, "stored_s": self.stored_s}).encode()

    @classmethod
    def decode(cls, data: bytes, rank: int) -> "RankPart":
        """Undo `encode`.

        Raises:
            CommitFailedError: If `data` is the error because of which `rank` could not store its part.
            StorageFullError: If that is that there is no space.

        """
        part = json.loads(data)
        if "error" in part:
            kind = StorageFullError if part["error"]["kind"] == StorageFullError.__name__ else CommitFailedError
            raise kind(
                f"rank {rank} could not store its part: {part['error']['message']}; the previous checkpoint is still the latest"
            )
        return cls(list(map(FileEntry, *part["files"])), part["state"], part["stall_s"], part["stored_s"])


def store_part(run: Run, job: CommitJob, rank: int) -> bytes:
    """Store this rank's part, and return the message to rank 0: the part, or the error."""
    try:
        return _store(run, job, rank).encode()
    except Exception as exc:  # noqa: BLE001 - all ranks must receive any error rather than wait
        return RemoteError.of(exc).encode()


def _store(run: Run, job: CommitJob, rank: int) -> RankPart:
    """Store every file of this rank that is not stored yet, and its share of a state."""
    staged = job.staged
    if staged.problem is not None:
        raise staged.problem
    files, index = _store_files(run, job, rank), None
    if staged.state is not None:
        of_state, state = staged.state.store(lambda path, data: _put_buffers(run, job, rank, path, data))
        files, index = [*files, *of_state], state.fields()
    return RankPart(files, index, staged.stall_s, staged.elapsed_s())


def _store_files(run: Run, job: CommitJob, rank: int) -> list[FileEntry]:
    """Store the files that this rank owns and that are not stored yet, several at a time, and digest the others."""
    staged, directory = job.staged, job.staged.directory
    if directory is None:
        return []
    left = [path for path in staged.report.files if path not in job.stored]
    own = [path for path in left if staged.agreement.owners.get(path, rank) == rank]

    def keep(moved: Mapping[str, Transfer]) -> None:
        job.stored.update({path: FileEntry(path, it.bytes, it.digest, rank) for path, it in moved.items()})

    def store(group: FileGroup) -> None:
        keep(_put_group(run, staged.checkpoint_id, directory, group))

    # In a local folder small files cost work, not waiting: several threads would pass the interpreter's lock around.
    most = GROUPED if run.storage.local_path(run.layout.run) is None else None
    groups = group_files(directory, own, owned=staged.owns_directory, most=most)
    job.linked.extend(path for group in groups if group.owned for path in group.paths)
    for_each(groups, store)
    if rank not in staged.agreement.sharing:  # else they are the same files
        for_each(set(left) - set(own), lambda path: keep({path: digest_file(directory / path)}))
    return [job.stored[path] for path in staged.report.files if path in job.stored]


def _put_group(run: Run, checkpoint_id: str, directory: Path, group: FileGroup) -> dict[str, Transfer]:
    folder = run.layout.data(checkpoint_id)
    if len(group.paths) == 1 and not group.owned:
        (path,) = group.paths
        return {path: run.storage.put_file(f"{folder}{path}", directory / path)}
    moved = run.storage.put_files({f"{folder}{path}": f"{directory}/{path}" for path in group.paths}, owned=group.owned)
    return {key.removeprefix(folder): it for key, it in moved.items()}


def _put_buffers(run: Run, job: CommitJob, rank: int, path: str, data: Sequence[memoryview]) -> Transfer:
    if (known := job.stored.get(path)) is not None:
        return Transfer(known.bytes, known.digest)
    moved = run.storage.put_buffers(run.layout.data(job.staged.checkpoint_id, path), data)
    job.stored[path] = FileEntry(path, moved.bytes, moved.digest, rank)
    return moved
