"""A result as a notebook shows it: curves, kept checkpoints, and how to load one."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import PurePath

from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.metrics import Metrics, flatten_metrics
from prefect_torch.flows.monitoring.pages.drawing.chart import draw_curves
from prefect_torch.flows.monitoring.pages.drawing.curves import Curves
from prefect_torch.flows.monitoring.text import show_number

from .attempt_log import END, Position

_MAX_CHECKPOINTS, _MAX_METRICS = 10, 8
_LEFT = ' style="text-align:left"'  # a notebook's own style centres heads, or moves cells to the right


def result_html(path: str, outcome: str, history: Sequence[MetricRecord], best: Sequence[tuple[str, Metrics]]) -> str:
    """Return a result as HTML with an inline picture; it loads nothing from other sites.

    Args:
        path: The run's path or URL.
        outcome: One sentence on the state of the run.
        history: Every report.
        best: The path and metrics of the kept checkpoints, best first.

    """
    storage, _, run = path.rpartition("/")
    parts = [f"<p><b>{escape(run)}</b> in <code>{escape(storage)}</code>: {escape(outcome)}</p>", curves_svg(history) or ""]
    if best:
        parts += [_checkpoints(best), "<p>The first of them:</p>", _how_to_load(storage, run)]
    return f'<div class="prefect-torch">{"".join(parts)}</div>'


def curves_svg(history: Sequence[MetricRecord]) -> str | None:
    """Return the curves of all metrics as an SVG element; None without a number."""
    curves = Curves()
    for record in history:
        curves.add(record)
    first_steps = first_step_of_attempts(history)
    newest = max((record.attempt for record in history), default=0)
    # Nothing is kept of an attempt that logged metrics but made no report, unless it is the newest.
    until = {record.attempt: END if record.attempt == newest else (record.attempt, -1) for record in history}
    return draw_curves(curves.sorted(None), until | kept_until(first_steps), first_steps)


def first_step_of_attempts(history: Sequence[MetricRecord]) -> dict[int, int]:
    """Return the first step that each attempt reported, by the attempts with reports; a logger's steps may be others."""
    found: dict[int, int] = {}
    for record in history:
        if not record.is_logged:
            found[record.attempt] = min(record.step, found.get(record.attempt, record.step))
    return found


def kept_until(first_steps: Mapping[int, int]) -> dict[int, Position]:
    """Return the position up to which later attempts continued from each attempt: before the first step that they repeat."""
    found: dict[int, Position] = {}
    before = math.inf
    for attempt in sorted(first_steps, reverse=True):
        found[attempt] = (attempt, before)
        before = min(before, first_steps[attempt] - 1)
    return found


def _checkpoints(best: Sequence[tuple[str, Metrics]]) -> str:
    shown = [(PurePath(path).name, dict(flatten_metrics(metrics))) for path, metrics in best[:_MAX_CHECKPOINTS]]
    names = list(dict.fromkeys(name for _, metrics in shown for name in metrics))[:_MAX_METRICS]
    head = "".join(f"<th{_LEFT}>{escape(name)}</th>" for name in ("checkpoint", *names))
    rows = "".join(
        f"<tr><td{_LEFT}><code>{escape(checkpoint)}</code></td>"
        + "".join(f"<td{_LEFT}>{escape(show_number(metrics[name])) if name in metrics else ''}</td>" for name in names)
        + "</tr>"
        for checkpoint, metrics in shown
    )
    more = f"<p>and {len(best) - _MAX_CHECKPOINTS} more</p>" if len(best) > _MAX_CHECKPOINTS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def _how_to_load(storage: str, run: str) -> str:
    lines = (
        f"checkpoint, metrics = Result.from_storage({storage!r}, {run!r}).best_checkpoints[0]\n"
        "checkpoint.load_state(state)                 # of a training that reports state=\n"
        "with checkpoint.as_directory() as directory:  # of any training\n"
        "    ..."
    )
    return f'<pre style="font-family:monospace">{escape(lines)}</pre>'
