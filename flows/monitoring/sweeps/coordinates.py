"""The pictures of a sweep's parameters: parallel coordinates, and a bar for the importance of each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from prefect_torch.flows.monitoring.pages.drawing.axis import WIDE_RATIO, Axis, log_axis, value_axis
from prefect_torch.flows.monitoring.pages.drawing.curves import LARGEST
from prefect_torch.flows.monitoring.pages.drawing.svg import (
    COLOURS,
    WIDTH,
    attributes,
    document,
    polyline,
    stroke,
    text,
)
from prefect_torch.flows.monitoring.text import shorten, show_compact

from .parameters import Value, is_number, varied
from .view import SeenTrial

MAX_PARAMETERS = 7
_HEIGHT, _TOP, _BOTTOM, _SIDE = 260, 34, 16, 76  # beside the first axis, "-0.0013917" fits
_LABEL_HEIGHT, _ABOVE_LINE, _LETTER_WIDTH = 11, 4, 6.2
_MAX_TRIALS = 200
_MAX_LABELS = 8
_FEW = 5  # numbers that are written beside their axis, instead of round ones
_GOOD, _BAD = (59, 130, 246), (150, 156, 168)
_BAR_HEIGHT, _NAME_WIDTH = 20, 180


@dataclass(frozen=True, slots=True)
class Scale:
    """One axis of the picture.

    Attributes:
        name: The parameter, or the metric.
        positions: How far up the axis each value lies, by its text.
        ticks: The positions and texts beside it.
        note: A word below the name.

    """

    name: str
    positions: Mapping[str, float]
    ticks: Sequence[tuple[float, str]]
    note: str = ""


def draw_coordinates(trials: Sequence[SeenTrial], metric: str, mode: str, order: Sequence[str]) -> str | None:
    """Return a line for each trial through its parameters and its score as an SVG document; None if there are too few.

    The bluer a line, the better its trial; the best is green.

    Args:
        trials: The trials with a score, the best first.
        metric: The name of the score.
        mode: "min" or "max".
        order: The most important parameters, which come first if there are more than fit.

    """
    shown = [trial for trial in trials if trial.value is not None][:_MAX_TRIALS]
    names = varied([trial.parameters for trial in shown])
    names = [name for name in names if name in sorted(names, key=lambda it: _place(it, order))[:MAX_PARAMETERS]]
    if len(shown) < 2 or not names:  # noqa: PLR2004 - one line compares nothing
        return None
    # By the number of the column: a parameter may have the metric's name.
    rows: list[dict[int, Value]] = [
        {number: trial.parameters[name] for number, name in enumerate(names) if name in trial.parameters}
        | {len(names): trial.value}
        for trial in shown
    ]
    scales = [_scale(name, [row[number] for row in rows if number in row]) for number, name in enumerate([*names, metric])]
    gap = (WIDTH - 2 * _SIDE) / (len(scales) - 1)
    lines = [
        _line(scales, row, gap, share=number / (len(rows) - 1), is_best=number == 0)
        for number, row in reversed(list(enumerate(rows)))
    ]
    axes = [part for number, scale in enumerate(scales) for part in _axis(scale, _SIDE + number * gap, gap)]
    boxes = [box for number, scale in enumerate(scales) for box in _label_boxes(scale, _SIDE + number * gap)]
    words = "low is good" if mode == "min" else "high is good"
    note = text(WIDTH - _SIDE, _HEIGHT - 2, words, text_anchor="middle", font_size="9")
    return document(WIDTH, _HEIGHT, [*_outside(boxes, lines), *axes, note])


def draw_importances(found: Mapping[str, float]) -> str | None:
    """Return a bar for each parameter as an SVG document; None without any.

    Args:
        found: The share that each explains, the most important first.

    """
    shown = list(found.items())[: 2 * MAX_PARAMETERS]
    if not shown:
        return None
    widest = WIDTH - _NAME_WIDTH - 60
    parts = []
    for number, (name, share) in enumerate(shown):
        y = number * _BAR_HEIGHT
        parts.append(text(_NAME_WIDTH - 8, y + 14, shorten(name, 28), text_anchor="end"))
        bar = {"x": str(_NAME_WIDTH), "y": str(y + 4), "height": str(_BAR_HEIGHT - 8), "rx": "2", "fill": COLOURS[0]}
        parts.append(f"<rect {attributes(**bar, width=f'{max(1.0, widest * share):.1f}')}/>")
        parts.append(text(_NAME_WIDTH + max(1.0, widest * share) + 6, y + 14, f"{share:.0%}"))
    return document(WIDTH, _BAR_HEIGHT * len(shown) + 4, parts)


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


def _scale(name: str, values: Sequence[Value]) -> Scale:
    numbers = [float(value) for value in values if _is_drawable(value)]
    if len(numbers) == len(values) and len(set(numbers)) > 1:
        axis = _number_axis(numbers)
        positions = {repr(value): axis.position(float(value)) for value in values if _is_drawable(value)}
        few = len(set(numbers)) <= _FEW
        ticks = [(axis.position(tick), show_compact(tick)) for tick in (sorted(set(numbers)) if few else axis.ticks)]
        return Scale(name, positions, _legible(ticks) if few else ticks, _note(axis))
    kinds = list(dict.fromkeys(map(_show, values)))
    places = {kind: (number + 0.5) / len(kinds) for number, kind in enumerate(kinds)}
    positions = {repr(value): places[_show(value)] for value in values}
    return Scale(name, positions, [(places[kind], shorten(kind, 12)) for kind in kinds[:_MAX_LABELS]])


def _legible(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the first and the last tick, and those between them whose texts do not overlap another."""
    kept: list[tuple[float, str]] = []
    for tick in (ticks[0], ticks[-1], *ticks[1:-1]):
        if all(abs(_y(tick[0]) - _y(other)) >= _LABEL_HEIGHT for other, _ in kept):
            kept.append(tick)
    return sorted(kept)


