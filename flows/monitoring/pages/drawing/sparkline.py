"""A small curve without axes, for a cell of a table."""

from collections.abc import Sequence

from .axis import step_axis, value_axis
from .curves import Point, thin

_WIDTH, _HEIGHT, _MARGIN = 120.0, 28.0, 3.0
_MAX_POINTS = 40
_COLOUR = "#3b82f6"  # stands out on white and on black


def draw_sparkline(points: Sequence[Point]) -> str | None:
    """Return the points as a line in an SVG document, logarithmic where values span decades; None for fewer than two points.

    Args:
        points: Steps and finite values, sorted by step.

    """
    if len(points) < 2:  # noqa: PLR2004 - the fewest of a line
        return None
    shown = thin(points, _MAX_POINTS)
    steps, values = step_axis(shown[0][0], shown[-1][0]), value_axis([value for _, value in shown])
    width, height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    path = " ".join(
        f"{_MARGIN + steps.position(step) * width:.1f},{_MARGIN + (1 - values.position(value)) * height:.1f}"
        for step, value in shown
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{_HEIGHT:g}">'
        f'<polyline fill="none" stroke="{_COLOUR}" stroke-width="1.6" stroke-linejoin="round" points="{path}"/></svg>'
    )
