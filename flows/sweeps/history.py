"""The history of a sweep: what its journal's entries say of each trial; pure."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from prefect_torch.ckpt.runs.metrics import Metrics, find_finite_score
from prefect_torch.ckpt.runs.record_fields import Count
from prefect_torch.ckpt.runs.records import decode

TrialState: TypeAlias = Literal["running", "paused", "completed", "stopped", "failed"]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SweepLed:
    """A process leads the sweep from here on.

    Attributes:
        attempt: Its attempt.
        is_fresh: Whether the sweep begins again, without the trials before.

    """

    attempt: Count
    is_fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrialEvent:
    """An event of a trial.

    Attributes:
        used_s: The time of the sweep so far that counts against its budget, in seconds.

    """

    used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialStarted(_TrialEvent):
    """A new trial starts.

    Attributes:
        trial: Its number.
        run: The name of its run.
        config: Its config.
        study_number: The number of its config in the study.
        milestone: The time at whose first checkpoint it asks whether it goes on; None if it need not.
        operations: Those of the study that suggested it.

    """

    trial: Count
    run: str
    config: dict[str, Any]
    study_number: Count
    milestone: float | None = None
    operations: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrialEnded(_TrialEvent):
    """A trial has ended, for good unless it is restarted.

    Attributes:
        trial: Its number.
        state: "completed", "stopped" or "failed".
        reason: Why it was stopped, or its error; None if it completed.
        metrics: Its last metrics.
        operations: Those of the study that was told of it.

    """

    trial: Count
    state: Literal["completed", "stopped", "failed"]
    reason: str | None = None
    metrics: Metrics = field(default_factory=dict)
    operations: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrialResumed(_TrialEvent):
    """A trial that had been paused, or had failed, starts again from its latest checkpoint.

    Attributes:
        trial: Its number.
        milestone: As for a new one.

    """

    trial: Count
    milestone: float | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint of another trial.

    Attributes:
        trial: The other trial's number.
        run: The name of its run.
        checkpoint: The id of its checkpoint, which is pinned in that run.

    """

    trial: Count
    run: str
    checkpoint: str


@dataclass(frozen=True, slots=True)
class Cloned:
    """A trial goes on from another one's checkpoint, in a new run.

    Attributes:
        run: The name of the new run.
        config: The config that it goes on with.
        source: The checkpoint that it begins from.
        reports_before: The number of reports up to that checkpoint.

    """

    run: str
    config: dict[str, Any]
    source: Source
    reports_before: Count = 0


@dataclass(frozen=True, slots=True)
class TrialReported(_TrialEvent):
    """A trial has reported, and what it does next is decided.

    Attributes:
        trial: Its number.
        time: The time of the report.
        value: The metric, or its negative where a high one is good: a lower value is better.
        checkpoint: The id of the report's checkpoint, or None.
        metrics: Its metrics.
        state: "running" if the trial goes on, else how it ends.
        milestone: The time at whose first checkpoint it asks again.
        reason: Why it ends, or waits.
        cloned: The checkpoint of another trial that it goes on from, or None.
        operations: Those of the study that was told of it.
        num_reports: The number of its reports up to this one.

    """

    trial: Count
    time: float
    value: float
    checkpoint: str | None
    metrics: Metrics
    state: Literal["running", "paused", "stopped", "completed"]
    milestone: float | None = None
    reason: str | None = None
    cloned: Cloned | None = None
    operations: list[dict[str, Any]] = field(default_factory=list)
    num_reports: Count = 0


@dataclass(frozen=True, slots=True)
class CheckpointsDeleted:
    """The checkpoints of a run have been deleted, since better trials keep theirs.

    Attributes:
        trial: The number of its trial.
        run: The name of the run.

    """

    trial: Count
    run: str


Event: TypeAlias = SweepLed | TrialStarted | TrialResumed | TrialReported | TrialEnded | CheckpointsDeleted
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (SweepLed, TrialStarted, TrialResumed, TrialReported, TrialEnded, CheckpointsDeleted)
}


