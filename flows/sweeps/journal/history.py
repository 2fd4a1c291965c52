"""The history of a sweep: the state of each trial after the events in its journal; pure functions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, TypeAlias

from prefect_torch.ckpt.runs.metrics import Metrics, find_finite_score

from .events import (
    CheckpointsDeleted,
    Cloned,
    Event,
    Source,
    SweepLed,
    TrialEnded,
    TrialEvent,
    TrialReported,
    TrialResumed,
    TrialStarted,
)

TrialState: TypeAlias = Literal["running", "paused", "completed", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class RungReport:
    """A report of a trial in `run` that led to a decision; see `TrialReported`."""

    time: float
    value: float
    checkpoint: str | None = None
    num_reports: int = 0
    run: str = ""

    def is_repeated_by(self, later: "RungReport") -> bool:
        """Return whether a restart has taken the training back to before this report, so that it made `later` afterwards.

        Times grow otherwise. Of one time, such as an epoch, there may be several reports, whose numbers grow.
        """
        is_same_time = self.time == later.time  # NaN is none
        return self.time > later.time or (is_same_time and self.num_reports >= later.num_reports)


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A trial as the journal has it.

    Attributes:
        number: Its number, from 0.
        run: The name of its run.
        config: The values chosen for it.
        study_number: The number of its config in the study.
        state: Its state.
        reason: Why it was stopped or paused, or its error.
        metrics: Its metrics, as of its last decision or its end.
        milestone: The time from which its first report with a checkpoint needs a decision.
        reports: Its reports that led to a decision, in order.
        source: The checkpoint of another trial that its run begins from; None if it begins afresh.
        is_cloned: Whether its config is no longer the one that was suggested for it.
        former: The trial before it went on from another one's checkpoint, while that may be undone; None otherwise.
        earlier_runs: The names of the other runs that it has left, in order: of each takeover, the run before, or its own if it
            was undone.
        deleted_runs: The names of those of its runs whose checkpoints have been deleted.
        reports_before: The number of reports before its present run.
        common: The config of all trials when it last started or resumed; None if an older version did not record it.

    """

    number: int
    run: str
    config: dict[str, Any]
    study_number: int
    state: TrialState = "running"
    reason: str | None = None
    metrics: Metrics = field(default_factory=dict)
    milestone: float | None = None
    reports: tuple[RungReport, ...] = ()
    source: Source | None = None
    is_cloned: bool = False
    former: "TrialRecord | None" = None
    earlier_runs: tuple[str, ...] = ()
    deleted_runs: tuple[str, ...] = ()
    reports_before: int = 0
    common: dict[str, Any] | None = None

    @property
    def own_reports(self) -> tuple[RungReport, ...]:
        """Those of its reports that its present run has made: none, while it has just taken over another one's checkpoint."""
        return tuple(report for report in self.reports if report.run == self.run)

    def with_report(self, report: RungReport) -> "TrialRecord":
        """Return the trial with one more report, in place of those that it has trained again after a restart.

        Those are the last ones, since times grow: the others are not looked at, of which a trial may have thousands.
        """
        last = takewhile(lambda it: math.isnan(it.time) or it.is_repeated_by(report), reversed(self.reports))
        first = len(self.reports) - (0 if math.isnan(report.time) else sum(1 for _ in last))
        kept = (it for it in self.reports[first:] if not it.is_repeated_by(report))
        return replace(self, reports=(*self.reports[:first], *kept, report))

    def as_trained(self, *, has_metrics: bool) -> "TrialRecord":
        """Return the trial as it has trained: one that goes on from another one's checkpoint as before that, at first.

        Args:
            has_metrics: Whether its present run has metrics by now.

        """
        if self.former is None or has_metrics or self.state == "failed":
            return self
        return replace(self.former, state=self.state, reason=self.reason)


History: TypeAlias = Mapping[int, TrialRecord]


