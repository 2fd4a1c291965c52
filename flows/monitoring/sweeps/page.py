"""The page of a sweep: its state, the pictures of its trials and parameters, and the table of its trials; pure Markdown."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefect_torch.ckpt.text import show_count
from prefect_torch.flows.monitoring.pages.drawing.svg import as_data_url
from prefect_torch.flows.monitoring.pages.head import write_head
from prefect_torch.flows.monitoring.text import flow_run_page, plain_text, shorten, show_compact, show_number

from .coordinates import draw_coordinates, draw_importances
from .parameters import Value, at_equal_steps, importances, varied
from .trial_chart import draw_best, draw_trials
from .view import SeenTrial, SweepView, count_states

_MAX_ROWS = 100
_MAX_COLUMNS = 6
_WHICH_RANK = re.compile(r"^rank \d+ of attempt \d+.*? failed: ")  # the page of the trial tells it
_NOT_ENOUGH = "It takes eight trials that have ended with a value to determine which parameters matter."


@dataclass(frozen=True, slots=True)
class SweepContext:
    """The part of the page that does not come from the view.

    Attributes:
        storage: The storage as Python takes it on any machine.
        num_trials: How many trials there will be; None if that is unknown.
        has_rungs: Whether a scheduler decides at rungs.
        state: The state of the sweep, in a word.

    """

    storage: str
    num_trials: int | None
    has_rungs: bool
    state: str = "running"


def write_sweep(view: SweepView, context: SweepContext, now_s: float) -> str:
    """Return the page.

    Args:
        view: The view of the sweep.
        context: The part of the page that does not come from the view.
        now_s: The current time (seconds since the epoch).

    """
    trials = view.by_score()
    parts = (
        _head(view, trials, context, now_s),
        _best(view, context),
        _curves(view, trials),
        _parameters(view, trials),
        _table(view, trials, context),
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def _head(view: SweepView, trials: Sequence[SeenTrial], context: SweepContext, now_s: float) -> Iterator[str]:
    of = f" of {context.num_trials}" if context.num_trials is not None else ""
    facts = [f"{len(trials)}{of} trial{'' if len(trials) == 1 and not of else 's'}"]
    facts += [f"{count} {state}" for state, count in count_states(trials)]
    yield from write_head(view.run.name, context.state, facts, view.run.path, now_s, context.storage)


def _best(view: SweepView, context: SweepContext) -> Iterator[str]:
    best = view.best()
    if best is None:
        return
    at = "" if best.step is None else f" at step {best.step}"
    yield "## Best trial"
    yield ""
    score = f"**{plain_text(view.metric)} {show_number(best.value)}**{at}"
    yield f"{_link(best, f'Trial {best.number}')}: {score}, {best.state}, with"
    parameters = json.dumps(dict(best.parameters), indent=2, ensure_ascii=False)
    yield from ("", "```json", parameters, "```", "", "Its checkpoint in Python:", "")
    yield from ("```python", "from prefect_torch.flows import SweepResult")
    yield f"result = SweepResult.from_storage({context.storage!r}, {view.run.name!r})"
    yield "checkpoint = result.best.checkpoint"
    yield "```"


def _curves(view: SweepView, trials: Sequence[SeenTrial]) -> Iterator[str]:
    curves, best = draw_trials(trials, view.best()), draw_best(trials, view.mode)
    if curves is not None:
        num = sum(bool(trial.curve.points) for trial in trials)
        of = "" if num == len(trials) else f", {num} of {len(trials)}"
        yield from (
            f"## {plain_text(view.metric)} of each trial, over its steps{of}",
            "",
            f"![Curves of all trials]({as_data_url(curves)})",
        )
    if best is not None:
        yield from (
            *([""] if curves is not None else []),
            "## Best over time",
            "",
            f"![Best value over time]({as_data_url(best)})",
        )


def _parameters(view: SweepView, trials: Sequence[SeenTrial]) -> Iterator[str]:
    found, step = _importances(trials)
    picture = draw_coordinates(trials, view.metric, view.mode, list(found))
    if picture is None:
        return
    yield from ("## Parameters", "", f"![Parallel coordinates]({as_data_url(picture)})", "")
    yield from ("*A line for each trial: the bluer, the better; the best is green.*", "")
    bars = draw_importances(found)
    if bars is None:
        yield _NOT_ENOUGH
        return
    yield from (f"![Importance of the parameters]({as_data_url(bars)})", "")
    at = "" if step is None else f", compared at step {step}, which all of them have reached,"
    yield (
        f"*How much of the order of the trials{at} each parameter explains by itself: 100 % if it alone decides which "
        "are better, 0 % if it does not matter.*"
    )


def _importances(trials: Sequence[SeenTrial]) -> tuple[dict[str, float], int | None]:
    """Return the importance of each parameter, and the step at which the trials were compared."""
    ended = [(trial, trial.value) for trial in trials if trial.value is not None and trial.state != "running"]
    parameters = [trial.parameters for trial, _ in ended]
    compared = at_equal_steps([trial.curve.points for trial, _ in ended])
    if compared is None:
        return importances(parameters, [value for _, value in ended]), None
    step, values = compared
    return importances(parameters, values), step


def _table(view: SweepView, trials: Sequence[SeenTrial], context: SweepContext) -> Iterator[str]:
    if not trials:
        return
    shown = _chosen(trials)
    names = varied([trial.parameters for trial in trials])[:_MAX_COLUMNS]
    heads = [
        ("trial", ":--"),
        ("state", ":--"),
        (plain_text(view.metric), "--:"),
        ("step", "--:"),
        *([("rung", ":--")] if context.has_rungs else []),
        *((plain_text(name), "--:") for name in names),
    ]
    yield from ("## Trials", "", f"| {' | '.join(head for head, _ in heads)} |", f"| {' | '.join(mark for _, mark in heads)} |")
    for trial in shown:
        yield f"| {' | '.join(_cells(trial, names, context))} |"
    if reasons := list(_reasons(shown)):
        yield from ("", *reasons)
    if len(shown) < len(trials):
        left_out = show_count(len(trials) - len(shown), "trial")
        yield from ("", f"Not shown: {left_out}; see `SweepResult.from_storage(...).trials_dataframe`.")


def _chosen(trials: Sequence[SeenTrial]) -> list[SeenTrial]:
    """Return the trials of the table: those that run, then the best; of the others the newest."""
    by_priority = sorted(trials, key=lambda it: it.state != "running")
    return sorted(by_priority[:_MAX_ROWS], key=list(trials).index)


def _cells(trial: SeenTrial, names: Sequence[str], context: SweepContext) -> Iterator[str]:
    yield _link(trial, str(trial.number))
    yield trial.state
    yield "" if trial.value is None else show_number(trial.value)
    yield "" if trial.step is None else str(trial.step)
    if context.has_rungs:
        yield show_rung(trial)
    yield from (_cell(trial.parameters, name) for name in names)


def _reasons(trials: Sequence[SeenTrial]) -> Iterator[str]:
    """Yield a line for each reason of trials: below the table, whose last columns a window does not show."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for trial in trials:
        if trial.reason is not None:
            reason = plain_text(shorten(_WHICH_RANK.sub("", trial.reason)))
            numbers.setdefault((trial.state, reason), []).append(trial.number)
    for (state, reason), of in numbers.items():
        yield f"- trial{'' if len(of) == 1 else 's'} {', '.join(map(str, sorted(of)))} {state}: {reason}"


def show_rung(trial: SeenTrial) -> str:
    """Return the time of a trial's last decision; not how many it had, since a report may have passed several rungs."""
    return f"at {show_compact(trial.decided[-1])}" if trial.decided else ""


def _cell(parameters: Mapping[str, Value], name: str) -> str:
    return plain_text(shorten(show_number(parameters[name]), 40)) if name in parameters else ""


def _link(trial: SeenTrial, words: str) -> str:
    page = flow_run_page(trial.curve.flow_run_id)
    return words if page is None else f"[{words}]({page})"
