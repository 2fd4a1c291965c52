"""How the run of a trial has ended, and whether that is a failure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from prefect_torch.ckpt.runs.metrics import Metrics, find_metric, find_score
from prefect_torch.ckpt.text import encodable

TrialOutcome: TypeAlias = Literal["completed", "stopped", "failed"]
NO_METRIC = "no report of the trial has the metric"


@dataclass(frozen=True, slots=True)
class TrialEnd:
    """How the run of a trial has ended.

    Attributes:
        outcome: Whether its function returned ("completed"), it was stopped, or it failed for good.
        reason: The error, or None.
        metrics: The newest value of each metric that it reported.
        has_reported: Whether its run has a report: what its function returned is none.

    """

    outcome: TrialOutcome
    reason: str | None = None
    metrics: Metrics = field(default_factory=dict)
    has_reported: bool = True


def judge(end: TrialEnd, metrics: Sequence[str]) -> TrialEnd:
    """Return the end of a trial whose function returned: it has failed if it never reported one of `metrics`."""
    for metric in metrics:
        if find_score(end.metrics, metric) is None:
            return TrialEnd("failed", f"{NO_METRIC} {metric!r}{_instead(end.metrics, metric)}", end.metrics)
    return end


def _instead(metrics: Metrics, metric: str) -> str:
    """Return what the reports of a trial have instead of a number."""
    value = find_metric(metrics, metric)
    if value is not None:
        return f" as a number: it is {value!r}, of type {type(value).__name__}"
    if not metrics:
        return f"; its reports have none at all: call report({{{metric!r}: …}}), or return such a dict"
    return encodable(f"; its reports have {', '.join(sorted(metrics))}")
