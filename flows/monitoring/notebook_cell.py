"""A training's progress below the cell of the notebook that started it."""

import sys
from collections.abc import Iterator
from html import escape
from typing import Any

from prefect.runtime import deployment
from prefect_torch.tasks.training.observers import TrainingEvent

from .progress import TrainingProgress

_COLOURS = {"green": "#16a34a", "yellow": "#b8860b", "red": "#e0457b"}  # readable on light and dark pages
_KERNEL_SHELL = "ZMQInteractiveShell"


def notebook_progress(run: str) -> tuple["NotebookProgress", ...]:
    """Return the observer that shows the progress of `run` in this notebook; none elsewhere, and none in a deployment."""
    if "IPython" not in sys.modules or deployment.id is not None:
        return ()
    from IPython import get_ipython  # pyright: ignore[reportMissingImports]  # noqa: PLC0415 - it is loaded, or there is no notebook

    shell = get_ipython()
    return (NotebookProgress(run),) if type(shell).__name__ == _KERNEL_SHELL else ()


class NotebookProgress:
    """Shows a bar if the training reports its progress, the newest metrics, and the news of checkpoints and attempts.

    Made in the thread of the cell, below which it appears; updated from any.

    Args:
        run: The run's name.

    """

    def __init__(self, run: str) -> None:
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]  # noqa: PLC0415 - loaded only in notebooks

        self._html = HTML
        self._progress = TrainingProgress(run)
        self._handle: Any = display(HTML(progress_html(self._progress)), display_id=True)

    def observe(self, event: TrainingEvent) -> None:
        """Record `event`."""
        self._progress.record(event)

    def refresh(self, *, final: bool) -> None:  # noqa: ARG002 - the last state stays
        """Show what was recorded."""
        self._handle.update(self._html(progress_html(self._progress)))


def progress_html(progress: TrainingProgress) -> str:
    """Return the progress as HTML, which loads nothing from other sites."""
    return f'<div class="prefect-torch" style="line-height:1.5">{"".join(_lines(progress))}</div>'


def _lines(progress: TrainingProgress) -> Iterator[str]:
    attempt = f" attempt {progress.attempt}" if progress.attempt > 1 else ""
    bar = "" if progress.share is None else f'<progress style="width:16em" max="1" value="{progress.share:.4f}"></progress> '
    yield f"<div><b>{escape(progress.run)}</b>{attempt} {bar}{escape(' · '.join(progress.details()))}</div>"
    metrics = " · ".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in progress.metrics())
    if metrics:
        yield f"<div>{metrics}</div>"
    if (checkpoint := progress.checkpoint()) is not None:
        yield f'<div style="opacity:.7">{escape(checkpoint)}</div>'
    for incident in progress.incidents:
        yield f'<div style="color:{_COLOURS[incident.colour]}">{escape(incident.text)}</div>'
