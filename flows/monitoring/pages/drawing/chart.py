"""SVG charts, readable on light and dark pages: a panel with the curve of each metric, and a bar of where the time went."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice, pairwise

from prefect_torch.flows.monitoring.pages.attempt_log import Position
from prefect_torch.flows.monitoring.text import shorten, show_duration, show_number

from .axis import Axis, step_axis, value_axis
from .curves import Curve, Point
from .frame import Frame, draw_dot, draw_grid, draw_line
from .svg import COLOURS, WIDTH, document, stroke, text

MAX_PANELS = 8
_MAX_LOST = 6
_MAX_BOUNDARIES, _MAX_LABELS = 50, 12
_TIME_COLOURS = {"training": "#16a34a", "checkpointing": "#3b82f6", "restarting": "#d99a0b", "lost": "#e5484d"}
_PANEL_HEIGHT = 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 40, 26
_BAR_HEIGHT, _LINE_HEIGHT = 16, 18
_LETTER_WIDTH, _LETTER_HEIGHT = 6.6, 8.0  # a letter's mean width, a capital's height
_TITLE_LETTER_WIDTH = 8.0  # of a panel's title
_MAX_VALUE, _MIN_NAME = 16, 8  # characters of a title's value, which may be a large integer, and of its metric
_ENTRY_MARGIN = 34.0  # the swatch of a legend's entry and the gap after it


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric's lines.

    Attributes:
        curve: The metric.
        kept: The line that later attempts continued from.
        lost: The lines that were trained again later.
        best: The step and value of the best score; None for other metrics than the score.

    """

    curve: Curve
    kept: list[Point]
    lost: list[list[Point]]
    best: Point | None = None


