"""The axes of a chart: linear, or logarithmic where values span decades."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_NUM_TICKS = 4
WIDE_RATIO = 30.0  # of the largest to the smallest number, from which on logarithms may show more
_SMALLEST, _LARGEST = 1e-307, 1e307  # arithmetic between these neither underflows nor overflows


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from values to a share of an axis.

    Attributes:
        low: The value at 0.
        high: The value at 1.
        is_log: Whether equal distances are equal ratios.
        ticks: The values to write beside it.

    """

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def position(self, value: float) -> float:
        """Return how far along the axis `value` lies."""
        low, high, value = (math.log10(it) if self.is_log else it for it in (self.low, self.high, value))
        return (value - low) / (high - low)


def value_axis(values: Sequence[float]) -> Axis:
    """Return an axis for `values`, logarithmic if they span decades and that gives their middle half more of the axis.

    Args:
        values: Finite numbers, at least one.

    """
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) / 10 or 1.0
        return _linear(low - margin, high + margin)
    if low > 0 and high / low > WIDE_RATIO and _middle_share(values) <= _middle_share([math.log10(value) for value in values]):
        return log_axis(low, high)
    margin = (high - low) / 20
    return _linear(low - margin, high + margin)


def log_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis between two positive numbers, the second of which is larger."""
    margin = 10 ** ((math.log10(high) - math.log10(low)) / 20)
    low, high = max(low / margin, _SMALLEST), min(high * margin, _LARGEST)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    within = [10.0**power for power in powers if low <= 10.0**power <= high]
    if len(within) < 3:  # noqa: PLR2004 - fewer ticks do not show a scale
        within = [factor * 10.0**power for power in powers for factor in (1, 2, 5) if low <= factor * 10.0**power <= high]
    return Axis(low, high, is_log=True, ticks=tuple(within[:: math.ceil(len(within) / (_NUM_TICKS + 1))]))


def step_axis(first: int, last: int) -> Axis:
    """Return an axis from a run's first to its last step, with whole steps as ticks."""
    axis = _linear(float(first), max(float(last), first + 1.0, math.nextafter(first, math.inf)))  # floats are rare from 2^53 on
    whole = tuple(tick for tick in axis.ticks if tick == int(tick))
    return Axis(axis.low, axis.high, axis.is_log, whole)


def _middle_share(values: Sequence[float]) -> float:
    """Return the share of the range of `values` that the middle half of them takes."""
    by_size = sorted(values)
    last = len(by_size) - 1
    return (by_size[last - last // 4] - by_size[last // 4]) / (by_size[last] - by_size[0])


def _linear(low: float, high: float) -> Axis:
    rough = max((high - low) / _NUM_TICKS, _SMALLEST)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    count = math.floor(high / step) - first + 1
    ticks = dict.fromkeys(float(f"{(first + index) * step:.12g}") for index in range(count))  # not 0.30000000000000004
    return Axis(low, high, is_log=False, ticks=tuple(tick for tick in ticks if low <= tick <= high))
