"""A rank's report, prepared from the user's arguments: their errors are found here, before anything is stored."""

import logging
import operator
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.files.folder import (
    check_holds_no_run,
    existing_directory,
    read_metadata,
    remove_metadata,
    scan_files,
)
from prefect_torch.ckpt.files.shared_directory import forget_identity, identity_of
from prefect_torch.ckpt.runs.layout import lies_in_checkpoint
from prefect_torch.ckpt.runs.manifest import MAX_STEP
from prefect_torch.ckpt.runs.metrics import Metrics, check_score, clean_metrics
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.state.index import is_own_file
from prefect_torch.ckpt.state.staging import spare_memory
from prefect_torch.ckpt.storage.machine.handover import LentDirectories
from prefect_torch.ckpt.storage.machine.scratch import lies_in_downloads, scratch_folder
from prefect_torch.ckpt.text import show_class

from .agreement import AsksLeader, Intent, Upload

if TYPE_CHECKING:  # they import torch, which only the report of a state needs
    from prefect_torch.ckpt.state.save import StateSaver, StateSnapshot

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReportArguments:
    """The arguments of `api.report`, as the user gave them."""

    metrics: Mapping[str, object]
    checkpoint: Checkpoint | None
    state: Mapping[str, Any] | None
    step: SupportsIndex | None
    progress: float | None
    upload: Upload | None
    started_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's report, checked.

    Attributes:
        started_s: When it began, by this process's monotonic clock.
        step: Its step.
        metrics: Its metrics.
        progress: The share of the training that is done.
        upload: The upload mode, or None without a checkpoint.
        directory: The directory of this rank's files, or None.
        lent: The owner of that directory, if it was lent to the training function: its files may be moved.
        files: Their paths in it.
        metadata: The user's metadata of this rank's part.
        snapshot: This rank's state, or None.
        awaits_commits: Whether it returns only once the background commits so far are durable.

    """

    started_s: float
    step: int
    metrics: Metrics
    progress: float | None = None
    upload: Upload | None = None
    directory: Path | None = None
    lent: LentDirectories | None = None
    files: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    snapshot: "StateSnapshot | None" = None
    awaits_commits: bool = False

    def intent(self, rank: int, num_requests: int, *, among: str | None = None, asks_leader: AsksLeader = "never") -> Intent:
        """Return the description of the report for rank 0; the caller must send it, and call `forget_identity` afterwards.

        Args:
            rank: This rank.
            num_requests: The number of this rank's checkpoint requests.
            among: The round's name, by which ranks find out whether they report one directory; None for a single rank.
            asks_leader: Whether the leader decides on this report, or does if any rank stores a checkpoint.

        Raises:
            OSError: If the reported directory is gone, or cannot be written to; nothing needs to be sent then.

        """
        adopted = self._adopted_directory()
        directory = "" if adopted is None or among is None else identity_of(adopted, among)
        state = None if self.snapshot is None else self.snapshot.describe()  # last: no error may keep it from being sent
        return Intent(
            rank,
            self.step,
            self.upload,
            files=list(self.files),
            metadata=dict(self.metadata),
            state=state,
            directory=directory,
            num_requests=num_requests,
            asks_leader=asks_leader,
            awaits_commits=self.awaits_commits,
        )

    def forget_identity(self, among: str | None) -> None:
        """Remove what `intent` left in the directory, once all ranks have received it, or the round has failed."""
        adopted = self._adopted_directory()
        if adopted is not None and among is not None:
            forget_identity(adopted, among)

    def _adopted_directory(self) -> Path | None:
        return self.directory if self.upload == "async" else None

    def stage_early(self) -> None:
        """Stage the state while the ranks agree, as the plan of the previous report may still be valid."""
        if self.snapshot is not None:
            self.snapshot.stage_early()

    def remove_metadata(self) -> None:
        """Remove the metadata of files that were moved out of the directory: the next checkpoint in it is to have its own."""
        if self.metadata and self.directory is not None:
            with suppress(OSError):
                remove_metadata(self.directory)


def _appearance_of(directory: Path) -> tuple[int, int, int]:
    """Return values that differ for another directory, and for this one once something is put into it."""
    status = directory.stat()
    return status.st_dev, status.st_ino, status.st_ctime_ns


class ReportPreparation:
    """The preparation of one rank's reports: whatever is wrong with a report is found here, before anything is stored.

    Args:
        run: The run.
        rank: This rank.
        world_size: The number of ranks.
        score_attribute: The metric by which checkpoints are sorted, which must be a number.
        lent: The directories that are lent to the training function.

    """

    def __init__(self, run: Run, rank: int, world_size: int, score_attribute: str | None, lent: LentDirectories) -> None:
        self._run = run
        self._rank = rank
        self._world_size = world_size
        self._score_attribute = score_attribute
        self._lent = lent
        self._saver: StateSaver | None = None
        self._emptied: tuple[int, int, int] | None = None  # the appearance of the last directory whose files were moved away
        self._sweep, _, self._trial = run.name.rpartition("/")
        self._may_warn = bool(self._sweep)

    def remember_emptied(self, report: Report) -> None:
        """Remember that the files of a report have been moved out of its directory."""
        if report.directory is not None and report.files:
            with suppress(OSError):  # the user has deleted it
                self._emptied = _appearance_of(report.directory)

    def prepare(self, given: ReportArguments, cleanup: ExitStack, *, following: int, newest: int) -> Report:
        """Return the report with `given` arguments.

        Args:
            given: The user's arguments.
            cleanup: Receives the resources to release after the report.
            following: The step of a report that is given none.
            newest: The step of the newest checkpoint. A report that repeats it stores nothing: that checkpoint stays.

        Raises:
            ValueError: If an argument is invalid.

        """
        metrics = clean_metrics(given.metrics, read=self._rank == 0)  # rank 0's are recorded, and a read waits for a GPU
        check_score(metrics, self._score_attribute)
        check_progress(given.progress)
        upload = check_upload(given.upload, given.checkpoint, given.state)
        step = check_step(given.step, following=following, newest=None if upload is None else newest)
        if upload is not None and step == newest:  # the same on every rank, as `newest` is
            _logger.warning(
                "rank %d reports step %d again, whose checkpoint is stored or under way: the metrics are recorded, and that "
                "checkpoint stays; give a higher step to store another",
                self._rank,
                step,
            )
            return Report(given.started_s, step, metrics, given.progress, awaits_commits=upload == "sync")
        if spare_memory.kept is not None and given.checkpoint is not None and given.state is None:
            spare_memory.release()  # this training stores what it wrote itself
        directory = self._directory(given.checkpoint, cleanup)
        files = () if directory is None else tuple(scan_files(directory))
        if directory is not None and not files and _appearance_of(directory) == self._emptied:
            raise ValueError(
                f"{directory} is empty, since the last report has moved its files away: write those of this checkpoint into "
                "it; a report with upload='sync' leaves them in a directory of your own"
            )
        return Report(
            given.started_s,
            step,
            metrics,
            given.progress,
            upload=upload,
            directory=directory,
            lent=None if directory is None or not self._lent.holds(directory) else self._lent,
            files=files,
            metadata={} if directory is None else read_metadata(directory),
            snapshot=None if given.state is None else self._capture(given.state, files),
        )

    def _directory(self, checkpoint: Checkpoint | None, cleanup: ExitStack) -> Path | None:
        if checkpoint is None:
            return None
        if not isinstance(checkpoint, Checkpoint):
            # Not its repr: that of a state_dict() is pages of numbers.
            raise ValueError(  # noqa: TRY004 - one error
                f"checkpoint is of type {show_class(checkpoint)}: give Checkpoint.from_directory(path) of prefect_torch.ckpt, "
                "or models and optimizers as state={...}"
            )
        directory = None if checkpoint.store is not None else existing_directory(checkpoint.path)
        if directory is not None:
            check_holds_no_run(directory, self._run.storage.local_path(self._run.layout.run))
            self._warn_of_shared_directory(directory)
        if directory is None or lies_in_checkpoint(directory.resolve()) or lies_in_downloads(directory):
            # A committed checkpoint is never changed: only a copy of it is moved or stored again.
            directory = cleanup.enter_context(scratch_folder())
            checkpoint.to_directory(directory)
        return directory

    def _warn_of_shared_directory(self, directory: Path) -> None:
        """Warn once in a trial of a sweep of a directory that others may write to: all trials run in one working directory."""
        if not self._may_warn or self._trial in str(directory) or directory.is_relative_to(tempfile.gettempdir()):
            return
        with suppress(OSError):  # where the working directory is gone
            if directory.is_relative_to(Path.cwd()):
                self._may_warn = False
                _logger.warning(
                    "all trials of sweep %r run in one directory, so others may write to %s, too, and report each other's "
                    "files: give each a directory of its own, such as a tempfile.TemporaryDirectory()",
                    self._sweep,
                    directory,
                )

    def _capture(self, state: Mapping[str, Any], files: tuple[str, ...]) -> "StateSnapshot":
        for path in filter(is_own_file, files):
            raise ValueError(
                f"the directory reported beside a state holds {path!r}, as which the state is stored: rename that file"
            )
        if self._saver is None:
            from prefect_torch.ckpt.state.save import StateSaver  # noqa: PLC0415 - torch, for states only

            self._saver = StateSaver(self._rank, self._world_size)
        return self._saver.capture(state)


def check_step(step: SupportsIndex | None, *, following: int, newest: int | None) -> int:
    """Return the step of a report.

    Args:
        step: The user's argument; None means `following`.
        following: The step that comes next.
        newest: The step of the newest checkpoint, which the step of a new one may repeat but not go below; None for a
            report without a checkpoint.

    Raises:
        ValueError: If `step` is invalid.

    """
    if isinstance(step, bool):
        raise ValueError("step must be a whole number, not a bool")  # noqa: TRY004 - one error for a bad step
    try:
        chosen = following if step is None else operator.index(step)
    except TypeError as exc:
        raise ValueError(f"step={step!r}: give a whole number") from exc
    if not 0 <= chosen <= MAX_STEP:
        raise ValueError(f"step={chosen}: give a number from 0 to {MAX_STEP}")
    if newest is not None and chosen < newest:
        raise ValueError(
            f"step={chosen} comes before the last checkpoint's step {newest}; "
            "steps must grow from checkpoint to checkpoint, also after a resume"
        )
    return chosen


def check_upload(upload: Upload | None, checkpoint: object, state: Mapping[str, Any] | None) -> Upload | None:
    """Return the upload mode of a report; None where there is nothing to store.

    Raises:
        ValueError: If `upload` is no such mode.

    """
    if upload not in (None, "sync", "async"):
        raise ValueError(f"upload={upload!r}: give 'sync' or 'async'")
    if checkpoint is None and state is None:
        return None
    return upload or ("sync" if state is None else "async")


def check_progress(progress: float | None) -> None:
    """Raise unless `progress` is a share from 0 to 1, or None.

    Raises:
        ValueError: If it is anything else.

    """
    is_share = isinstance(progress, (int, float)) and not isinstance(progress, bool) and 0 <= progress <= 1
    if progress is not None and not is_share:
        raise ValueError(f"progress={progress!r}: give a share of the training from 0 to 1")