def draw_curves(
    curves: Sequence[Curve],
    resume_points: Mapping[int, Position],
    first_steps: Mapping[int, int],
    best: Mapping[str, Point] | None = None,
) -> str | None:
    """Return the first `MAX_PANELS` of `curves` that have a number as an SVG document; None if none has.

    A panel has a line for what later attempts continued from, pale lines for what was lost and trained again, a dashed vertical
    line where a later attempt began, and a logarithmic axis where a linear one would squeeze most values together.

    Args:
        curves: The metrics, in the order of their panels.
        resume_points: The resume point of each attempt.
        first_steps: The first step that each attempt reported.
        best: The step and value to mark, by metric.

    """
    with_numbers = (panel for curve in curves if (panel := _panel(curve, resume_points, best or {})).kept)
    panels = list(islice(with_numbers, MAX_PANELS))
    if not panels:
        return None
    steps = [step for panel in panels for line in (panel.kept, *panel.lost) for step, _ in line]
    axis = step_axis(min(steps), max(steps))
    columns = 1 if len(panels) == 1 else 2
    width, height = WIDTH / columns, _PANEL_HEIGHT
    drawn = [
        _draw(panel, index, index % columns * width, index // columns * height, width, axis, first_steps)
        for index, panel in enumerate(panels)
    ]
    return document(WIDTH, height * -(-len(panels) // columns), drawn)


def draw_time(spent: Mapping[str, float]) -> str | None:
    """Return a bar divided as the time was, above its legend, as an SVG document; None if no time has passed.

    Args:
        spent: The seconds spent in "training", "checkpointing", "restarting" and "lost".

    """
    if sum(spent.values()) <= 0:
        return None
    legend = list(_legend(spent))
    height = max(y for _, y, _, _ in legend) + 12
    return document(WIDTH, height, [*_bar(spent), *(_entry(*entry) for entry in legend)])


def _panel(curve: Curve, resume_points: Mapping[int, Position], best: Mapping[str, Point]) -> Panel:
    return Panel(curve, curve.kept(resume_points), curve.lost(resume_points, _MAX_LOST), best.get(curve.name))


def _draw(panel: Panel, index: int, left: float, top: float, width: float, steps: Axis, first_steps: Mapping[int, int]) -> str:
    values = value_axis([value for line in (panel.kept, *panel.lost) for _, value in line])
    inner = Frame(left + _LEFT, top + _TOP, width - _LEFT - _RIGHT, _PANEL_HEIGHT - _TOP - _BOTTOM, steps, values)
    colour = COLOURS[index % len(COLOURS)]
    parts = (
        *_title(panel.curve, inner, colour),
        *draw_grid(inner),
        *_boundaries(inner, first_steps),
        *(draw_line(inner, line, colour, opacity="0.35") for line in panel.lost),
        draw_line(inner, panel.kept, colour),
        draw_dot(inner, panel.kept[-1], colour),
        *_best(inner, panel.kept, panel.best, colour),
    )
    return "".join(parts)


def _title(curve: Curve, frame: Frame, colour: str) -> Iterable[str]:
    left, right, y = frame.left - _LEFT + 8, frame.left + frame.width, frame.top - 20
    notes = ", ".join([*(["log"] if frame.values.is_log else []), *([f"{curve.num_odd} not finite"] if curve.num_odd else [])])
    value = shorten(show_number(curve.last), _MAX_VALUE)
    room = right - left - _TITLE_LETTER_WIDTH * (len(value) + 1) - _LETTER_WIDTH * (len(notes) + 2)
    name = shorten(curve.name, max(_MIN_NAME, int(room / _TITLE_LETTER_WIDTH)))
    words = f"{escape(name)}<tspan font-weight='400' font-size='11'>{escape('  ' + notes if notes else '')}</tspan>"
    yield f'<text x="{left:.1f}" y="{y:.1f}" font-size="13" font-weight="600" xml:space="preserve">{words}</text>'
    style = {"fill": colour, "text_anchor": "end", "font_weight": "600", "font_size": "13"}
    yield text(right, y, value, **style)


def _boundaries(frame: Frame, first_steps: Mapping[int, int]) -> Iterable[str]:
    """Draw where the newest `_MAX_BOUNDARIES` later attempts began, the newest `_MAX_LABELS` of them with their numbers."""
    later = sorted(first_steps)[1:][-_MAX_BOUNDARIES:]
    for number in later:
        x = frame.x(first_steps[number])
        yield stroke(x, frame.top - 4, x, frame.bottom, opacity="0.75", stroke_dasharray="3 3")
        if number in later[-_MAX_LABELS:]:
            yield text(x, frame.top - 7, f"#{number}", text_anchor="middle", font_size="9")


def _best(frame: Frame, line: Sequence[Point], best: Point | None, colour: str) -> Iterable[str]:
    """Draw a ring around the best point, and its step on the side where the picture has room, clear of the line."""
    if best is None:
        return
    x, y, words = frame.x(best[0]), frame.y(best[1]), f"best at {best[0]}"
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="none" stroke="{colour}" stroke-width="1.6"/>'
    is_left = x < frame.left + frame.width / 2
    start = x + 8 if is_left else x - 8
    ends = sorted((start, start + _LETTER_WIDTH * len(words) * (1 if is_left else -1)))
    place = {"text_anchor": "start" if is_left else "end", "font_weight": "600", "fill": colour}
    yield text(start, _baseline(frame, line, ends[0], ends[1], y), words, **place)


def _baseline(frame: Frame, line: Sequence[Point], left: float, right: float, y: float) -> float:
    """Return the baseline nearest to `y` on which a label from `left` to `right` is within the frame and not on the line."""
    heights = list(_heights(frame, line, left, right))
    middle = y + _LETTER_HEIGHT / 2
    baselines = sorted(range(int(frame.top) + 10, int(frame.bottom) - 4, 2), key=lambda it: abs(it - middle))
    clear = (it for it in baselines if all(low < it - _LETTER_HEIGHT - 4 or high > it + 4 for high, low in heights))
    return next(clear, baselines[0])


def _heights(frame: Frame, line: Sequence[Point], left: float, right: float) -> Iterator[tuple[float, float]]:
    """Yield the top and the bottom of each segment of the line between `left` and `right`."""
    places = [(frame.x(step), frame.y(value)) for step, value in line]
    for (x1, y1), (x2, y2) in pairwise(places):
        first, last = max(left, min(x1, x2)), min(right, max(x1, x2))
        if first <= last:
            ends = [y1 + (y2 - y1) * ((x - x1) / (x2 - x1)) if x2 != x1 else y for x, y in ((first, y1), (last, y2))]
            yield min(ends), max(ends)


def _bar(spent: Mapping[str, float]) -> Iterator[str]:
    yield f'<clipPath id="bar"><rect width="{WIDTH}" height="{_BAR_HEIGHT}" rx="5"/></clipPath><g clip-path="url(#bar)">'
    left = 0.0
    for name, seconds in spent.items():
        width = WIDTH * seconds / sum(spent.values())
        yield f'<rect x="{left:.2f}" width="{width:.2f}" height="{_BAR_HEIGHT}" fill="{_TIME_COLOURS[name]}"/>'
        left += width
    yield "</g>"


def _legend(spent: Mapping[str, float]) -> Iterator[tuple[float, float, str, str]]:
    """Yield the position, colour and words of each entry; an entry that does not fit begins a new line."""
    x, y = 0.0, _BAR_HEIGHT + 22.0
    for name, seconds in spent.items():
        words = f"{name} {show_duration(seconds)} ({seconds / sum(spent.values()):.1%})"
        width = _ENTRY_MARGIN + _LETTER_WIDTH * len(words)
        if x + width > WIDTH:
            x, y = 0.0, y + _LINE_HEIGHT
        yield x, y, _TIME_COLOURS[name], words
        x += width


def _entry(x: float, y: float, colour: str, words: str) -> str:
    swatch = f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" fill="{colour}"/>'
    return swatch + text(x + 16, y, words, font_size="12")
