"""The metrics of a run as curves of bounded size, however long it trains."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.metrics import MetricValue, as_float, find_score, flatten_metrics
from prefect_torch.ckpt.runs.retention import Order
from prefect_torch.flows.monitoring.pages.attempt_log import Position

MAX_POINTS = 200
MAX_CURVES = 50
_HELD_POINTS = 4 * MAX_POINTS  # of one attempt
_WHOLE_ATTEMPTS = 8  # the newest ones, whose lost work is drawn
_HELD_BEFORE = 20 * MAX_POINTS  # of all attempts before those
LARGEST = 1e300  # differences of larger numbers overflow

Point: TypeAlias = tuple[int, float]
_HeldPoint: TypeAlias = tuple[int, float, float]  # and the position of the record in its attempt, as resume points have it
_AnyPoint = TypeVar("_AnyPoint", Point, _HeldPoint)


@dataclass(slots=True)
class Curve:
    """One metric over the steps of a run.

    Attributes:
        name: "a/b" for a nested one.
        last: Its last value, of any type.
        low: Its smallest finite number; None before the first.
        high: Its largest finite number; None before the first.
        num_odd: The number of values that are NaN or infinite.
        points: Step, value and position of each record with a finite number, thinned, by attempt; those of all but the newest
            attempts are thinned together.
        begins: The position of the first of them that is of a report, by attempt.

    """

    name: str
    last: MetricValue = None
    low: float | None = None
    high: float | None = None
    num_odd: int = 0
    points: dict[int, list[_HeldPoint]] = field(default_factory=dict)
    begins: dict[int, float] = field(default_factory=dict)

    def add(self, attempt: int, step: int, value: MetricValue, position: float) -> None:
        """Add a value, which belongs to the work up to step `position` of the attempt's reports."""
        self.last = value
        number = _number(value)
        if number is None:
            return
        if math.isnan(number) or abs(number) > LARGEST:
            self.num_odd += 1
            return
        self.low = number if self.low is None else min(self.low, number)
        self.high = number if self.high is None else max(self.high, number)
        if attempt not in self.points:
            self._thin_older()
        points = self.points.setdefault(attempt, [])
        points.append((step, number, position))
        if position >= 0:
            self.begins.setdefault(attempt, position)
        if len(points) > _HELD_POINTS:
            self.points[attempt] = thin(points, _HELD_POINTS // 2)

    def _thin_older(self) -> None:
        older = list(self.points)[:-_WHOLE_ATTEMPTS]
        if sum(len(self.points[attempt]) for attempt in older) <= _HELD_BEFORE:
            return
        share, begun = _HELD_BEFORE // 2 // len(older), math.inf
        is_older = set(older)
        for attempt, points in reversed(self.points.items()):
            if attempt in is_older:  # apart, lest a value that was lost takes the place of the best one that was kept
                num_before = bisect_left(points, begun, key=lambda point: point[2])
                parts = (points[:num_before], points[num_before:])
                self.points[attempt] = [it for part in parts for it in thin(part, max(4, share * len(part) // len(points)))]
            begun = min(begun, self.begins.get(attempt, math.inf))

    def kept(self, resume_points: Mapping[int, Position]) -> list[Point]:
        """Return the points that later attempts continued from, at most `MAX_POINTS`.

        Args:
            resume_points: The resume point of each attempt.

        """
        kept = [
            (step, value)
            for attempt, points in self.points.items()
            for step, value, position in points
            if (attempt, position) <= resume_points[attempt]
        ]
        return thin(kept, MAX_POINTS)

    def best(self, resume_points: Mapping[int, Position], order: Order) -> Point | None:
        """Return the best of the points that later attempts continued from, the newest of equal ones; None without points.

        Args:
            resume_points: The resume point of each attempt.
            order: Whether a high ("max") or a low ("min") value is good.

        """
        sign = 1 if order == "max" else -1
        return max(self.kept(resume_points), key=lambda point: (sign * point[1], point[0]), default=None)

    def lost(self, resume_points: Mapping[int, Position], most: int) -> list[list[Point]]:
        """Return what was trained again later: a line for each of the newest `most` attempts that lost reports."""
        lines = [
            [(step, value) for step, value, position in points if (attempt, position) > resume_points[attempt]]
            for attempt, points in self.points.items()
        ]
        return [thin(line, MAX_POINTS // 4) for line in lines if line][-most:]


class Curves:
    """All metrics of a run in the order of their first reports; of more than `MAX_CURVES`, the first ones."""

    def __init__(self) -> None:
        self._by_name: dict[str, Curve] = {}
        self._reported: dict[int, int] = {}  # the step of each attempt's last report
        self.left_out: set[str] = set()

    def add(self, record: MetricRecord) -> None:
        """Add a report, or metrics that were logged since the report added before."""
        if record.is_logged:  # by a step that may count something else than the reports' does
            position = self._reported.get(record.attempt, -1) + 0.5
        else:
            position = self._reported[record.attempt] = record.step
        for name, value in flatten_metrics(record.metrics):
            if name not in self._by_name:
                if len(self._by_name) == MAX_CURVES:
                    self.left_out.add(name)
                    continue
                self._by_name[name] = Curve(name)
            self._by_name[name].add(record.attempt, record.step, value, position)

    def sorted(self, first: str | None) -> list[Curve]:
        """Return the curves, the one named `first` at the front."""
        return sorted(self._by_name.values(), key=lambda curve: curve.name != first)


def finite_values(history: Iterable[MetricRecord], metric: str) -> Iterator[tuple[MetricRecord, float]]:
    """Yield each report with a value of a metric that can be drawn: finite, and with finite differences to others."""
    for record in history:
        score = find_score(record.metrics, metric)
        if score is not None and abs(value := as_float(score)) <= LARGEST:
            yield record, value


def thin(points: Sequence[_AnyPoint], most: int) -> list[_AnyPoint]:
    """Return at most `most` of `points` with the same shape: the lowest and the highest of equally wide ranges of steps.

    Args:
        points: The points in the order in which they are drawn.
        most: The maximum number of points returned, at least 4.

    """
    if len(points) <= most:
        return list(points)
    first, last = min(point[0] for point in points), max(point[0] for point in points)
    width = max(1, last - first) / (most // 2 - 1)  # and a range of its own for the last step
    chosen: dict[int, tuple[int, int]] = {}  # the indices of the lowest and of the highest, by range
    for index, point in enumerate(points):
        number, value = int((point[0] - first) / width), point[1]
        low, high = chosen.get(number, (index, index))
        chosen[number] = (index if value < points[low][1] else low, index if value > points[high][1] else high)
    kept = sorted({index for pair in chosen.values() for index in pair})
    return [points[index] for index in kept]


def _number(value: MetricValue) -> float | None:
    return as_float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