def _number_axis(numbers: Sequence[float]) -> Axis:
    low, high = min(numbers), max(numbers)
    return log_axis(low, high) if low > 0 and high / low >= WIDE_RATIO else value_axis(numbers)


def _note(axis: Axis) -> str:
    return "log" if axis.is_log else ""


def _show(value: Value) -> str:
    return show_compact(value) if _is_drawable(value) else str(value)


def _is_drawable(value: Value) -> TypeGuard[float]:
    """Return whether a value has a place on an axis of numbers: infinity, such as a limit that is none, and NaN have not."""
    return is_number(value) and abs(value) <= LARGEST


def _line(scales: Sequence[Scale], row: Mapping[int, Value], gap: float, *, share: float, is_best: bool) -> str:
    places = ((number, scale) for number, scale in enumerate(scales) if number in row)
    points = [(_SIDE + number * gap, _y(scale.positions[repr(row[number])])) for number, scale in places]
    if is_best:
        return polyline(points, COLOURS[2], "2.6")
    mixed = (round(good + (bad - good) * share) for good, bad in zip(_GOOD, _BAD, strict=True))
    return polyline(points, f"rgb({','.join(map(str, mixed))})", "1.4", f"{0.85 - 0.6 * share:.2f}")


def _axis(scale: Scale, x: float, gap: float) -> Iterator[str]:
    yield stroke(x, _y(0), x, _y(1), opacity="0.7")
    name = shorten(scale.name, max(8, int(gap / 6.5)))
    yield text(x, 13, name, text_anchor="middle", font_weight="600")
    if scale.note:
        yield text(x, 25, scale.note, text_anchor="middle", font_size="9")
    for position, words in scale.ticks:
        yield stroke(x - 3, _y(position), x, _y(position), opacity="0.7")
        above = _y(position) - _ABOVE_LINE  # a line that comes from the left, at this height, would strike it out
        yield text(x - 6, above, words, text_anchor="end", font_size="10", font_weight="600")


def _label_boxes(scale: Scale, x: float) -> Iterator[str]:
    """Yield the place of each label beside an axis; how wide it is depends on the font, so this is about it."""
    for position, words in scale.ticks:
        width = _LETTER_WIDTH * len(words) + 4
        size = {"width": f"{width:.1f}", "height": str(_LABEL_HEIGHT)}
        left, top = x - 4 - width, _y(position) - _ABOVE_LINE - _LABEL_HEIGHT + 2
        yield f"<rect {attributes(x=f'{left:.1f}', y=f'{top:.1f}', **size)}/>"


def _outside(boxes: Iterable[str], parts: Iterable[str]) -> Iterator[str]:
    """Yield the parts with gaps where the boxes are: the page behind an image may be light or dark, and no colour would do."""
    yield f'<mask id="gaps"><rect {attributes(width=str(WIDTH), height=str(_HEIGHT), fill="white")}/>'
    yield from ('<g fill="black">', *boxes, '</g></mask><g mask="url(#gaps)">', *parts, "</g>")


def _y(position: float) -> float:
    return _TOP + (1 - position) * (_HEIGHT - _TOP - _BOTTOM)
