"""The summary page of a run: its state, metrics, time, attempts, logs and checkpoints; pure Markdown."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prefect_torch.ckpt.errors import FencedError
from prefect_torch.ckpt.runs.manifest import attempt_of, is_id
from prefect_torch.ckpt.runs.metrics import find_finite_score
from prefect_torch.ckpt.runs.retention import Order, sort_by_score
from prefect_torch.ckpt.text import clip, headline, show_bytes, show_count
from prefect_torch.flows.monitoring.pages.drawing.chart import MAX_PANELS, draw_curves, draw_time
from prefect_torch.flows.monitoring.pages.drawing.curves import Curve, Point
from prefect_torch.flows.monitoring.pages.drawing.svg import as_data_url
from prefect_torch.flows.monitoring.text import fold_code, plain_text, shorten, show_duration, show_number, show_time

from .attempt_log import AttemptLog, position_of, resume_points
from .goodput import TimeSpent, time_spent
from .head import write_head
from .run_view import MAX_LINKED_ATTEMPTS, RunView
from .setup import Setup, restart_line, write_setup, write_use
from .stored_checkpoints import StoredCheckpoint

_MAX_ATTEMPTS = 20
_MAX_LINKED_RANKS = 16
_LONGEST_ERROR = 2000
_LONGEST_LINE = 300  # of an error
_MANY_METRICS = 12


@dataclass(frozen=True, slots=True)
class SummaryContext:
    """The part of a summary that does not come from the run's view.

    Attributes:
        path: The run's local path or URL.
        first_metric: The score, which comes first among the metrics; None without a score.
        order: Whether a high ("max") or a low ("min") score is good.
        flow_runs: The URLs of the flow runs that led the attempts, by attempt.
        ranks: The URLs of the ranks' task runs, by attempt and rank.
        setup: What the flow run was started with; None leaves that out.

    """

    path: str
    first_metric: str | None = None
    order: Order = "max"
    flow_runs: Mapping[int, str] = field(default_factory=dict)
    ranks: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    setup: Setup | None = None


def write_summary(run: str, view: RunView, context: SummaryContext, now_s: float) -> str:
    """Return the page.

    Args:
        run: The run's name.
        view: The view of the run.
        context: The location and the links of the run.
        now_s: The current time (seconds since the epoch).

    """
    spent = time_spent(view.logs, now_s)
    parts = (
        _head(run, view, context, now_s, spent),
        _metrics(view, context.first_metric, context.order),
        _checkpoints(run, view, context),
        _time(spent),
        _attempts(run, view, now_s),
        _log_links(context),
        _setup(view, context.setup),
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def state_of(log: AttemptLog | None) -> str:
    """Return the state of an attempt in a word."""
    return "starting" if log is None else log.status.state


def _head(run: str, view: RunView, context: SummaryContext, now_s: float, spent: TimeSpent) -> Iterator[str]:
    newest = view.newest
    facts: list[str] = []
    if newest is not None:
        facts.append(f"attempt {newest.number}")
        facts.extend([f"step {newest.last_step}"] if newest.last_step is not None else [])
        facts.extend([f"{rate:.3g} steps/s"] if (rate := newest.steps_per_s) is not None else [])
    facts.extend([f"{view.progress:.0%} done"] if view.progress is not None else [])
    if newest is not None and newest.is_running and view.left_s is not None:
        facts.append(f"about {show_duration(view.left_s)} left")
    facts.extend([f"goodput {spent.goodput:.1%}"] if spent.goodput is not None else [])
    storage = None if context.setup is None else context.setup.storage
    yield from write_head(run, state_of(newest), facts, context.path, now_s, storage)
    if context.setup is not None and context.setup.restart is not None:
        yield from ("", restart_line(context.setup.restart))
    if newest is not None and newest.outcome is not None and newest.outcome.error is not None:
        error = newest.outcome.error
        yield from ("", "```text", *_error_lines(error), "```")
        # A terminated attempt's error names the safe work, which is unknown if no rank started or the attempt was overtaken.
        if newest.outcome.ending == "failed" and newest.ranks and FencedError.__name__ not in error:
            yield from ("", _safe_work(run, view))


def _error_lines(error: str) -> Iterator[str]:
    """Yield the lines of an error; what is left out of a long one, or of a long line, is neither its beginning nor its end."""
    lines = (clip(line, _LONGEST_LINE) for line in error.replace("```", "'''").strip().splitlines())
    for line in clip("\n".join(lines), _LONGEST_ERROR).splitlines():
        yield from fold_code(line)


def _safe_work(run: str, view: RunView) -> str:
    if not (own := _own_checkpoints(view)):
        return "Nothing was committed yet."
    newest = own[-1]
    return f"Work is safe up to step {newest.step} (`{newest.id}`), where the next training named `{run}` continues."


def _metrics(view: RunView, first: str | None, order: Order) -> Iterator[str]:
    curves = view.curves.sorted(first)
    if not curves:
        return
    points = resume_points(view.logs)
    best = {it.name: point for it in curves[:1] if it.name == first and (point := it.best(points, order)) is not None}
    first_steps = {log.number: log.first_step for log in view.logs if log.first_step is not None}
    picture = draw_curves(curves, points, first_steps, best)
    yield from ("## Metrics", "")
    if picture is not None:
        yield f"![Metrics over steps]({as_data_url(picture)})"
        yield from _reading_aid(curves, later=len(first_steps) > 1)
    named = best or _best_evaluated(view, first, order)
    yield from (f"\nBest: **{plain_text(name)} {show_number(value)}** at step {step}." for name, (step, value) in named.items())
    yield from ("", "| metric | last | lowest | highest |", "| :-- | --: | --: | --: |")
    yield from (
        f"| {plain_text(shorten(it.name, 60))} | {plain_text(shorten(show_number(it.last), 40))} "
        f"| {show_number(it.low)} | {show_number(it.high)} |"
        for it in curves[:_MANY_METRICS]
    )
    more = len(curves) - _MANY_METRICS + len(view.curves.left_out)
    if more > 0:
        yield from ("", f"Not shown: {show_count(more, 'metric')}; see `Result.from_storage(...).metrics_dataframe`.")


def _best_evaluated(view: RunView, first: str | None, order: Order) -> dict[str, Point]:
    """Return the step and the value of the attempts' best checkpoint, by the name of the score: an evaluation attached it."""
    for checkpoint in sort_by_score(_own_checkpoints(view), first, order)[:1]:
        if first is not None and (value := find_finite_score(checkpoint.metrics, first)) is not None:
            return {first: (checkpoint.step, value)}
    return {}


