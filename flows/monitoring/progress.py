"""The progress of a training in words, as a terminal and a notebook show it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from prefect_torch.ckpt.reporting.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Outcome
from prefect_torch.ckpt.runs.metrics import flatten_metrics
from prefect_torch.ckpt.text import headline, show_bytes, show_count
from prefect_torch.tasks.training.observers import (
    AttemptEnded,
    AttemptStarted,
    CheckpointQuarantined,
    CheckpointsPruned,
    TrainingEvent,
)

from .text import show_duration, show_number

TERMINATED = ("preempted", "cancelled")  # the endings of an attempt that a signal or a person ended
_SHOWN_INCIDENTS = 3


@dataclass(frozen=True, slots=True)
class Incident:
    """News of an attempt or a checkpoint, in one line, and its colour."""

    text: str
    colour: str


@dataclass(frozen=True, slots=True)
class ProgressRate:
    """How fast an attempt progresses: the share that was done when it was first reported, and now, by one clock in seconds."""

    first: float
    first_s: float
    newest: float
    newest_s: float

    @property
    def left_s(self) -> float | None:
        """The seconds from the newest progress to the end; None before the second progress."""
        if not self.first < self.newest <= 1:
            return None
        return (1 - self.newest) * (self.newest_s - self.first_s) / (self.newest - self.first)


def progressed(rate: ProgressRate | None, share: float, now_s: float) -> ProgressRate:
    """Return the rate of an attempt that has reported one more progress; `rate` is None before its first."""
    return ProgressRate(share, now_s, share, now_s) if rate is None else replace(rate, newest=share, newest_s=now_s)


class TrainingProgress:
    """Records the progress of one training.

    Args:
        run: The run's name.
        clock: Returns the time in seconds.

    Attributes:
        run: The run's name.
        attempt: The number of the newest attempt.
        incidents: The newest incidents of attempts and checkpoints.

    """

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self.attempt = 0
        self.incidents: tuple[Incident, ...] = ()
        self._clock = clock
        self._started_s = clock()
        self._num_reports = 0
        self._report: ReportEvent | None = None
        self._rate: ProgressRate | None = None
        self._commit: CommitEvent | None = None
        self._num_committed = 0
        self._num_pruned = 0

    def record(self, event: TrainingEvent) -> None:
        """Record an event."""
        match event:
            case AttemptStarted(attempt, resumed_from):
                self.attempt, self._rate = attempt.number, None
                if resumed_from is not None:
                    self._add_incident(f"attempt {attempt.number} resumes from {resumed_from.rpartition('/')[2]}", "green")
            case ReportEvent(record, progress):
                self._report = event
                self._num_reports += not record.is_logged
                if progress is not None:
                    self._rate = progressed(self._rate, progress, self._clock())
            case CommitEvent():
                self._commit = event
                self._num_committed += 1
            case CheckpointsPruned(plan):
                self._num_pruned += len(plan.drop)
            case CheckpointQuarantined(checkpoint_id, reason):
                self._add_incident(f"checkpoint {checkpoint_id} is damaged and set aside: {reason}", "yellow")
            case AttemptEnded(outcome):
                self._add_incident(_ending(outcome), "green" if outcome.ending == "completed" else "red")

    @property
    def share(self) -> float | None:
        """The share that is done, from 0 to 1; None if the training does not report it."""
        return None if self._rate is None else self._rate.newest

    def details(self) -> Iterator[str]:
        """Yield the share, the step, the number of reports, the time passed and the time left, as far as they are known."""
        if self._rate is not None:
            yield f"{self._rate.newest:.0%}"
        if self._report is not None:
            yield f"step {self._report.record.step}"
            yield show_count(self._num_reports, "report")
        yield show_duration(self._clock() - self._started_s)
        if self._rate is not None and self._rate.newest < 1 and (left_s := self._rate.left_s) is not None:
            yield f"{show_duration(left_s)} left"

    def metrics(self) -> Iterator[tuple[str, str]]:
        """Yield the names and values of the newest report."""
        if self._report is not None:
            for name, value in flatten_metrics(self._report.record.metrics):
                yield name, show_number(value)

    def checkpoint(self) -> str | None:
        """Return a line on the newest checkpoint; None before the first."""
        if self._commit is None:
            return None
        size = f"{show_bytes(self._commit.bytes)} in {show_duration(self._commit.duration_s)}"
        counts = f"{self._num_committed} committed" + (f", {self._num_pruned} pruned" if self._num_pruned else "")
        return f"checkpoint {self._commit.id}  step {self._commit.step}  {size}  ({counts})"

    def _add_incident(self, text: str, colour: str) -> None:
        self.incidents = (*self.incidents, Incident(" ".join(text.split()), colour))[-_SHOWN_INCIDENTS:]


def _ending(outcome: Outcome) -> str:
    if outcome.ending in TERMINATED:  # the log says why, and what is safe
        return f"attempt {outcome.attempt} {outcome.ending}"
    reason = headline(outcome.error)
    if f"attempt {outcome.attempt} " in reason:
        return reason
    return f"attempt {outcome.attempt} {outcome.ending}" + (f": {reason}" if reason else "")
