"""A training's progress at the terminal that started it, below Prefect's own log lines."""

import logging
import sys
from collections.abc import Callable, Iterator

from prefect.logging.handlers import PrefectConsoleHandler
from prefect.runtime import deployment
from prefect_torch.tasks.training.observers import AttemptEnded, AttemptStarted, TrainingEvent
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .progress import TERMINATED, TrainingProgress

_REFRESHES_PER_S = 2.0


def console_progress(run: str) -> tuple["ConsoleProgress", ...]:
    """Return the observer that shows the progress of `run` at this terminal; none without an interactive terminal.

    Nor is there an observer in a deployment's flow run, or if Prefect's log lines do not go through its own console, which is
    shared so that they scroll by above the bar.
    """
    console = interactive_console()
    return () if console is None else (ConsoleProgress(run, console),)


def interactive_console() -> Console | None:
    """Return the console of Prefect's log lines; None if it is no interactive terminal, or in a deployment's flow run."""
    console = _console_of_log_lines()
    if console is None or not console.is_interactive or not console.file.isatty() or deployment.id is not None:
        return None
    return console


def live_display(console: Console, render: Callable[[], RenderableType]) -> Live:
    """Return a display below the log lines of `console`, which refreshes itself once it is started."""
    return Live(
        console=console,
        get_renderable=render,
        refresh_per_second=_REFRESHES_PER_S,
        redirect_stdout=sys.stdout.isatty(),  # output to a file or a pipe is not the terminal's
    )


class ConsoleProgress:
    """Shows a bar if the training reports its progress, the newest metrics, and the news of checkpoints and attempts.

    Args:
        run: The run's name.
        console: The console of an interactive terminal.

    """

    def __init__(self, run: str, console: Console) -> None:
        self._progress = TrainingProgress(run)
        self._live = live_display(console, self._render)

    def observe(self, event: TrainingEvent) -> None:
        """Record `event`."""
        self._progress.record(event)
        if isinstance(event, AttemptStarted):
            self._live.transient = False
        if isinstance(event, AttemptEnded):  # the log says why it was terminated, and what is safe
            self._live.transient = event.outcome.ending in TERMINATED

    def refresh(self, *, final: bool) -> None:
        """Start the display, which then refreshes itself; if `final`, stop it and leave its last state."""
        if not self._live.is_started and not final:
            self._live.start(refresh=True)
            self._live.console.show_cursor(show=True)  # a killed process could not restore it
        if final:
            self._live.stop()

    def _render(self) -> RenderableType:
        return Group(self._head(), *self._lines())

    def _head(self) -> RenderableType:
        progress = self._progress
        name = Text.assemble((progress.run, "bold"), f" attempt {progress.attempt}" if progress.attempt > 1 else "")
        details = Text("  ".join(progress.details()))
        if progress.share is None:
            return Text.assemble(name, "  ", details, no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(
            total=1.0, completed=progress.share, style="bright_black", complete_style="cyan", finished_style="green"
        )
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1, min_width=10)
        head.add_column(no_wrap=True)
        head.add_row(name, bar, details)
        return head

    def _lines(self) -> Iterator[Text]:
        metrics = "  ".join(f"{name} {value}" for name, value in self._progress.metrics())
        for line in (metrics, self._progress.checkpoint()):
            if line:
                yield Text(line, no_wrap=True, overflow="ellipsis")
        for incident in self._progress.incidents:
            yield Text(incident.text, style=incident.colour, no_wrap=True, overflow="ellipsis")


def _console_of_log_lines() -> Console | None:
    logger: logging.Logger | None = logging.getLogger("prefect.flow_runs")
    while logger is not None:
        for handler in logger.handlers:
            if isinstance(handler, PrefectConsoleHandler):
                return handler.console
        logger = logger.parent if logger.propagate else None
    return None
