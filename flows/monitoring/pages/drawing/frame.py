"""The area of a picture in which points are drawn, with its axes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prefect_torch.flows.monitoring.text import show_compact

from .axis import Axis
from .svg import dot, polyline, stroke, text

Place: TypeAlias = tuple[float, float]  # a step, or another value across, and a value


@dataclass(frozen=True, slots=True)
class Frame:
    """The area and the axes of a panel, in the picture's units."""

    left: float
    top: float
    width: float
    height: float
    steps: Axis
    values: Axis

    def x(self, step: float) -> float:
        """Return the x coordinate of a step."""
        return self.left + self.steps.position(step) * self.width

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        return self.top + (1 - self.values.position(value)) * self.height

    @property
    def bottom(self) -> float:
        """The y coordinate of the axis of steps."""
        return self.top + self.height


def draw_grid(frame: Frame) -> Iterable[str]:
    """Draw the axes, and lines at the ticks of values."""
    for tick in frame.values.ticks:
        y = frame.y(tick)
        yield stroke(frame.left, y, frame.left + frame.width, y, opacity="0.2")
        yield text(frame.left - 6, y + 4, show_compact(tick), text_anchor="end")
    yield stroke(frame.left, frame.bottom, frame.left + frame.width, frame.bottom, opacity="0.7")
    for tick in frame.steps.ticks:
        x = frame.x(tick)
        yield stroke(x, frame.bottom, x, frame.bottom + 4, opacity="0.7")
        yield text(x, frame.bottom + 16, show_compact(tick), text_anchor="middle")


def draw_line(frame: Frame, points: Sequence[Place], colour: str, opacity: str = "1", width: str = "1.8") -> str:
    """Draw a line through points; a single one is a dot."""
    if len(points) == 1:
        return draw_dot(frame, points[0], colour, opacity)
    return polyline([(frame.x(step), frame.y(value)) for step, value in points], colour, width, opacity)


def draw_dot(frame: Frame, point: Place, colour: str, opacity: str = "1") -> str:
    """Draw a point."""
    return dot(frame.x(point[0]), frame.y(point[1]), colour, opacity)
