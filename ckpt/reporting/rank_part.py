"""One rank's part of a checkpoint: staged, so that the training may go on; stored; and described to rank 0."""

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_torch.ckpt.errors import CommitFailedError, FencedError, StorageError, StorageFullError
from prefect_torch.ckpt.files.folder import GROUPED, FileGroup, group_files
from prefect_torch.ckpt.reporting.exchange.remote_error import RemoteError
from prefect_torch.ckpt.runs.attempts.claims import check_fence
from prefect_torch.ckpt.runs.bulk import no_collection
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.state.plan import WriteItem
from prefect_torch.ckpt.storage.digest import digest_file
from prefect_torch.ckpt.storage.machine.handover import adopt_files
from prefect_torch.ckpt.storage.machine.scratch import remove_scratch
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import Transfer

from .agreement import Agreement
from .rank_report import Report

if TYPE_CHECKING:  # it imports torch, which only the report of a state needs
    from prefect_torch.ckpt.state.save import StagedState

_LARGE_BYTES = 2**21  # of the parts of all ranks


@dataclass(frozen=True, slots=True)
class StagedReport:
    """A report on which the ranks agree, and whose data the training can no longer change.

    Attributes:
        report: The report.
        agreement: The ranks' agreement on it.
        directory: The directory of this rank's files, or None; of an asynchronous report a scratch directory.
        state: This rank's share of a state, or None.
        problem: The error because of which this rank cannot store its part, or None.
        stall_s: How long the training waited for an asynchronous report; None where it waits for the commit.

    """

    report: Report
    agreement: Agreement
    directory: Path | None = None
    state: "StagedState | None" = None
    problem: Exception | None = None
    stall_s: float | None = None

    @property
    def checkpoint_id(self) -> str:
        """The id to commit under."""
        assert self.agreement.checkpoint_id is not None
        return self.agreement.checkpoint_id

    @property
    def owns_directory(self) -> bool:
        """Whether the files in `directory` may be linked: they are removed from it once they are in a checkpoint."""
        return self.report.lent is not None or self.directory != self.report.directory

    def elapsed_s(self) -> float:
        """Return how long ago the report began."""
        return time.monotonic() - self.report.started_s

    def remove(self, paths: Collection[str]) -> None:
        """Remove files that are now part of a checkpoint from a lent directory: a second write would change the checkpoint."""
        for path in paths:
            assert self.directory is not None
            (self.directory / path).unlink(missing_ok=True)
        if paths and len(paths) == len(self.report.files):  # else some lie below links, and stay
            self.report.remove_metadata()

    def release(self) -> None:
        """Delete the files that were taken over."""
        if self.directory is None or self.directory == self.report.directory:
            return
        if self.report.lent is None:
            remove_scratch(self.directory)
        else:
            self.report.lent.remove(self.directory)


def stage(report: Report, agreement: Agreement, writes: list[WriteItem], rank: int) -> StagedReport:
    """Return a report with its data taken over: a copy of the state, and the files of an asynchronous report.

    An error is kept in the result, since the other ranks already wait for this one's part, and must receive it.

    Args:
        report: The report.
        agreement: The ranks' agreement.
        writes: What this rank writes of a state.
        rank: This rank.

    """
    directory, state = report.directory, None
    try:
        if report.snapshot is not None and agreement.state is not None:
            state = report.snapshot.stage(agreement.state, writes)
        if directory is not None and agreement.is_background:
            is_adopted = rank in agreement.sharing  # by another rank, except for files that only this one has listed
            own = [path for path in report.files if not is_adopted or agreement.owners.get(path, rank) == rank]
            taken = _adopt(report, directory, own)
            is_copied = bool(own) and os.path.lexists(directory / own[0])  # as the targets of links are
            if not is_adopted and not is_copied:
                report.remove_metadata()
            directory = taken
    except Exception as exc:  # noqa: BLE001 - raised by the commit, on every rank
        return StagedReport(report, agreement, problem=exc)
    stall_s = time.monotonic() - report.started_s if agreement.is_background else None
    return StagedReport(report, agreement, directory, state, stall_s=stall_s)


