"""A training's progress at the terminal that started it, below Prefect's own log lines."""

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from prefect.logging.handlers import PrefectConsoleHandler
from prefect.runtime import deployment
from prefect_torch.ckpt.reporting.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.runs.attempts import Outcome
from prefect_torch.ckpt.runs.metrics import flatten_metrics
from prefect_torch.ckpt.text import show_bytes
from prefect_torch.tasks.training.observers import (
    AttemptEnded,
    AttemptStarted,
    CheckpointQuarantined,
    CheckpointsPruned,
    TrainingEvent,
)
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .text import show_duration, show_number

_SHOWN_INCIDENTS = 3
_REFRESHES_PER_S = 2.0


def console_progress(run: str) -> tuple["ConsoleProgress", ...]:
    """Return the observer that shows the progress of `run` at this terminal; none without an interactive terminal.

    There is none in a deployment's flow run, and none if Prefect's log lines do not go through its own console, which is shared
    so that they scroll by above the bar.
    """
    console = _console_of_log_lines()
    if console is None or not console.is_interactive or not console.file.isatty() or deployment.id is not None:
        return ()
    return (ConsoleProgress(run, console),)


@dataclass(frozen=True, slots=True)
class _Progress:
    """An attempt's progress at a time (seconds of the monotonic clock)."""

    share: float
    at_s: float


class ConsoleProgress:
    """Shows a bar if the training reports its progress, the newest metrics, and the news of checkpoints and attempts.

    Args:
        run: The run's name.
        console: The console of an interactive terminal.

    """

    def __init__(self, run: str, console: Console) -> None:
        self._run = run
        self._started_s = time.monotonic()
        self._attempt = 0
        self._num_reports = 0
        self._report: ReportEvent | None = None
        self._first: _Progress | None = None
        self._newest: _Progress | None = None
        self._commit: CommitEvent | None = None
        self._num_committed = 0
        self._num_pruned = 0
        self._incidents: tuple[Text, ...] = ()
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stdout=sys.stdout.isatty(),  # output to a file or a pipe is not the terminal's
        )

    def observe(self, happening: TrainingEvent) -> None:
        """Record `happening`."""
        match happening:
            case AttemptStarted(attempt, resumed_from):
                self._attempt, self._first, self._newest = attempt.number, None, None
                if resumed_from is not None:
                    self._add_incident(f"attempt {attempt.number} resumes from {resumed_from.rpartition('/')[2]}", "green")
            case ReportEvent(record, progress):
                self._report = happening
                self._num_reports += not record.is_logged
                if progress is not None:
                    self._newest = _Progress(progress, time.monotonic())
                    self._first = self._first or self._newest
            case CommitEvent():
                self._commit = happening
                self._num_committed += 1
            case CheckpointsPruned(plan):
                self._num_pruned += len(plan.drop)
            case CheckpointQuarantined(checkpoint_id, reason):
                self._add_incident(f"checkpoint {checkpoint_id} is damaged and set aside: {reason}", "yellow")
            case AttemptEnded(outcome):
                self._add_incident(_ending(outcome), "green" if outcome.ending == "completed" else "red")

    def refresh(self, *, final: bool) -> None:
        """Start the display, which then refreshes itself; if `final`, stop it and leave its last state."""
        if not self._live.is_started and not final:
            self._live.start(refresh=True)
            self._live.console.show_cursor(show=True)  # a killed process could not restore it
        if final:
            self._live.stop()

    def _add_incident(self, text: str, style: str) -> None:
        line = Text(" ".join(text.split()), style=style, no_wrap=True, overflow="ellipsis")
        self._incidents = (*self._incidents, line)[-_SHOWN_INCIDENTS:]

    def _render(self) -> RenderableType:
        return Group(self._head(), *self._metrics(), *self._checkpoints(), *self._incidents)

    def _head(self) -> RenderableType:
        name = Text.assemble((self._run, "bold"), f" attempt {self._attempt}" if self._attempt > 1 else "")
        details = Text("  ".join(self._details()))
        if self._newest is None:
            return Text.assemble(name, "  ", details, no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(
            total=1.0, completed=self._newest.share, style="bright_black", complete_style="cyan", finished_style="green"
        )
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1, min_width=10)
        head.add_column(no_wrap=True)
        head.add_row(name, bar, details)
        return head

    def _details(self) -> Iterator[str]:
        if self._newest is not None:
            yield f"{self._newest.share:.0%}"
        if self._report is not None:
            yield f"step {self._report.record.step}"
            yield f"{self._num_reports} report{'s' * (self._num_reports > 1)}"
        yield show_duration(time.monotonic() - self._started_s)
        if self._newest and self._first and self._first.share < self._newest.share < 1:
            total_s = (self._newest.at_s - self._first.at_s) / (self._newest.share - self._first.share)
            yield f"{show_duration(total_s * (1 - self._newest.share))} left"

    def _metrics(self) -> Iterator[Text]:
        if self._report is not None and self._report.record.metrics:
            shown = (f"{name} {show_number(value)}" for name, value in flatten_metrics(self._report.record.metrics))
            yield Text("  ".join(shown), no_wrap=True, overflow="ellipsis")

    def _checkpoints(self) -> Iterator[Text]:
        if self._commit is None:
            return
        size = f"{show_bytes(self._commit.bytes)} in {show_duration(self._commit.duration_s)}"
        counts = f"{self._num_committed} committed" + (f", {self._num_pruned} pruned" if self._num_pruned else "")
        text = f"checkpoint {self._commit.id}  step {self._commit.step}  {size}  ({counts})"
        yield Text(text, no_wrap=True, overflow="ellipsis")


def _ending(outcome: Outcome) -> str:
    if outcome.ending in ("preempted", "cancelled"):  # the log says why, and what is safe
        return f"attempt {outcome.attempt} {outcome.ending}"
    reason = (outcome.error or "").strip().partition("\n")[0]
    if f"attempt {outcome.attempt} " in reason:
        return reason
    return f"attempt {outcome.attempt} {outcome.ending}" + (f": {reason}" if reason else "")


def _console_of_log_lines() -> Console | None:
    logger: logging.Logger | None = logging.getLogger("prefect.flow_runs")
    while logger is not None:
        for handler in logger.handlers:
            if isinstance(handler, PrefectConsoleHandler):
                return handler.console
        logger = logger.parent if logger.propagate else None
    return None
