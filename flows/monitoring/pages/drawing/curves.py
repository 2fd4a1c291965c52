"""The metrics of a run as curves of bounded size, however long it trains."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias, TypeVar

from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.metrics import MetricValue, as_float, find_score, flatten_metrics
from prefect_torch.ckpt.runs.retention import Order
from prefect_torch.flows.monitoring.pages.attempt_log import Position

MAX_POINTS = 200
MAX_CURVES = 50
_HELD_POINTS = 4 * MAX_POINTS  # of one attempt
_WHOLE_ATTEMPTS = 8  # the newest ones, whose lost work is drawn
_HELD_BEFORE = 20 * MAX_POINTS  # of all attempts before those together
LARGEST = 1e300  # differences of larger numbers overflow

Point: TypeAlias = tuple[int, float]
_HeldPoint: TypeAlias = tuple[int, float, int, float]  # and the record's attempt and position in it, as resume points have it
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
        points: Step, value, attempt and position of each record with a finite number, thinned, by each of the newest attempts.
        older: Those of all attempts before, oldest first, thinned together.
        begins: The position of the first report of each attempt of these, or the lower one at which a later attempt began.

    """

    name: str
    last: MetricValue = None
    low: float | None = None
    high: float | None = None
    num_odd: int = 0
    points: dict[int, list[_HeldPoint]] = field(default_factory=dict)
    older: list[_HeldPoint] = field(default_factory=list)
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
            self._begin(attempt)
        points = self.points[attempt]
        points.append((step, number, attempt, position))
        if position >= 0:
            self.begins[attempt] = min(self.begins[attempt], position)
        if len(points) > _HELD_POINTS:
            self.points[attempt] = thin(points, _HELD_POINTS // 2)

    def _begin(self, attempt: int) -> None:
        self.points[attempt] = []
        self.begins.setdefault(attempt, math.inf)
        if len(self.points) > _WHOLE_ATTEMPTS:
            self.older += self.points.pop(next(iter(self.points)))
        if len(self.older) > _HELD_BEFORE:
            self._thin_older()

    def _thin_older(self) -> None:
        lost_from: dict[int, float] = {}
        begun = math.inf
        for attempt, begin in reversed(self.begins.items()):
            lost_from[attempt] = begun
            self.begins[attempt] = begun = min(begun, begin)
        kept = [point for point in self.older if point[3] < lost_from[point[2]]]
        lost = [point for point in self.older if point[3] >= lost_from[point[2]]]
        share = _HELD_BEFORE // 4  # apart, lest a value that was lost takes the place of the best one that was kept
        self.older = sorted((*thin(kept, share), *thin(lost, share)), key=lambda point: point[2])
        held = {*self.points, *(point[2] for point in self.older)}
        self.begins = {attempt: begin for attempt, begin in self.begins.items() if attempt in held}

    def kept(self, resume_points: Mapping[int, Position]) -> list[Point]:
        """Return the points that later attempts continued from, at most `MAX_POINTS`.

        Args:
            resume_points: The resume point of each attempt.

        """
        kept = [(point[0], point[1]) for point in self._held() if point[2:] <= resume_points[point[2]]]
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
        lines: dict[int, list[Point]] = defaultdict(list)
        for point in self._held():
            if point[2:] > resume_points[point[2]]:
                lines[point[2]].append((point[0], point[1]))
        return [thin(line, MAX_POINTS // 4) for line in list(lines.values())[-most:]]

    def _held(self) -> Iterator[_HeldPoint]:
        return chain(self.older, *self.points.values())


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
