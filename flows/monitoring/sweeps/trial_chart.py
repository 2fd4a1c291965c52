"""The pictures of the trials' scores: the curve of each, and the best value over time."""

import math
from collections.abc import Iterator, Sequence

from prefect_torch.flows.monitoring.pages.drawing.axis import Axis, step_axis, value_axis
from prefect_torch.flows.monitoring.pages.drawing.frame import Frame, draw_dot, draw_grid, draw_line
from prefect_torch.flows.monitoring.pages.drawing.svg import COLOURS, GREY, WIDTH, attributes, document, text
from prefect_torch.flows.monitoring.text import show_number

from .view import SeenTrial

_HEIGHT = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 14, 30, 26
_BEST, _RUNNING, _COMPLETED = COLOURS[2], COLOURS[1], COLOURS[0]
_MAX_IMPROVEMENTS = 200
_UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0))
_MANY_UNITS = 300
_MOST_STEPS = 6  # between the ticks of the times


def draw_trials(trials: Sequence[SeenTrial], best: SeenTrial | None) -> str | None:
    """Return the curve of every trial that has one as an SVG document; None if none has.

    Those that were paused, stopped or have failed are pale; the best is thick, and on top.

    Args:
        trials: The trials.
        best: The best of them.

    """
    drawn = [trial for trial in trials if trial.curve.points]
    if not drawn:
        return None
    points = [point for trial in drawn for point in trial.curve.points]
    steps = step_axis(min(step for step, _ in points), max(step for step, _ in points))
    frame = _frame(steps, value_axis([value for _, value in points]))
    is_best = best.number if best is not None else None
    drawn.sort(key=lambda it: (it.number == is_best, it.state == "running", it.state == "completed", -it.number))
    return document(WIDTH, _HEIGHT, [*_legend(drawn, best), *draw_grid(frame), *(_curve(frame, it, is_best) for it in drawn)])


def draw_best(trials: Sequence[SeenTrial], mode: str) -> str | None:
    """Return the best value so far over the time since the first report as an SVG document; None without two reports.

    Args:
        trials: The trials.
        mode: "min" or "max".

    """
    reports = sorted((it.curve.times[step], value) for it in trials if it.value is not None for step, value in it.curve.points)
    if len(reports) < 2 or reports[0][0] == reports[-1][0]:  # noqa: PLR2004 - the fewest of a line
        return None
    first_s, last_s = reports[0][0], reports[-1][0]
    unit, unit_s = next((it for it in _UNITS if (last_s - first_s) / it[1] < _MANY_UNITS), _UNITS[-1])
    improved = list(_improvements(reports, mode))
    length = (last_s - first_s) / unit_s
    times = Axis(0.0, length, is_log=False, ticks=_ticks(length))
    frame = _frame(times, value_axis([value for _, value in improved]))
    line = [((at_s - first_s) / unit_s, value) for at_s, value in _stairs(improved, last_s)]
    return document(
        WIDTH,
        _HEIGHT,
        [
            text(8, 16, f"the best value so far, over the {unit} since the first report", font_size="11"),
            *_value(show_number(improved[-1][1])),
            *draw_grid(frame),
            draw_line(frame, line, _BEST),
            *(draw_dot(frame, ((at_s - first_s) / unit_s, value), _BEST) for at_s, value in improved),
        ],
    )


def _curve(frame: Frame, trial: SeenTrial, best: int | None) -> str:
    points = trial.curve.points
    if trial.number == best:
        return draw_line(frame, points, _BEST, width="2.6") + draw_dot(frame, points[-1], _BEST)
    if trial.state == "running":
        return draw_line(frame, points, _RUNNING, "0.9") + draw_dot(frame, points[-1], _RUNNING, "0.9")
    if trial.state == "completed":
        return draw_line(frame, points, _COMPLETED, "0.75", "1.4")
    return draw_line(frame, points, GREY, "0.4", "1.2") + draw_dot(frame, points[-1], GREY, "0.4")


def _legend(trials: Sequence[SeenTrial], best: SeenTrial | None) -> Iterator[str]:
    states = {trial.state for trial in trials if best is None or trial.number != best.number}
    entries = [
        *([(_BEST, "1", f"trial {best.number}, the best")] if best is not None and best.curve.points else []),
        *([(_RUNNING, "0.9", "running")] if "running" in states else []),
        *([(_COMPLETED, "0.75", "completed")] if "completed" in states else []),
        *([(GREY, "0.5", "paused, stopped or failed")] if states - {"running", "completed"} else []),
    ]
    x = 8.0
    for colour, opacity, words in entries:
        yield f"<rect {attributes(x=f'{x:.1f}', y='8', width='14', height='4', rx='2', fill=colour, opacity=opacity)}/>"
        yield text(x + 20, 15, words)
        x += 44 + 6.2 * len(words)


def _value(words: str) -> Iterator[str]:
    yield text(WIDTH - _RIGHT, 16, words, fill=_BEST, text_anchor="end", font_weight="600", font_size="13")


def _frame(across: Axis, values: Axis) -> Frame:
    return Frame(_LEFT, _TOP, WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM, across, values)


def _ticks(high: float) -> tuple[float, ...]:
    power = 10 ** max(0, math.floor(math.log10(high / _MOST_STEPS)))
    step = next(factor * power for factor in (1, 2, 5, 10) if high / (factor * power) <= _MOST_STEPS)
    return tuple(float(number * step) for number in range(math.floor(high / step) + 1))


def _improvements(reports: Sequence[tuple[float, float]], mode: str) -> Iterator[tuple[float, float]]:
    """Yield the reports that are better than all before, at most the newest `_MAX_IMPROVEMENTS`."""
    sign = 1 if mode == "min" else -1
    best = math.inf
    found = []
    for at_s, value in reports:
        if sign * value < best:
            best = sign * value
            found.append((at_s, value))
    yield from found[-_MAX_IMPROVEMENTS:]


def _stairs(improved: Sequence[tuple[float, float]], last_s: float) -> Iterator[tuple[float, float]]:
    for number, (at_s, value) in enumerate(improved):
        if number:
            yield at_s, improved[number - 1][1]
        yield at_s, value
    yield last_s, improved[-1][1]
