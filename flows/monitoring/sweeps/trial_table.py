"""The trials of a sweep at the terminal that started it, below Prefect's own log lines."""

import time
from collections.abc import Iterator, Sequence

from prefect_torch.ckpt.text import show_count
from prefect_torch.flows.monitoring.console import LiveDisplay, interactive_console
from prefect_torch.flows.monitoring.text import show_duration, show_number
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .page import show_rung
from .parameters import Value, varied
from .view import SeenTrial, SweepView, count_states

TRIAL_STYLES = {"running": "cyan", "completed": "green", "failed": "red", "paused": "yellow", "stopped": "yellow"}
_MAX_ROWS = 8
_WIDE = 110  # columns, from which on the table also shows why trials have ended


class TrialTable:
    """Shows the best trials and those that run.

    Args:
        console: The console of an interactive terminal.
        num_trials: How many trials there will be; None if that is unknown.
        has_rungs: Whether a scheduler decides at rungs.

    """

    def __init__(self, console: Console, num_trials: int | None, *, has_rungs: bool) -> None:
        self._num_trials = num_trials
        self._has_rungs = has_rungs
        self._started_s = time.monotonic()
        self._shown: RenderableType = Text()
        self._display = LiveDisplay(console, lambda: self._shown)

    @classmethod
    def at_terminal(cls, num_trials: int | None, *, has_rungs: bool) -> "TrialTable | None":
        """Return the table of this terminal; None without an interactive one."""
        console = interactive_console()
        return None if console is None else cls(console, num_trials, has_rungs=has_rungs)

    def show(self, view: SweepView) -> None:
        """Show the view."""
        rows, has_reasons = _rows(view.by_score()), self._display.console.width >= _WIDE
        table = _table(view, rows, has_rungs=self._has_rungs, has_reasons=has_reasons)
        self._shown = Group(self._head(view), table)
        self._display.start()

    def close(self) -> None:
        """Leave the last state at the terminal."""
        self._display.stop()

    def _head(self, view: SweepView) -> Text:
        trials = view.trials()
        so_far = show_count(len(trials), "trial") if self._num_trials is None else f"{len(trials)} of {self._num_trials} trials"
        states = ", ".join(f"{count} {state}" for state, count in count_states(trials))
        passed = show_duration(time.monotonic() - self._started_s)
        words = f"  {so_far}: {states}  {passed}"
        return Text.assemble((view.run.name, "bold"), words, no_wrap=True, overflow="ellipsis")


def _table(view: SweepView, trials: Sequence[SeenTrial], *, has_rungs: bool, has_reasons: bool) -> Table:
    names = varied([trial.parameters for trial in view.trials()])
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=True)
    for name in ("trial", "state", view.metric, "step", *(["rung"] if has_rungs else [])):
        table.add_column(name, justify="left" if name in ("state", "rung") else "right", no_wrap=True)
    for name in ("config", *(["why"] if has_reasons else [])):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
    best = view.best()
    for trial in trials:
        is_best = best is not None and trial.number == best.number
        cells = list(_cells(trial, names, has_rungs=has_rungs, style="bold green" if is_best else ""))
        table.add_row(*cells[: len(table.columns)])
    return table


def _cells(trial: SeenTrial, names: Sequence[str], *, has_rungs: bool, style: str) -> Iterator[Text]:
    yield Text(str(trial.number), style)
    yield Text(trial.state, TRIAL_STYLES[trial.state])
    yield Text("-" if trial.value is None else show_number(trial.value), style)
    yield Text("-" if trial.step is None else str(trial.step))
    if has_rungs:
        yield Text(show_rung(trial))
    yield Text(" ".join(f"{name}={_short(trial.parameters[name])}" for name in names if name in trial.parameters))
    yield Text(" ".join((trial.reason or "").split()), "bright_black")


def _short(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _rows(trials: Sequence[SeenTrial]) -> list[SeenTrial]:
    """Return the rows of a live table: those that run and the best, the best first."""
    running = [trial for trial in trials if trial.state == "running"][: _MAX_ROWS // 2]
    others = [trial for trial in trials if trial not in running][: _MAX_ROWS - len(running)]
    return sorted([*running, *others], key=list(trials).index)
