"""Decisions on a training at its reports: made by its leader, after the commit, and seen by all ranks at the same report."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Protocol

from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from prefect_torch.ckpt.runs.metrics import Metrics, as_float, find_score

from .agreement import AsksLeader
from .events import DecisionRequest, EventSender

TRAINING_ITERATION = "training_iteration"  # as a time: the number of reports
COUNTED_TIMES = ("step", TRAINING_ITERATION)  # which every report has


class TrainingStopped(SystemExit):
    """The leader has decided that the training ends after the report that raises this."""


@dataclass(frozen=True, slots=True)
class DecisionPoints:
    """The reports at which the leader decides whether the training goes on.

    Attributes:
        time_attr: "step", `TRAINING_ITERATION`, or a metric; it grows from report to report.
        milestone: The first report with a checkpoint at or after this time asks the leader; None if there is no such time.
        asks_always: Whether every report asks from the milestone on, also without a checkpoint.
        stop: A report with one of these metrics (or "step", `TRAINING_ITERATION`) at or above the number asks.
        reports_before: The number of reports before this attempt.

    """

    time_attr: str = "step"
    milestone: float | None = None
    asks_always: bool = False
    stop: dict[str, float] = field(default_factory=dict)
    reports_before: int = 0

    def includes(self, step: int, num_reports: int, metrics: Metrics, *, has_checkpoint: bool) -> bool:
        """Return whether the leader decides at a report.

        Args:
            step: Its step.
            num_reports: The number of reports up to it.
            metrics: Its metrics.
            has_checkpoint: Whether it stores a checkpoint.

        """
        for name, limit in self.stop.items():
            value = time_of(name, step, num_reports, metrics)
            if value is not None and value >= limit:
                return True
        time = time_of(self.time_attr, step, num_reports, metrics)
        if self.milestone is None or time is None or time < self.milestone:
            return False
        return has_checkpoint or self.asks_always


@dataclass(frozen=True, slots=True)
class Verdict:
    """The leader's decision.

    Attributes:
        goes_on: Whether the training goes on.
        milestone: The next milestone.

    """

    goes_on: bool
    milestone: float | None = None


class DecisionMaker(Protocol):
    """Decides at reports whether a training goes on."""

    def points(self) -> DecisionPoints | None:
        """Return the reports of the next attempt that ask; None if none does."""
        ...

    def decide(self, request: DecisionRequest) -> Verdict:
        """Return the decision, which is recorded, and the same for a repeated request; may wait for a storage."""
        ...


def time_of(attribute: str, step: int, num_reports: int, metrics: Metrics) -> float | None:
    """Return the time of a report by an attribute; None if it has none."""
    if attribute == "step":
        return step
    if attribute == TRAINING_ITERATION:
        return num_reports
    score = find_score(metrics, attribute)
    value = math.nan if score is None else as_float(score)
    return None if math.isnan(value) else value


class Decisions:
    """The decisions on one rank's reports.

    Args:
        peers: The ranks.
        events: The sender that asks the leader.
        points: The reports that ask.

    """

    def __init__(self, peers: Peers, events: EventSender, points: DecisionPoints) -> None:
        self._peers = peers
        self._events = events
        self._points = points
        self._num_asked = 0
        self._stopped = False

    def asks_leader(self, step: int, num_reports: int, metrics: Metrics) -> AsksLeader:
        """Return, on rank 0, whether a report asks the leader; "never" on other ranks.

        Args:
            step: Its step.
            num_reports: Its number in this attempt, from 1.
            metrics: Its metrics.

        """
        if self._peers.rank != 0:
            return "never"
        count = self._points.reports_before + num_reports
        if self._points.includes(step, count, metrics, has_checkpoint=False):
            return "always"
        return "with a checkpoint" if self._points.includes(step, count, metrics, has_checkpoint=True) else "never"

    def follow(self, step: int, num_reports: int, metrics: Metrics, checkpoint: str | None) -> None:
        """Ask the leader, and return if the training goes on; every rank calls it for the same reports.

        Raises:
            TrainingStopped: If it does not; then the next report raises it, too.

        """
        number, self._num_asked = self._num_asked, self._num_asked + 1
        if self._peers.rank == 0:
            count = self._points.reports_before + num_reports
            self._events.send(DecisionRequest(number, step, count, metrics, checkpoint))
        reason = "it records whether the training goes on before it answers"
        verdict = Verdict(**json.loads(self._peers.decision(_topic(number), by="the leader", reason=reason)))
        self._peers.forget_reading(_topic(number - 1))  # as in `send_verdict`
        self._points = replace(self._points, milestone=verdict.milestone)
        if not verdict.goes_on:
            self._stopped = True
            self.raise_if_stopped()

    def raise_if_stopped(self) -> None:
        """Raise if the leader has decided that the training ends.

        Raises:
            TrainingStopped: In a function that goes on reporting after it was stopped.

        """
        if self._stopped:
            raise TrainingStopped


def send_verdict(key_value: KeyValue, number: int, verdict: Verdict) -> None:
    """As the leader, send every rank the verdict on request `number`."""
    key_value.set(_topic(number), json.dumps(asdict(verdict)).encode())
    key_value.delete(_topic(number - 1))  # every rank has read it, since all have taken part in a later report


def _topic(number: int) -> str:
    return f"decision {number}"