@dataclass(frozen=True, slots=True)
class RungReport:
    """A report of a trial at which was decided; see `TrialReported`."""

    time: float
    value: float
    checkpoint: str | None = None
    num_reports: int = 0


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """A trial as the journal has it.

    Attributes:
        number: Its number, from 0.
        run: The name of its run.
        config: What was chosen for it.
        study_number: The number of its config in the study.
        state: Its state.
        reason: Why it was stopped or paused, or its error.
        metrics: Its metrics, as of its last decision or its end.
        milestone: The time at whose first checkpoint it asks whether it goes on.
        reports: Those of its reports at which was decided, in order.
        source: The checkpoint of another trial that its run begins from; None if it begins afresh.
        is_cloned: Whether its config is no longer the one that was suggested for it.
        earlier_runs: The names of its runs before it went on from other trials' checkpoints.
        deleted_runs: The names of those of its runs whose checkpoints have been deleted.
        reports_before: The number of reports before its present run.

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
    earlier_runs: tuple[str, ...] = ()
    deleted_runs: tuple[str, ...] = ()
    reports_before: int = 0


History: TypeAlias = Mapping[int, TrialRecord]


def encode_event(event: Event) -> dict[str, Any]:
    """Return an event as an entry of the journal."""
    return {"kind": type(event).__name__, **asdict(event)}


def decode_event(entry: Mapping[str, Any], where: str) -> Event | None:
    """Return the event in an entry; None, with a warning, if this version knows no such event.

    Raises:
        MalformedRecordError: If a field is missing, or of another type.

    """
    kind = _KINDS.get(str(entry.get("kind")))
    if kind is None:
        _logger.warning("left out: %s has an entry of the unknown kind %r", where, entry.get("kind"))
        return None
    return decode(kind, entry, where, f"a {kind.__name__}")


def apply(trials: dict[int, TrialRecord], event: Event) -> None:
    """Change `trials` as `event` says."""
    match event:
        case SweepLed(is_fresh=True):
            trials.clear()
        case SweepLed():
            pass
        case TrialStarted():
            trials[event.trial] = TrialRecord(
                event.trial, event.run, event.config, event.study_number, milestone=event.milestone
            )
        case TrialResumed():
            trials[event.trial] = replace(trials[event.trial], state="running", reason=None, milestone=event.milestone)
        case TrialEnded():
            trials[event.trial] = replace(trials[event.trial], state=event.state, reason=event.reason, metrics=event.metrics)
        case TrialReported():
            trials[event.trial] = _reported(trials[event.trial], event)
        case CheckpointsDeleted():
            trial = trials[event.trial]
            trials[event.trial] = replace(trial, deleted_runs=(*trial.deleted_runs, event.run))


def _reported(trial: TrialRecord, event: TrialReported) -> TrialRecord:
    reported = replace(
        trial,
        state=event.state,
        reason=event.reason,
        metrics=event.metrics,
        milestone=event.milestone,
        reports=(*trial.reports, RungReport(event.time, event.value, event.checkpoint, event.num_reports)),
    )
    if event.cloned is None:
        return reported
    cloned = event.cloned
    return replace(
        reported,
        run=cloned.run,
        config=cloned.config,
        source=cloned.source,
        is_cloned=True,
        earlier_runs=(*trial.earlier_runs, trial.run),
        reports_before=cloned.reports_before,
    )


def history_of(events: Iterable[Event]) -> dict[int, TrialRecord]:
    """Return the trials after `events`, by number."""
    trials: dict[int, TrialRecord] = {}
    for event in events:
        apply(trials, event)
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
        elif isinstance(event, _TrialEvent):
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
    """Return the value of a metric as one of which a lower is better; None if it is no finite number, or the trial failed."""
    return score_in(trial.metrics, trial.state, metric, mode)


def score_in(metrics: Metrics, state: TrialState, metric: str, mode: str) -> float | None:
    """Return the value of a metric in a trial's metrics; see `score_of`."""
    value = value_in(metrics, state, metric)
    return value if value is None or mode == "min" else -value


def value_in(metrics: Metrics, state: TrialState, metric: str) -> float | None:
    """Return the value of a metric in a trial's metrics; None if it is no finite number, or the trial failed."""
    return None if state == "failed" else find_finite_score(metrics, metric)
