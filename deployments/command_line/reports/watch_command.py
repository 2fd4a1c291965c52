"""`watch`: a running training, live; reads only the storage."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice, takewhile

import click
from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus, read_status
from prefect_torch.ckpt.runs.history import MetricRecord, read_history
from prefect_torch.ckpt.runs.manifest import attempt_of, step_of
from prefect_torch.ckpt.runs.metrics import MetricValue, flatten_metrics
from prefect_torch.ckpt.runs.parts.metric_chunks import Chunk, read_records
from prefect_torch.ckpt.text import headline, show_age, show_count
from prefect_torch.deployments.command_line.arguments import run_argument, storage_argument
from prefect_torch.deployments.command_line.runs.run_summaries import RUN_STYLES
from prefect_torch.deployments.command_line.runs.selection import open_training
from prefect_torch.deployments.command_line.terminal import console, note, plain, say, show_metric
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .metrics_command import as_number
from .sparkline import sparkline

_SHOWN_METRICS, _SHOWN_CHECKPOINTS, _CURVE_WIDTH = 8, 5, 30
_SPEED_REPORTS = 20  # over which the speed is measured


@dataclass(frozen=True, slots=True)
class View:
    """The stored records of a run at one moment.

    Attributes:
        status: The status of its newest attempt, or None before the first.
        history: Its reports, oldest first.
        checkpoints: The ids of its checkpoints, oldest first.

    """

    status: AttemptStatus | None
    history: Sequence[MetricRecord]
    checkpoints: Sequence[str]

    @property
    def is_ended(self) -> bool:
        """Whether nothing more is to come: the newest attempt has an outcome, or its process is gone."""
        return self.status is not None and not self.status.may_be_alive

    @property
    def may_begin_again(self) -> bool:
        """Whether the newest attempt failed or was interrupted, and the process that led it is not known to be gone."""
        status = self.status
        if status is None or status.outcome is None or status.outcome.kind == "final":
            return False
        return status.outcome.ending in ("failed", "preempted") and status.is_process_gone is not True

    @property
    def state(self) -> str:
        """The state of the newest attempt, as `ls` names it."""
        return "not started" if self.status is None else self.status.state

    @property
    def reason(self) -> str:
        """Why the newest attempt ended, in a line; empty while it runs, and if it completed."""
        if self.state == "lost":
            return "its process is gone; the next training of this name continues"
        outcome = None if self.status is None else self.status.outcome
        return "" if outcome is None else plain(headline(outcome.error))


@dataclass(slots=True)
class Watcher:
    """Reads a run repeatedly, and only the new objects of its history, until its process is gone."""

    store: CheckpointStore
    _known: dict[Chunk, dict[int, MetricRecord]] = field(default_factory=dict)
    _is_away: bool = False

    def look(self) -> View:
        """Return the present view; costs three listings and a small read for each new object."""
        status = read_status(self.store)  # first: all that an attempt reported is stored before its outcome
        return View(status, self._read_reports(status), sorted(self.store.ids()))

    def _read_reports(self, status: AttemptStatus | None) -> Sequence[MetricRecord]:
        if status is not None and status.state == "lost":  # a killed leader's last reports are known from checkpoints alone
            return read_history(self.store)
        return read_records(self.store.storage, self.store.layout, MetricRecord, self._known)

    def look_again(self, before: View) -> View:
        """Return the present view; the one before, with a note, while the storage does not answer: the training waits, too."""
        try:
            view = self.look()
        except StorageError as exc:
            if not self._is_away:
                note(f"prefect-torch: {exc}; it is watched again once it answers")
            self._is_away = True
            return before
        self._is_away = False
        return view


@dataclass(slots=True)
class MetricLines:
    """The metrics of a history that grows, as lines; each of its records is looked at once, unless one comes late."""

    _values: dict[str, list[float]] = field(default_factory=dict)
    _last: dict[str, MetricValue] = field(default_factory=dict)
    _added: Sequence[MetricRecord] = ()

    def add(self, history: Sequence[MetricRecord]) -> None:
        """Add the records that have come since the call before."""
        if not _goes_on(self._added, history):
            self._values, self._last, self._added = {}, {}, ()
        for record in history[len(self._added) :]:
            for name, value in flatten_metrics(record.metrics):
                self._values.setdefault(name, []).append(as_number(value))
                self._last[name] = value
        self._added = history

    def shown(self, width: int) -> Iterator[str]:
        """Yield a line for each of the first metrics, and one for the number of the others."""
        shown = list(self._values)[:_SHOWN_METRICS]
        names = max((len(plain(name)) for name in shown), default=0)
        curve_width = max(1, min(_CURVE_WIDTH, width - names - 16))
        for name in shown:
            yield f"{plain(name):<{names}}  {show_metric(self._last[name]):>12}  {sparkline(self._values[name], curve_width)}"
        if len(self._values) > len(shown):
            yield f"and {show_count(len(self._values) - len(shown), 'more metric')}"


@dataclass(slots=True)
class Settling:
    """Decides when the end of an attempt is that of its training, and when silence is.

    Args:
        settle_s: For how many seconds a newer attempt is awaited after one that failed or was interrupted.
        silent_s: For how many seconds a training that may have been killed, on another machine, is awaited without a report.

    """

    settle_s: float
    silent_s: float = math.inf
    _news: tuple[tuple[int, str, int], float] | None = None  # the attempt, its state and the reports; when first seen
    _looked: tuple[View, float] | None = None

    def has_ended(self, view: View) -> bool:
        """Return whether nothing more is to come after `view`, the newest one; the time of looks that failed does not count."""
        now_s = time.monotonic()
        if self._looked is not None and self._looked[0] is view and self._news is not None:  # the storage was away
            self._news = self._news[0], self._news[1] + now_s - self._looked[1]
        self._looked = view, now_s
        if view.status is None or view.state == "running":
            return False
        if view.is_ended and not view.may_begin_again:
            return True
        news = view.status.attempt.number, view.state, len(view.history)
        if self._news is None or self._news[0] != news:
            self._news = news, now_s
        return now_s - self._news[1] >= (self.settle_s if view.is_ended else self.silent_s)


@click.command
@storage_argument
@run_argument
@click.option("--every", type=click.FloatRange(min=0.2), default=2.0, show_default=True, help="Seconds between two looks.")
@click.option(
    "--settle",
    type=click.FloatRange(min=0.0),
    default=90.0,
    show_default=True,
    help="Seconds to wait after a failed attempt for the next one: more than the training's retry_delay_s.",
)
@click.option(
    "--silent",
    type=click.FloatRange(min=0.0),
    default=math.inf,
    help="Seconds to wait for another report of a training that is unknown: more than its longest pause. By default for ever.",
)
@click.option("--once", is_flag=True, help="Look once.")
def watch(storage: str, run: str, every: float, settle: float, silent: float, once: bool) -> int:
    """Show a running training until it ends.

    Shows its state, the newest metrics with their curves, its speed and the newest checkpoints. Without a terminal, prints the
    newest report and checkpoint and the state, then a line for each further report, checkpoint and change of state. Reads only
    the storage, which has reports two seconds after they were made; once a look has succeeded, waits while the storage is away.
    After an attempt that failed, waits --settle seconds for the next one, unless the process that led it is known to be gone; a
    restart by an automation is not awaited.
    A training on another machine, or in another container, is "unknown" until it ends. It stays so if it is killed, and is
    watched for ever without --silent.
    Exits with 0 if the training completed, else with 1, with --once also while it runs. Costs three listings for each look.
    """
    watcher, settling = Watcher(open_training(storage, run)), Settling(settle, silent)
    shown = console()
    view = watcher.look()
    if not shown.is_terminal:
        view = _print_news(watcher, view, settling, every, once=once)
    else:
        metrics = MetricLines()
        with Live(_picture(run, view, metrics, shown.width), console=shown, auto_refresh=False) as live:
            while not once and not settling.has_ended(view):
                time.sleep(every)
                view = watcher.look_again(view)
                live.update(_picture(run, view, metrics, shown.width), refresh=True)
    return 0 if view.state == "completed" else 1


def _print_news(watcher: Watcher, view: View, settling: Settling, every: float, *, once: bool) -> View:
    before = View(None, view.history[:-1], view.checkpoints[:-1])  # of the past, the newest report and checkpoint
    while True:
        for line in news(before, view):
            say(line)
        if once or settling.has_ended(view):
            return view
        time.sleep(every)
        before, view = view, watcher.look_again(view)


def news(before: View, now: View) -> Iterator[str]:
    """Yield a line for each report, checkpoint and change of state between two views."""
    for record in _new_records(before.history, now.history):
        yield f"attempt {record.attempt}, step {record.step}: {_values(record)}"
    for checkpoint_id in sorted(set(now.checkpoints) - set(before.checkpoints)):
        yield f"checkpoint {checkpoint_id}"
    attempts = [None if view.status is None else view.status.attempt.number for view in (before, now)]
    if (attempts[0], before.state) != (attempts[1], now.state):
        again = "; it may begin again" if now.may_begin_again else ""
        reason = f": {now.reason}" if now.reason else ""
        yield now.state if attempts[1] is None else f"attempt {attempts[1]} is {now.state}{reason}{again}"


def _new_records(before: Sequence[MetricRecord], now: Sequence[MetricRecord]) -> Sequence[MetricRecord]:
    if _goes_on(before, now):
        return now[len(before) :]
    known = set(map(_identity, before))
    return [record for record in now if _identity(record) not in known]


def _goes_on(before: Sequence[MetricRecord], now: Sequence[MetricRecord]) -> bool:
    """Return whether all that `now` has beyond `before` is at its end: records of an earlier attempt may come late."""
    return not before or (len(before) <= len(now) and _identity(before[-1]) == _identity(now[len(before) - 1]))


def _identity(record: MetricRecord) -> tuple[int, int, str, bool]:
    """Return what two records of a run do not share; not their metrics, since NaN is equal to no other one."""
    return record.attempt, record.step, record.reported_at, record.is_logged


def _values(record: MetricRecord) -> str:
    return ", ".join(f"{name}={show_metric(value)}" for name, value in flatten_metrics(record.metrics))


def _picture(run: str, view: View, metrics: MetricLines, width: int) -> Table:
    metrics.add(view.history)
    picture = Table.grid()
    picture.add_row(_headline(run, view))
    if view.reason:
        picture.add_row(Text(view.reason, overflow="fold"))
    for line in (_speed(view), *metrics.shown(width), "", *_checkpoint_lines(view)):
        picture.add_row(Text(line, overflow="ellipsis", no_wrap=True))
    return picture


def _headline(run: str, view: View) -> Text:
    attempt = (
        ""
        if view.status is None
        else f", attempt {view.status.attempt.number}, {show_count(view.status.attempt.world_size, 'rank')}"
    )
    again = " (may begin again)" if view.may_begin_again else ""
    state = (view.state, RUN_STYLES.get(view.state, ""))
    return Text.assemble((plain(run), "bold"), "  ", state, again, attempt, overflow="ellipsis", no_wrap=True)


def _speed(view: View) -> str:
    last = next((record for record in reversed(view.history) if not record.is_logged), None)
    if last is None:
        return "no reports yet"
    age = show_age((datetime.now(timezone.utc) - _time(last)).total_seconds())
    speed = steps_per_s(view.history)
    return f"step {last.step}, {age} ago{'' if speed is None else f', {speed:.3g} steps/s'}"


def steps_per_s(history: Sequence[MetricRecord]) -> float | None:
    """Return the speed over the newest reports of the last attempt; None if they do not show one."""
    newest_attempt = takewhile(lambda record: record.attempt == history[-1].attempt, reversed(history))
    reports = list(islice((record for record in newest_attempt if not record.is_logged), _SPEED_REPORTS))[::-1]
    took_s = (_time(reports[-1]) - _time(reports[0])).total_seconds() if reports else 0.0
    return (reports[-1].step - reports[0].step) / took_s if took_s > 0 else None


def _time(record: MetricRecord) -> datetime:
    return datetime.fromisoformat(record.reported_at)


def _checkpoint_lines(view: View) -> Iterator[str]:
    yield show_count(len(view.checkpoints), "checkpoint")
    for checkpoint_id in list(view.checkpoints)[: -_SHOWN_CHECKPOINTS - 1 : -1]:
        yield f"  {checkpoint_id}  step {step_of(checkpoint_id)}, attempt {attempt_of(checkpoint_id)}"
