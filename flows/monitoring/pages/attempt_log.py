"""The times of one attempt: its claim, reports, checkpoints and end."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.manifest import attempt_of, step_of
from prefect_torch.flows.monitoring.text import seconds_of

Position: TypeAlias = tuple[float, float]  # an attempt and a step; the positions of a run sort by age
BEGINNING: Position = (0, -1)
END: Position = (math.inf, math.inf)
_MAX_MARKS = 2000  # each checkpoint of all but the longest attempts; 0.4 MB
_RECENT = 100  # their report or commit may be still to come


@dataclass(slots=True)
class CommitMark:
    """A checkpoint, or several consecutive ones.

    Attributes:
        first: The oldest id.
        newest: The newest id.
        reported_s: The time of the newest report, in seconds since the epoch; None before.
        num_reported: The number of reported checkpoints.
        num_timed: The number of checkpoints whose stall is known.
        stall_s: The sum of their stalls in seconds.

    """

    first: str
    newest: str
    reported_s: float | None = None
    num_reported: int = 0
    num_timed: int = 0
    stall_s: float = 0.0

    def merged(self, later: "CommitMark") -> "CommitMark":
        """Return one mark for this one and a later one."""
        return CommitMark(
            self.first,
            later.newest,
            self.reported_s if later.reported_s is None else later.reported_s,
            self.num_reported + later.num_reported,
            self.num_timed + later.num_timed,
            self.stall_s + later.stall_s,
        )


class CommitMarks:
    """The checkpoints of one attempt, oldest first: a mark each up to 2,000, beyond that one mark for several older ones."""

    def __init__(self) -> None:
        self._marks: dict[str, CommitMark] = {}

    def __iter__(self) -> Iterator[CommitMark]:
        return iter([self._marks[key] for key in sorted(self._marks)])

    def __contains__(self, checkpoint_id: str) -> bool:
        return checkpoint_id in self._marks or any(mark.first <= checkpoint_id < mark.newest for mark in self._marks.values())

    def record_report(self, checkpoint_id: str, at_s: float) -> None:
        """Record a checkpoint's report, before or after its commit."""
        mark = self._mark(checkpoint_id)
        mark.reported_s = at_s
        mark.num_reported += 1

    def record_commit(self, checkpoint_id: str, stall_s: float) -> None:
        """Record for how many seconds a checkpoint stalled the training."""
        mark = self._mark(checkpoint_id)
        mark.num_timed += 1
        mark.stall_s += stall_s

    def _mark(self, checkpoint_id: str) -> CommitMark:
        if checkpoint_id not in self._marks:
            if len(self._marks) >= _MAX_MARKS:
                self._thin()
            self._marks[checkpoint_id] = CommitMark(checkpoint_id, checkpoint_id)
        return self._marks[checkpoint_id]

    def _thin(self) -> None:
        marks = list(self)
        older, recent = marks[:-_RECENT], marks[-_RECENT:]
        pairs = [first.merged(second) for first, second in zip(older[::2], older[1::2], strict=False)]
        odd = older[len(pairs) * 2 :]
        self._marks = {mark.newest: mark for mark in (*pairs, *odd, *recent)}