def _adopt(report: Report, directory: Path, paths: Sequence[str]) -> Path:
    if report.lent is None:
        return adopt_files(directory, paths)
    taken = report.lent.make(report.lent.parent_of(directory))
    try:
        return adopt_files(directory, paths, taken)
    except BaseException:
        report.lent.remove(taken)
        raise


@dataclass(slots=True)
class CommitJob:
    """One rank's share of a commit, and its progress, from which a second try continues.

    Attributes:
        staged: The report.
        claim: The key of the attempt's claim.
        parent: The checkpoint that this one continues.
        num_here: The number of ranks on this machine; on rank 0's machine, these are the first ranks.
        stored: The files of it that this rank has stored, by path.
        moved: The paths of reported files that are removed from this rank's directory, if it is lent, after the commit: the
            storage may have them as one file with two names, or another rank's equal ones.
        decided: The topics of rank 0's decisions on it.

    """

    staged: StagedReport
    claim: str
    parent: str | None = None
    num_here: int = 1
    stored: dict[str, FileEntry] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
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
        """Return JSON, the files column by column: an object for each would trigger a full garbage collection."""
        files = [[getattr(entry, name) for entry in self.files] for name in FileEntry.__slots__]
        return json.dumps({"files": files, "state": self.state, "stall_s": self.stall_s, "stored_s": self.stored_s}).encode()

    @classmethod
    def decode(cls, data: bytes, rank: int) -> "RankPart":
        """Undo `encode`.

        Raises:
            CommitFailedError: If `data` is the error because of which `rank` could not store its part.
            StorageFullError: If the reason is a lack of space.
            FencedError: If the reason is that the run is gone.

        """
        part = json.loads(data)
        if "error" in part:
            if part["error"]["kind"] == FencedError.__name__:
                raise FencedError(part["error"]["message"])
            kind = StorageFullError if part["error"]["kind"] == StorageFullError.__name__ else CommitFailedError
            raise kind(
                f"rank {rank} could not store its part: {part['error']['message']}; the previous checkpoint is still the latest"
            )
        return cls(list(map(FileEntry, *part["files"])), part["state"], part["stall_s"], part["stored_s"])


def decode_parts(messages: Sequence[bytes]) -> list[RankPart]:
    """Return the parts of all ranks, by rank.

    Raises:
        CommitFailedError: The error of the first rank that could not store its part, with the numbers of all of them.
        FencedError: If the run is gone.

    """
    parts, errors = [], {}
    is_large = sum(map(len, messages)) > _LARGE_BYTES  # of several objects for each tensor and rank
    with no_collection() if is_large else nullcontext():
        for rank, message in enumerate(messages):
            try:
                parts.append(RankPart.decode(message, rank))
            except CommitFailedError as exc:
                errors[rank] = exc
    if errors:
        first = errors[min(errors)]
        first.ranks = tuple(errors)
        raise first
    return parts


def store_part(run: Run, job: CommitJob, rank: int) -> bytes:
    """Store this rank's part, and return the message to rank 0: the part, or the error."""
    try:
        try:
            return _store(run, job, rank).encode()
        except FileNotFoundError:  # of a reported file, or since the run is gone, of which no other error helps
            with suppress(StorageError, OSError):
                check_fence(run, job.claim)
            raise
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
    others = set(left) - set(own)

    def keep(moved: Mapping[str, Transfer]) -> None:
        job.stored.update({path: FileEntry(path, it.bytes, it.digest, rank) for path, it in moved.items()})

    def store(group: FileGroup) -> None:
        keep(_put_group(run, staged.checkpoint_id, directory, group))

    # In a local folder small files cost work, not waiting: several threads would pass the interpreter's lock around.
    most = GROUPED if run.storage.local_path(run.layout.run) is None else None
    groups = group_files(directory, own, owned=staged.owns_directory, most=most)
    to_compare = group_files(directory, others, owned=staged.owns_directory, most=None)
    job.moved.update(path for group in (*groups, *to_compare) if group.owned for path in group.paths)
    for_each(groups, store)
    if rank not in staged.agreement.sharing:  # else they are the same files
        for_each(others, lambda path: keep({path: digest_file(directory / path)}))
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