def _own_checkpoints(view: RunView) -> list[StoredCheckpoint]:
    """Return the held checkpoints since the last fresh start, oldest first."""
    since = 1 if view.newest is None else view.newest.attempt.lineage
    return [it for it in view.checkpoints.held if attempt_of(it.id) >= since]


def _reading_aid(curves: list[Curve], *, later: bool) -> Iterator[str]:
    hints = ["over steps"]
    if later:
        hints.append("dashed lines: starts of later attempts")
        hints.append("pale lines: lost and trained again")
    if sum(curve.low is not None for curve in curves) > MAX_PANELS:
        hints.append(f"the first {MAX_PANELS} metrics")
    yield from ("", f"*{'; '.join(hints)}*")


def _time(spent: TimeSpent) -> Iterator[str]:
    picture = draw_time(spent.parts)
    if picture is None or spent.goodput is None:
        return
    yield from ("## Time", "", f"![Time spent]({as_data_url(picture)})", "")
    yield (
        f"Goodput **{spent.goodput:.1%}**: the share of training in {show_duration(spent.counted)}. *Checkpointing* is the "
        "time for which checkpoints stalled the slowest rank; *restarting* the time from a claim, or the end of the attempt "
        "before, to the first step; *lost* the time of work that is done again."
    )
    if spent.away >= 1:
        yield f"In addition, {show_duration(spent.away)} passed between flow runs."


