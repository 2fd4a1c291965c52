"""Curves as an SVG picture, small multiples of one metric each, readable on light and dark pages."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from prefect_torch.flows.monitoring.text import shorten, show_compact, show_number

from .attempt_log import Place
from .axis import Axis, step_axis, value_axis
from .curves import Curve, Point

MAX_PANELS = 8
_MAX_LOST = 6
_MAX_BOUNDARIES, _MAX_LABELS = 50, 12
# An image knows nothing of the page's theme: these stand out on white and on black, and the background stays clear.
_COLOURS = ("#3b82f6", "#f97316", "#16a34a", "#a855f7", "#e0457b", "#0d9fb0", "#b8860b", "#6b7fd7")
_GREY = "#868e9c"
_FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_WIDTH = 720
_PANEL_HEIGHT = 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 40, 26


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric, ready to draw.

    Attributes:
        curve: The metric.
        kept: The line that the run has gone on from.
        lost: What was done again later.

    """

    curve: Curve
    kept: list[Point]
    lost: list[list[Point]]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a panel is drawn, and on which axes; in the picture's units."""

    left: float
    top: float
    width: float
    height: float
    steps: Axis
    values: Axis

    def x(self, step: float) -> float:
        """Return where a step is."""
        return self.left + self.steps.place(step) * self.width

    def y(self, value: float) -> float:
        """Return where a value is."""
        return self.top + (1 - self.values.place(value)) * self.height

    @property
    def bottom(self) -> float:
        """Return where the axis of steps is."""
        return self.top + self.height


def draw_curves(curves: Sequence[Curve], until: Mapping[int, Place], begun: Mapping[int, int]) -> str | None:
    """Return the first `MAX_PANELS` of `curves` that have a number as an SVG document; None if none has.

    A panel has a line for what the run has gone on from, pale ones for what was lost and done again, a dashed vertical where
    a later attempt began, and a logarithmic axis where a linear one would squeeze most values together.

    Args:
        curves: The metrics, in the order of their panels.
        until: Up to where each attempt was gone on from.
        begun: The first step that each attempt reported.

    """
    panels = [panel for curve in curves if (panel := _panel(curve, until)).kept][:MAX_PANELS]
    if not panels:
        return None
    steps = [step for panel in panels for line in (panel.kept, *panel.lost) for step, _ in line]
    axis = step_axis(min(steps), max(steps))
    columns = 1 if len(panels) == 1 else 2
    width, height = _WIDTH / columns, _PANEL_HEIGHT
    drawn = [
        _draw(panel, index, index % columns * width, index // columns * height, width, axis, begun)
        for index, panel in enumerate(panels)
    ]
    return document(_WIDTH, height * -(-len(panels) // columns), drawn)


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """Return an SVG document of `parts`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="{_FONT}" font-size="11" fill="{_GREY}">{"".join(parts)}</svg>'
    )


def as_data_url(svg: str) -> str:
    """Return the picture as a URL that an image in Markdown may have: Prefect's UIs strip raw SVG."""
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def text(x: float, y: float, words: str, **attributes: str) -> str:
    """Return words in a picture."""
    return f"<text {_attributes(x=f'{x:.1f}', y=f'{y:.1f}', **attributes)}>{escape(words)}</text>"


def _panel(curve: Curve, until: Mapping[int, Place]) -> Panel:
    return Panel(curve, curve.kept(until), curve.lost(until, _MAX_LOST))


def _draw(panel: Panel, index: int, left: float, top: float, width: float, steps: Axis, begun: Mapping[int, int]) -> str:
    values = value_axis([value for line in (panel.kept, *panel.lost) for _, value in line])
    inner = Frame(left + _LEFT, top + _TOP, width - _LEFT - _RIGHT, _PANEL_HEIGHT - _TOP - _BOTTOM, steps, values)
    colour = _COLOURS[index % len(_COLOURS)]
    return "".join((
        *_title(panel.curve, inner, colour),
        *_grid(inner),
        *_boundaries(inner, begun),
        *(_line(inner, line, colour, opacity="0.35") for line in panel.lost),
        _line(inner, panel.kept, colour),
        _dot(inner, panel.kept[-1], colour),
    ))  # fmt: skip


def _title(curve: Curve, frame: Frame, colour: str) -> Iterable[str]:
    left, right = frame.left - _LEFT + 8, frame.left + frame.width
    notes = [*(["log"] if frame.values.is_log else []), *([f"{curve.num_odd} not finite"] if curve.num_odd else [])]
    name = shorten(curve.name, 32)
    words = f"{escape(name)}<tspan font-weight='400' font-size='11'>{escape('  ' + ', '.join(notes) if notes else '')}</tspan>"
    yield (
        f'<text x="{left:.1f}" y="{frame.top - 20:.1f}" font-size="13" font-weight="600" xml:space="preserve">{words}</text>'
    )
    yield text(
        right,
        frame.top - 20,
        show_number(curve.last),
        fill=colour,
        text_anchor="end",
        font_weight="600",
        font_size="13",
    )


def _grid(frame: Frame) -> Iterable[str]:
    for tick in frame.values.ticks:
        y = frame.y(tick)
        yield _stroke(frame.left, y, frame.left + frame.width, y, opacity="0.2")
        yield text(frame.left - 6, y + 4, show_compact(tick), text_anchor="end")
    yield _stroke(frame.left, frame.bottom, frame.left + frame.width, frame.bottom, opacity="0.7")
    for tick in frame.steps.ticks:
        x = frame.x(tick)
        yield _stroke(x, frame.bottom, x, frame.bottom + 4, opacity="0.7")
        yield text(x, frame.bottom + 16, show_compact(tick), text_anchor="middle")


def _boundaries(frame: Frame, begun: Mapping[int, int]) -> Iterable[str]:
    """Draw where later attempts began; of very many, the newest ones, and of these the newest with their numbers."""
    later = sorted(begun)[1:][-_MAX_BOUNDARIES:]
    for number in later:
        x = frame.x(begun[number])
        yield _stroke(x, frame.top - 4, x, frame.bottom, opacity="0.75", stroke_dasharray="3 3")
        if number in later[-_MAX_LABELS:]:
            yield text(x, frame.top - 7, f"#{number}", text_anchor="middle", font_size="9")


def _line(frame: Frame, points: Sequence[Point], colour: str, opacity: str = "1") -> str:
    if len(points) == 1:
        return _dot(frame, points[0], colour, opacity)
    path = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in points)
    style = _attributes(stroke=colour, stroke_width="1.8", stroke_opacity=opacity, fill="none", stroke_linejoin="round")
    return f'<polyline {style} points="{path}"/>'


def _dot(frame: Frame, point: Point, colour: str, opacity: str = "1") -> str:
    return f'<circle cx="{frame.x(point[0]):.1f}" cy="{frame.y(point[1]):.1f}" r="2.8" fill="{colour}" opacity="{opacity}"/>'


def _stroke(x1: float, y1: float, x2: float, y2: float, **attributes: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f"<line {ends} {_attributes(stroke=_GREY, **attributes)}/>"


def _attributes(**attributes: str) -> str:
    return " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in attributes.items())