def apply(trials: dict[int, TrialRecord], event: Event, common: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Apply `event` to `trials`, and return the config of all trials that start or resume after it.

    Args:
        trials: The trials before it.
        event: The event.
        common: What this function returned for the previous event; None if there is none.

    """
    match event:
        case SweepLed():
            if event.is_fresh:
                trials.clear()
            for number, trial in trials.items():
                if trial.state == "running":
                    trials[number] = replace(trial, common=event.config)
            return event.config
        case TrialStarted():
            trials[event.trial] = TrialRecord(
                event.trial, event.run, event.config, event.study_number, milestone=event.milestone, common=common
            )
        case TrialResumed():
            trial = trials[event.trial] if event.cloned is None else _taking_over(trials[event.trial], event.cloned)
            trials[event.trial] = replace(trial, state="running", reason=None, milestone=event.milestone, common=common)
        case TrialEnded():
            trials[event.trial] = _ended(trials[event.trial], event)
        case TrialReported():
            trials[event.trial] = _reported(trials[event.trial], event)
        case CheckpointsDeleted():
            trial = trials[event.trial]
            trials[event.trial] = replace(trial, deleted_runs=(*trial.deleted_runs, event.run))
    return common


def _ended(trial: TrialRecord, event: TrialEnded) -> TrialRecord:
    if event.undoes_clone and trial.former is not None:
        earlier_runs = (*trial.former.earlier_runs, trial.run)
        trial = replace(trial.former, earlier_runs=earlier_runs, deleted_runs=trial.deleted_runs)
    former = trial.former if event.state == "failed" else None  # a failed one may be restarted
    return replace(trial, state=event.state, reason=event.reason, metrics=event.metrics, former=former)


def _reported(trial: TrialRecord, event: TrialReported) -> TrialRecord:
    reported = replace(
        trial.with_report(RungReport(event.time, event.value, event.checkpoint, event.num_reports, trial.run)),
        state=event.state,
        reason=event.reason,
        metrics=event.metrics,
        milestone=event.milestone,
        former=None,
    )
    return reported if event.cloned is None else _taking_over(reported, event.cloned)


def _taking_over(trial: TrialRecord, cloned: Cloned) -> TrialRecord:
    """Return a trial that goes on from another one's checkpoint."""
    return replace(
        trial,
        run=cloned.run,
        config=cloned.config,
        source=cloned.source,
        is_cloned=True,
        former=replace(trial, source=None, former=None),
        earlier_runs=(*trial.earlier_runs, trial.run),
        reports_before=cloned.reports_before,
    )


def history_of(events: Iterable[Event]) -> dict[int, TrialRecord]:
    """Return the trials after `events`, by number."""
    trials: dict[int, TrialRecord] = {}
    common: dict[str, Any] | None = None
    for event in events:
        common = apply(trials, event, common)
    return trials


def has_begun_again(events: Iterable[Event], attempt: int) -> bool:
    """Return whether the sweep has begun again in `attempt` or later."""
    return any(isinstance(event, SweepLed) and event.is_fresh and event.attempt >= attempt for event in events)


def used_time_s(events: Iterable[Event]) -> float:
    """Return the time of a sweep that counts against its budget, after `events`."""
    used_s = 0.0
    for event in events:
        if isinstance(event, SweepLed) and event.is_fresh:
            used_s = 0.0
        elif isinstance(event, SweepLed | TrialEvent):
            used_s = max(used_s, event.used_s)
    return used_s


def operations_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the operations of the study after `events`."""
    operations: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, SweepLed) and event.is_fresh:
            operations.clear()
        elif isinstance(event, TrialStarted | TrialReported | TrialEnded):
            operations += event.operations
    return operations


def score_of(trial: TrialRecord, metric: str, mode: str) -> float | None:
    """Return the value of a metric, negated if a high one is better; None if it is no finite number, or the trial failed."""
    return score_in(trial.metrics, trial.state, metric, mode)


def score_in(metrics: Metrics, state: TrialState, metric: str, mode: str) -> float | None:
    """Return the value of a metric in a trial's metrics; see `score_of`."""
    value = value_in(metrics, state, metric)
    return value if value is None or mode == "min" else -value


def value_in(metrics: Metrics, state: TrialState, metric: str) -> float | None:
    """Return the value of a metric in a trial's metrics; None if it is no finite number, or the trial failed."""
    return None if state == "failed" else find_finite_score(metrics, metric)


def scores_in(metrics: Metrics, state: TrialState, names: Sequence[str], modes: Sequence[str]) -> list[float] | None:
    """Return the values of several metrics in a trial's metrics; None if one has none. See `score_of`."""
    scores = [score_in(metrics, state, metric, mode) for metric, mode in zip(names, modes, strict=True)]
    known = [score for score in scores if score is not None]
    return known if len(known) == len(scores) else None


def beats(scores: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether a trial is better in one metric than another trial, and worse in none."""
    return scores != others and all(a <= b for a, b in zip(scores, others, strict=True))