def _attempts(run: str, view: RunView, now_s: float) -> Iterator[str]:
    logs = view.logs
    if not logs:
        return
    yield from ("## Attempts", "")
    yield "| # | started (UTC) | duration | ranks | resumed from | steps | state |"
    yield "| --: | :-- | --: | --: | :-- | :-- | :-- |"
    shown = logs[: -_MAX_ATTEMPTS - 1 : -1]
    for log in shown:
        duration_s = max(0.0, (now_s if log.ended_s is None else log.ended_s) - log.claimed_s)
        steps = "none" if log.first_step is None else f"{log.first_step} to {log.last_step}"
        yield (
            f"| {log.number} | {show_time(log.claimed_s)[5:]} | {show_duration(duration_s)} | {log.attempt.world_size} "
            f"| {_origin(log, run)} | {steps} | {state_of(log)} |"
        )
    if len(logs) > len(shown):
        yield from ("", f"Not shown: {show_count(len(logs) - len(shown), 'earlier attempt')}.")
    yield from ("", *(f"- attempt {log.number}: {reason}" for log in shown if (reason := _reason(log))))
    yield from (
        f"- set aside as damaged: `{checkpoint_id}`, {plain_text(shorten(reason))}"
        for checkpoint_id, reason in view.quarantined.items()
    )


def _origin(log: AttemptLog, run: str) -> str:
    restored = (log.attempt.resumed_from or "").rstrip("/")
    if not restored:
        return "fresh start"
    checkpoint_id = restored.rpartition("/")[2]
    if not is_id(checkpoint_id):
        return plain_text(checkpoint_id)
    attempt, step = position_of(checkpoint_id)
    origin = restored.removesuffix(f"/checkpoints/{checkpoint_id}").rpartition("/")[2]
    return f"step {step:.0f}, attempt {attempt:.0f}" + ("" if origin == run else f" of run {plain_text(origin)}")


def _reason(log: AttemptLog) -> str:
    """Return in one line why an attempt ended: the first line of its error."""
    if log.outcome is None:
        return "" if log.is_running else "killed with its flow's process, or overtaken by the next attempt"
    if log.outcome.error is None:
        return ""
    error = plain_text(shorten(headline(log.outcome.error)))
    return f"{log.outcome.kind}: {error}" if log.outcome.kind else error


def _log_links(context: SummaryContext) -> Iterator[str]:
    """Yield links from each of the newest attempts to its ranks' logs and to the flow run that led it."""
    attempts = sorted({*context.ranks, *context.flow_runs}, reverse=True)
    if attempts:
        yield from ("## Logs", "")
    for attempt in attempts[:MAX_LINKED_ATTEMPTS]:
        ranks = context.ranks.get(attempt, {})
        links = [f"[rank {rank}]({url})" for rank, url in list(ranks.items())[:_MAX_LINKED_RANKS]]
        more = [show_count(len(ranks) - len(links), "more rank")] if len(ranks) > len(links) else []
        leader = [f"[flow run]({context.flow_runs[attempt]})"] if attempt in context.flow_runs else []
        yield f"- attempt {attempt}: {' · '.join((*links, *more, *leader))}"


def _setup(view: RunView, setup: Setup | None) -> Iterator[str]:
    if setup is not None:
        attempt = None if view.newest is None else view.newest.attempt
        yield from write_setup(setup, *((None, None) if attempt is None else (attempt.world_size, attempt.owner.machine)))


def _checkpoints(run: str, view: RunView, context: SummaryContext) -> Iterator[str]:
    checkpoints = view.checkpoints
    if not checkpoints.held:
        return
    newest = checkpoints.held[-1]
    yield from ("## Checkpoints", "")
    total = show_bytes(checkpoints.bytes)
    yield f"{checkpoints.num} in storage, {total} in total; the newest is `{newest.id}`, step {newest.step}."
    if context.setup is not None:
        first = context.first_metric
        has_best = first is not None and any(find_finite_score(it.metrics, first) is not None for it in checkpoints.held)
        yield from write_use(context.setup, run, has_score=has_best)
