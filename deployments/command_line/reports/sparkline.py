"""A curve in one line of text."""

import math
import sys
from collections.abc import Sequence

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#%"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of `values` in at most `width` characters; a gap where there is no finite number.

    Each character is the mean of the finite values of an equal share of the reports, between the lowest and the highest of
    these means.
    """
    count = min(width, len(values))
    shares = [values[place * len(values) // count : (place + 1) * len(values) // count] for place in range(count)]
    means = [_mean([value for value in share if math.isfinite(value)]) for share in shares]
    finite = [mean for mean in means if mean is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    marks = _marks()
    return "".join(" " if mean is None else marks[_level(mean, low, high)] for mean in means)


def _mean(values: Sequence[float]) -> float | None:
    return sum(value / len(values) for value in values) if values else None


def _level(mean: float, low: float, high: float) -> int:
    top = len(_BLOCKS) - 1
    span = high / 2 - low / 2  # halves, since the difference of two large numbers overflows
    return top // 2 if span <= 0 else min(top, int((mean / 2 - low / 2) / span * (top + 1)))


def _marks() -> str:
    try:
        _BLOCKS.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return _ASCII
    return _BLOCKS
