"""Numbers, durations, times, links and foreign text as pages and the terminal show them."""

from collections.abc import Mapping
from datetime import datetime, timezone
from itertools import islice
from textwrap import wrap
from typing import Any
from uuid import UUID

from prefect.utilities.urls import url_for
from prefect_torch.ckpt.runs.metrics import Metrics, MetricValue, numbers_in
from prefect_torch.ckpt.text import clip, encodable, without_login

_SHORT = 160
_CODE_WIDTH = 64  # characters of a line that a block of code shows in a window of 1280 pixels, between the UI's two sidebars
_MARKUP = str.maketrans({character: f"\\{character}" for character in r"\`*_[]<>|~$"})
_MARKUP_OF_LINKS = str.maketrans({character: f"\\{character}" for character in r"\`[]<|"})


def show_number(value: MetricValue) -> str:
    """Return a metric with five digits."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)


def show_first_number(metrics: Metrics) -> list[str]:
    """Return the first metric that is a number with its name, such as ["loss 0.25"]; nothing if none is."""
    return [f"{name} {show_number(value)}" for name, value in islice(numbers_in(metrics), 1)]


def show_compact(value: float) -> str:
    """Return the number of a tick in few characters: 12000 is 12k."""
    for power, suffix in ((9, "G"), (6, "M"), (3, "k")):
        if 10**power <= abs(value) < 10 ** (power + 3) and (power > 3 or abs(value) >= 10**4):  # noqa: PLR2004 - 1200 is short
            return f"{value / 10**power:.4g}{suffix}"
    if value == 0 or 1e-3 <= abs(value) < 1e9:  # noqa: PLR2004 - what reads well without an exponent
        return f"{value:.5g}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def show_duration(seconds: float) -> str:
    """Return a duration in at most two units."""
    if seconds < 10:  # noqa: PLR2004 - below, tenths matter
        return f"{seconds:.1f} s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {whole % 60:02d} s" if minutes else f"{whole} s"


def show_time(at_s: float) -> str:
    """Return a time (seconds since the epoch) to the second, in UTC."""
    return datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def seconds_of(iso: str) -> float:
    """Return an ISO 8601 time as seconds since the epoch."""
    return datetime.fromisoformat(iso).timestamp()


def storable(value: Any, longest: int | None = None) -> Any:
    """Return JSON that Prefect's databases hold: text without lone surrogates and NULs, and clipped to `longest` characters."""
    if isinstance(value, str):
        text = encodable(value)
        return text if longest is None else clip(text, longest)
    if isinstance(value, Mapping):
        return {storable(name, longest): storable(item, longest) for name, item in value.items()}
    return [storable(item, longest) for item in value] if isinstance(value, list | tuple) else value


def flow_run_page(flow_run_id: str | None) -> str | None:
    """Return the URL of a flow run's page; None if the id is not one of Prefect's."""
    try:
        return None if flow_run_id is None else page_url("flow-run", UUID(flow_run_id))
    except ValueError:
        return None


def shorten(text: str, longest: int = _SHORT) -> str:
    """Return `text` on one line, cut to `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1].rstrip()}…"


def fold_code(line: str) -> list[str]:
    """Return a line of code or of a traceback in lines that fit into a block of code, which the UI does not fold."""
    if len(line) <= _CODE_WIDTH:
        return [line]
    if not line.strip(" ~^"):
        return []  # marks of the line above, which is folded, too
    indent = line[: min(len(line) - len(line.lstrip()), _CODE_WIDTH // 2)]
    return wrap(line.strip(), _CODE_WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)


def plain_text(text: str) -> str:
    """Return `text` on one line, escaped so that Markdown shows it literally, also in a table's cell."""
    return " ".join(text.split()).translate(_MARKUP)


def link_text(text: str) -> str:
    """Return `text` on one line for the text of a link, where the UI shows every backslash but one before a bracket."""
    return " ".join(text.split()).translate(_MARKUP_OF_LINKS)


def page_url(kind: str, run_id: UUID) -> str:
    """Return the URL of a run's page, without a login, relative to the server that shows it if PREFECT_UI_URL is unknown."""
    url = url_for(kind, run_id)
    return without_login(url) if url else f"/runs/{kind}/{run_id}"
