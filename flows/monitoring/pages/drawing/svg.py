"""The parts of SVG documents that are readable on light and dark pages, and their form for Markdown."""

import re
from base64 import b64encode
from collections.abc import Iterable
from html import escape

# An image does not know the page's theme: these colours stand out on white and on black, and the background stays clear.
COLOURS = ("#3b82f6", "#f97316", "#16a34a", "#a855f7", "#e0457b", "#0d9fb0", "#b8860b", "#6b7fd7")
GREY = "#868e9c"
WIDTH = 720
_NOT_IN_XML = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\ud800-\\udfff\\ufffe\\uffff]")
_FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def as_data_url(svg: str) -> str:
    """Return the picture as a URL for an image in Markdown: Prefect's UIs strip raw SVG."""
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """Return a document of `parts` with characters that XML forbids, such as half an emoji in a metric's name, replaced."""
    readable = _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", "".join(parts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="{_FONT}" font-size="11" fill="{GREY}">{readable}</svg>'
    )


def text(x: float, y: float, words: str, **style: str) -> str:
    """Return words at a position."""
    return f"<text {attributes(x=f'{x:.1f}', y=f'{y:.1f}', **style)}>{escape(words)}</text>"


def stroke(x1: float, y1: float, x2: float, y2: float, **style: str) -> str:
    """Return a straight grey line."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f"<line {ends} {attributes(stroke=GREY, **style)}/>"


def polyline(points: Iterable[tuple[float, float]], colour: str, width: str = "1.8", opacity: str = "1") -> str:
    """Return a line through positions."""
    style = attributes(stroke=colour, stroke_width=width, stroke_opacity=opacity, fill="none", stroke_linejoin="round")
    return f'<polyline {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def dot(x: float, y: float, colour: str, opacity: str = "1") -> str:
    """Return a small disc."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="{colour}" opacity="{opacity}"/>'


def attributes(**given: str) -> str:
    """Return attributes as text: `stroke_width` is stroke-width."""
    return " ".join(f'{name.replace("_", "-")}="{value}"' for name, value in given.items())
