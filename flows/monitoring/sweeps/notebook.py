"""The result of a sweep as a notebook shows it: the parameters of its trials, the best of them, and how to load one."""

from collections.abc import Iterator, Sequence
from html import escape

from prefect_torch.flows.monitoring.pages.drawing.svg import as_data_url
from prefect_torch.flows.monitoring.text import shorten, show_number

from .coordinates import draw_coordinates
from .parameters import varied
from .view import SeenTrial, count_states

_MAX_TRIALS, _MAX_PARAMETERS = 10, 6


def sweep_html(path: str, metric: str, mode: str, trials: Sequence[SeenTrial]) -> str:
    """Return the result of a sweep as HTML with an inline picture; it loads nothing from other sites.

    Args:
        path: The sweep's path or URL.
        metric: The metric.
        mode: Whether a low ("min") or a high ("max") value of the metric is good.
        trials: The trials.

    """
    storage, _, name = path.rpartition("/")
    sign = 1 if mode == "min" else -1
    best_first = sorted(trials, key=lambda it: (it.value is None, it.number if it.value is None else sign * it.value))
    states = ", ".join(f"{count} {state}" for state, count in count_states(trials)) or "no trial yet"
    parts = [f"<p><b>{escape(name)}</b> in <code>{escape(storage)}</code>: {states}</p>"]
    picture = draw_coordinates(best_first, metric, mode, [])
    if picture is not None:
        parts.append(f'<img alt="Parallel coordinates" src="{as_data_url(picture)}"/>')
    if best_first:
        parts += _table(best_first, metric)
    if best_first and best_first[0].value is not None:
        line = f"checkpoint = SweepResult.from_storage({storage!r}, {name!r}).best.checkpoint"
        parts.append(f'<pre style="font-family:monospace">{escape(line)}</pre>')
    return f'<div class="prefect-torch">{"".join(parts)}</div>'


def _table(best_first: Sequence[SeenTrial], metric: str) -> Iterator[str]:
    names = varied([trial.parameters for trial in best_first])[:_MAX_PARAMETERS]
    head = "".join(f"<th>{escape(name)}</th>" for name in ("trial", "state", metric, *names, "why"))
    yield f"<table><thead><tr>{head}</tr></thead><tbody>"
    for trial in best_first[:_MAX_TRIALS]:
        value = "" if trial.value is None else show_number(trial.value)
        chosen = (shorten(show_number(trial.parameters[name]), 40) if name in trial.parameters else "" for name in names)
        cells = (str(trial.number), trial.state, value, *chosen, trial.reason or "")
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</tbody></table>"
    if len(best_first) > _MAX_TRIALS:
        yield f"<p>and {len(best_first) - _MAX_TRIALS} more</p>"