@dataclass(slots=True)
class AttemptLog:
    """The log of one attempt; times are seconds since the epoch.

    Attributes:
        attempt: The claim of the attempt.
        outcome: Its outcome; None while it runs, or if its leader was killed.
        ended_s: The time of its end, or of its last sign of life if its leader was killed; None while it runs.
        num_records: The number of rank 0's reports, and of the records that it logged between them.
        first_record_s: The time of the first of these records; None without one.
        last_record_s: The time of the last of these records; None without one.
        first_step: The step of the first report; None without reports. A logger may count steps differently.
        last_step: The step of the last report; None without reports.
        stepping_s: The seconds between these two reports.
        checkpoints: The report times of its checkpoints, and how long they stalled the training.
        ranks: The URL of each rank's task run; empty if this process has not started the ranks, and for older attempts.

    """

    attempt: Attempt
    outcome: Outcome | None = None
    ended_s: float | None = None
    num_records: int = 0
    first_record_s: float | None = None
    last_record_s: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    stepping_s: float = 0.0
    _first_report_s: float = 0.0
    checkpoints: CommitMarks = field(default_factory=CommitMarks)
    ranks: Mapping[int, str] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The attempt's number."""
        return self.attempt.number

    @property
    def claimed_s(self) -> float:
        """The time of its claim."""
        return seconds_of(self.attempt.claimed_at)

    @property
    def is_running(self) -> bool:
        """Whether no end is known."""
        return self.ended_s is None

    @property
    def status(self) -> AttemptStatus:
        """The status of the attempt, by its claim, its outcome, and the claim of the next."""
        is_process_gone = False if self.is_running else None  # it is this process's attempt; of one that is over, nobody asks
        is_overtaken = self.outcome is None and not self.is_running
        return AttemptStatus(self.attempt, self.outcome, is_process_gone, is_overtaken=is_overtaken)

    @property
    def steps_per_s(self) -> float | None:
        """The mean number of steps per second between its first and its last report; None before the second."""
        if self.first_step is None or self.last_step is None:
            return None
        steps = self.last_step - self.first_step
        return steps / self.stepping_s if self.stepping_s > 0 and steps > 0 else None

    def record_report(self, record: MetricRecord) -> None:
        """Record a report, or metrics that were logged between two."""
        at_s = seconds_of(record.reported_at)
        self.num_records += 1
        self.first_record_s = at_s if self.first_record_s is None else self.first_record_s
        self.last_record_s = at_s
        if record.is_logged:
            return
        if self.first_step is None:
            self.first_step, self._first_report_s = record.step, at_s
        self.last_step, self.stepping_s = record.step, at_s - self._first_report_s
        if record.checkpoint is not None:
            self.checkpoints.record_report(record.checkpoint, at_s)

    def record_commit(self, checkpoint_id: str, stall_s: float | None) -> None:
        """Record a commit."""
        if stall_s is not None:
            self.checkpoints.record_commit(checkpoint_id, stall_s)

    def last_seen_s(self) -> float:
        """Return the time of its last sign of life: its claim or its last record."""
        return max(self.claimed_s, self.last_record_s or 0.0)


def resume_points(logs: Sequence[AttemptLog]) -> dict[int, Position]:
    """Return the position up to which later attempts kept each attempt's work, by attempt; the work after it was lost.

    That is the oldest position from which a later attempt resumed: a damaged checkpoint may throw a run back by more than one
    attempt. Nothing of the newest attempt is lost yet, and nothing of a completed one unless a later attempt resumed from an
    older position than its newest checkpoint.

    Args:
        logs: All attempts, oldest first.

    """
    by_number = {log.number: log for log in logs}
    found: dict[int, Position] = {}
    oldest = END
    for log in reversed(logs):
        newest_checkpoint = max((position_of(mark.newest) for mark in log.checkpoints if mark.num_reported), default=BEGINNING)
        found[log.number] = END if log.status.is_completed and newest_checkpoint <= oldest else oldest
        oldest = min(oldest, _resumed_at(log, by_number))
    return found


def position_of(checkpoint_id: str) -> Position:
    """Return a checkpoint's position in its run."""
    return (attempt_of(checkpoint_id), step_of(checkpoint_id))


def _resumed_at(log: AttemptLog, by_number: Mapping[int, AttemptLog]) -> Position:
    """Return the position that `log` resumed from: the beginning if it restored no checkpoint of this run."""
    restored = log.attempt.restored_id
    writer = None if restored is None else by_number.get(attempt_of(restored))
    if restored is None or writer is None or restored not in writer.checkpoints:
        return BEGINNING
    return position_of(restored)
