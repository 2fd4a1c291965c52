"""A bar that shows how the time of a run is divided."""

from collections.abc import Iterator

from prefect_torch.flows.monitoring.text import show_duration

from .chart import document, text
from .goodput import TimeSpent

_WIDTH = 720
_BAR = 16
_CHARACTER, _GAP = 6.6, 34.0  # how wide letters are on average, and what lies between two entries
COLOURS = {"training": "#16a34a", "checkpointing": "#3b82f6", "restarting": "#d99a0b", "lost": "#e5484d"}


def draw_time(spent: TimeSpent) -> str | None:
    """Return an SVG document: the bar, and under it what is what; None where no time has passed."""
    if spent.counted <= 0:
        return None
    legend = list(_legend(spent))
    return document(_WIDTH, max(y for _, y, _, _ in legend) + 12, [*_bar(spent), *(_entry(*entry) for entry in legend)])


def _bar(spent: TimeSpent) -> Iterator[str]:
    yield f'<clipPath id="bar"><rect width="{_WIDTH}" height="{_BAR}" rx="5"/></clipPath><g clip-path="url(#bar)">'
    left = 0.0
    for name, colour in COLOURS.items():
        width = _WIDTH * getattr(spent, name) / spent.counted
        yield f'<rect x="{left:.2f}" width="{width:.2f}" height="{_BAR}" fill="{colour}"/>'
        left += width
    yield "</g>"


def _legend(spent: TimeSpent) -> Iterator[tuple[float, float, str, str]]:
    """Yield where each entry begins, its colour and its words; what does not fit goes into the next line."""
    x, y = 0.0, _BAR + 22.0
    for name, colour in COLOURS.items():
        seconds = getattr(spent, name)
        words = f"{name} {show_duration(seconds)} ({seconds / spent.counted:.1%})"
        width = _GAP + _CHARACTER * len(words)
        if x + width > _WIDTH:
            x, y = 0.0, y + 18
        yield x, y, colour, words
        x += width


def _entry(x: float, y: float, colour: str, words: str) -> str:
    swatch = f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" fill="{colour}"/>'
    return swatch + text(x + 16, y, words, font_size="12")
