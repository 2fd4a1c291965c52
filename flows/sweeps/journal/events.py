"""The events of a sweep, each an entry of its journal."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from prefect_torch.ckpt.runs.layout import check_run_name
from prefect_torch.ckpt.runs.metrics import Metrics
from prefect_torch.ckpt.runs.records.fields import Count, decode

_logger = logging.getLogger(__name__)
RunName: TypeAlias = Annotated[str, check_run_name]


@dataclass(frozen=True, slots=True)
class SweepLed:
    """A process leads the sweep from here on.

    Attributes:
        attempt: Its attempt.
        is_fresh: Whether the sweep begins again, without the trials before.
        config: The config of all trials that start or resume from here on; None if an older version did not record it.
        used_s: As in `TrialEvent`; recorded now and then while no trial has an event.

    """

    attempt: Count
    is_fresh: bool = False
    config: dict[str, Any] | None = None
    used_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEvent:
    """An event of a trial.

    Attributes:
        used_s: The time of the sweep so far that counts against its budget, in seconds.

    """

    used_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialStarted(TrialEvent):
    """A new trial starts.

    Attributes:
        trial: Its number.
        run: The name of its run.
        config: Its config.
        study_number: The number of its config in the study.
        milestone: The time from which its first report with a checkpoint needs a decision; None if none does.
        operations: The operations of the study that suggested it.

    """

    trial: Count
    run: RunName
    config: dict[str, Any]
    study_number: Count
    milestone: float | None = None
    operations: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrialEnded(TrialEvent):
    """A trial has ended, for good unless it is restarted.

    Attributes:
        trial: Its number.
        state: "completed", "stopped" or "failed".
        reason: Why it was stopped, or its error; None if it completed.
        metrics: Its last metrics.
        operations: The operations by which the study has recorded it.
        undoes_clone: Whether it has ended as it was before it went on from another trial's checkpoint, in the run before.

    """

    trial: Count
    state: Literal["completed", "stopped", "failed"]
    reason: str | None = None
    metrics: Metrics = field(default_factory=dict)
    operations: list[dict[str, Any]] = field(default_factory=list)
    undoes_clone: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint of another trial.

    Attributes:
        trial: The other trial's number.
        run: The name of its run.
        checkpoint: The id of its checkpoint, which is pinned in that run.

    """

    trial: Count
    run: RunName
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

    run: RunName
    config: dict[str, Any]
    source: Source
    reports_before: Count = 0


@dataclass(frozen=True, slots=True)
class TrialResumed(TrialEvent):
    """A trial that had been paused, or had failed, starts again from its latest checkpoint, or from another trial's.

    Attributes:
        trial: Its number.
        milestone: As in `TrialStarted`.
        cloned: As in `TrialReported`.

    """

    trial: Count
    milestone: float | None = None
    cloned: Cloned | None = None


@dataclass(frozen=True, slots=True)
class TrialReported(TrialEvent):
    """A trial has reported, and its next state is decided.

    Attributes:
        trial: Its number.
        time: The time of the report.
        value: The metric, or its negative where a high one is good: a lower value is better.
        checkpoint: The id of the report's checkpoint, or None.
        metrics: Its metrics.
        state: "running" if the trial goes on, else how it ends.
        milestone: The time from which its next report with a checkpoint needs a decision.
        reason: Why it ends, or waits.
        cloned: The checkpoint of another trial that it goes on from, or None.
        operations: The operations by which the study has recorded it.
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
    run: RunName


Event: TypeAlias = SweepLed | TrialStarted | TrialResumed | TrialReported | TrialEnded | CheckpointsDeleted
_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (SweepLed, TrialStarted, TrialResumed, TrialReported, TrialEnded, CheckpointsDeleted)
}


def encode_event(event: Event) -> dict[str, Any]:
    """Return an event as an entry of the journal."""
    return {"kind": type(event).__name__, **asdict(event)}


def decode_event(entry: Mapping[str, Any], where: str) -> Event | None:
    """Return the event in an entry; None, with a warning, if this version does not know its kind.

    Raises:
        MalformedRecordError: If a field is missing, or of another type.

    """
    kind = _KINDS.get(str(entry.get("kind")))
    if kind is None:
        _logger.warning("left out: %s is of the unknown kind %r", where, entry.get("kind"))
        return None
    return decode(kind, entry, where, f"a {kind.__name__}")
