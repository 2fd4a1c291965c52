"""A training's progress at the terminal that started it, below Prefect's own log lines."""

import logging
import sys
import threading
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


class LiveDisplay:
    """A display below the log lines of a console, which refreshes itself between `start` and `stop`.

    Those of one console are drawn together, in the order of their starts, by one `Live` of rich: of several, rich draws the one
    that was started first, and none once that has ended.

    Args:
        console: The console.
        render: Returns what is shown; called in another thread.

    Attributes:
        is_transient: Whether nothing of it is left when it ends.

    """

    def __init__(self, console: Console, render: Callable[[], RenderableType]) -> None:
        self.console = console
        self.render = render
        self.is_transient = False

    def start(self) -> None:
        """Show it from now on; nothing to do if it is shown."""
        with _LOCK:
            shared = _SHARED.get(self.console)
            if shared is None:
                shared = _SHARED[self.console] = _Shared(self.console)
            if self not in shared.displays:
                shared.displays = (*shared.displays, self)
            if not shared.live.is_started:
                shared.live.start(refresh=True)
                self.console.show_cursor(show=True)  # a killed process could not restore it

    def stop(self) -> None:
        """End it, and leave its last state, above the displays that go on; nothing to do if it is not shown."""
        with _LOCK:
            shared = _SHARED.get(self.console)
            if shared is None or self not in shared.displays:
                return
            if shared.displays == (self,):
                del _SHARED[self.console]
                shared.live.transient = self.is_transient
                shared.live.stop()
                return
            shared.displays = tuple(it for it in shared.displays if it is not self)
            if not self.is_transient:
                self.console.print(self.render())


class _Shared:
    """The `Live` of a console, and the displays that it draws, which it reads without a lock."""

    def __init__(self, console: Console) -> None:
        self.displays: tuple[LiveDisplay, ...] = ()
        self.live = Live(
            console=console,
            get_renderable=lambda: Group(*(it.render() for it in self.displays)),
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=sys.stdout.isatty(),  # output to a file or a pipe is not the terminal's
        )


_SHARED: dict[Console, _Shared] = {}
_LOCK = threading.Lock()  # for it and `displays`


class ConsoleProgress:
    """Shows a bar if the training reports its progress, the newest metrics, and the news of checkpoints and attempts.

    Args:
        run: The run's name.
        console: The console of an interactive terminal.

    """

    def __init__(self, run: str, console: Console) -> None:
        self._progress = TrainingProgress(run)
        self._display = LiveDisplay(console, self._render)

    def observe(self, event: TrainingEvent) -> None:
        """Record `event`."""
        self._progress.record(event)
        if isinstance(event, AttemptStarted):
            self._display.is_transient = False
        if isinstance(event, AttemptEnded):  # the log says why it was terminated, and what is safe
            self._display.is_transient = event.outcome.ending in TERMINATED

    def refresh(self, *, final: bool) -> None:
        """Start the display, which then refreshes itself; if `final`, stop it and leave its last state."""
        if final:
            self._display.stop()
        else:
            self._display.start()

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
