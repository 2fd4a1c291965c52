"""One attempt as pages tell it: when it began, reported, saved and ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from prefect_torch.ckpt.attempts import Attempt, Outcome
from prefect_torch.ckpt.history import MetricRecord
from prefect_torch.ckpt.manifest import attempt_of, step_of
from prefect_torch.flows.monitoring.text import seconds_of

from .commit_marks import CommitMarks

Place: TypeAlias = tuple[float, float]  # an attempt and a step: places of a run sort by age
BEGINNING: Place = (0, -1)
END: Place = (math.inf, math.inf)


@dataclass(slots=True)
class AttemptLog:
    """What is known of one attempt; times are seconds since the epoch.

    Attributes:
        attempt: Who claimed it, and when.
        outcome: How it ended; None while it runs, or if its leader was killed.
        ended_s: When it ended, or was last heard of; None while it runs.
        num_reports: How often rank 0 reported.
        first_report_s: When it did so first; None before.
        last_report_s: And last.
        first_step: The step of its first report.
        last_step: And of its last.
        checkpoints: When its checkpoints were reported, and for how long they held up the training.

    """

    attempt: Attempt
    outcome: Outcome | None = None
    ended_s: float | None = None
    num_reports: int = 0
    first_report_s: float | None = None
    last_report_s: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    checkpoints: CommitMarks = field(default_factory=CommitMarks)

    @property
    def number(self) -> int:
        """Its number."""
        return self.attempt.number

    @property
    def claimed_s(self) -> float:
        """When it was claimed."""
        return seconds_of(self.attempt.claimed_at)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, as far as one knows."""
        return self.ended_s is None

    @property
    def is_completed(self) -> bool:
        """Whether it ran to its end."""
        return self.outcome is not None and self.outcome.ending == "completed"

    def take_report(self, record: MetricRecord) -> None:
        """Take note of a report."""
        at_s = seconds_of(record.reported_at)
        self.num_reports += 1
        self.first_report_s = at_s if self.first_report_s is None else self.first_report_s
        self.last_report_s = at_s
        self.first_step = record.step if self.first_step is None else self.first_step
        self.last_step = record.step
        if record.checkpoint is not None:
            self.checkpoints.record_report(record.checkpoint, at_s)

    def take_commit(self, checkpoint_id: str, stall_s: float | None) -> None:
        """Take note of a commit."""
        if stall_s is not None:
            self.checkpoints.record_commit(checkpoint_id, stall_s)

    def last_seen_s(self) -> float:
        """Return when it was last heard of."""
        return max(self.claimed_s, self.last_report_s or 0.0)


def frontiers(logs: Sequence[AttemptLog]) -> dict[int, Place]:
    """Return up to which place of the run each attempt's work was gone on from, by attempt; what comes after was lost.

    That is the oldest place at which a later attempt began: a damaged checkpoint may throw a run back behind an attempt. Of
    the newest attempt nothing is lost yet, nor of one that completed, unless a later one began further back than its newest
    checkpoint.

    Args:
        logs: All attempts, oldest first.

    """
    found: dict[int, Place] = {}
    oldest = END
    for log in reversed(logs):
        newest_saved = max((place_of(mark.newest) for mark in log.checkpoints if mark.num_reported), default=BEGINNING)
        found[log.number] = END if log.is_completed and newest_saved <= oldest else oldest
        oldest = min(oldest, _began_at(log, logs))
    return found


def place_of(checkpoint_id: str) -> Place:
    """Return where in its run a checkpoint is."""
    return (attempt_of(checkpoint_id), step_of(checkpoint_id))


def _began_at(log: AttemptLog, logs: Sequence[AttemptLog]) -> Place:
    """Return where `log` began: at the beginning, too, if it restored a checkpoint of another run."""
    restored = log.attempt.restored_id
    if restored is None or not any(restored in other.checkpoints for other in logs):
        return BEGINNING
    return place_of(restored)
