"""What a run's history says of each metric: a pure summary."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.metrics import MetricValue, flatten_metrics


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """One metric over all reports.

    Attributes:
        name: "a/b" for a nested one.
        reports: How many reports have it.
        first: Its first value.
        last: Its last value.
        min: The smallest number among its values; None where there is none, NaN aside.
        max: The largest.

    """

    name: str
    reports: int
    first: MetricValue
    last: MetricValue
    min: float | None
    max: float | None

    def numbers(self) -> tuple[MetricValue, MetricValue, MetricValue, MetricValue]:
        """Return the values in the order of a table."""
        return self.first, self.last, self.min, self.max


def summarize_metrics(history: Iterable[MetricRecord]) -> list[MetricSummary]:
    """Return a summary of every metric, in the order in which they were first reported."""
    values: dict[str, list[MetricValue]] = {}
    for record in history:
        for name, value in flatten_metrics(record.metrics):
            values.setdefault(name, []).append(value)
    return [_summarize(name, reported) for name, reported in values.items()]


def _summarize(name: str, reported: list[MetricValue]) -> MetricSummary:
    numbers = [value for value in reported if isinstance(value, (int, float)) and not math.isnan(value)]
    return MetricSummary(name, len(reported), reported[0], reported[-1], min(numbers, default=None), max(numbers, default=None))
