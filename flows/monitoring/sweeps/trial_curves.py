"""The curve of a trial: its reports of the metric that the sweep optimizes, read from its run."""

import math
from dataclasses import dataclass, field, replace

from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.history import newest_of_each, read_history
from prefect_torch.ckpt.runs.metrics import Metrics
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.monitoring.pages.drawing.curves import Point, finite_values, thin
from prefect_torch.flows.monitoring.text import seconds_of

_MAX_POINTS = 60


@dataclass(frozen=True, slots=True)
class TrialCurve:
    """The reports of a trial's run.

    Attributes:
        points: The step and the value of its reports, thinned.
        times: When the value at each of these steps was reported, in seconds since the epoch.
        metrics: The newest value of each metric in the run, and in none before it.
        step: The step of its newest report; None before the first.
        flow_run_id: The flow run of its newest attempt, or None.
        attempts: The number of its attempts.
        is_over: Whether its newest attempt had ended before the reports were read, so that all of it is here.

    """

    points: tuple[Point, ...] = ()
    times: dict[int, float] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    step: int | None = None
    flow_run_id: str | None = None
    attempts: int = 0
    is_over: bool = False

    def after(self, earlier: "TrialCurve") -> "TrialCurve":
        """Return this curve, preceded by that of a run that the trial has left, up to the first step of this one."""
        begins = self.points[0][0] if self.points else math.inf
        kept = [(step, value) for step, value in earlier.points if step < begins]
        points = tuple(thin([*kept, *self.points], _MAX_POINTS))
        times = {step: {**earlier.times, **self.times}[step] for step, _ in points}
        return replace(self, points=points, times=times, step=earlier.step if self.step is None else self.step)


def read_curve(run: Run, metric: str) -> TrialCurve:
    """Return the curve of a trial; costs two listings, two small reads, and one for each object of its history.

    Args:
        run: The run of the trial.
        metric: "a/b" for a nested one.

    Raises:
        StorageError: If the storage does not answer.

    """
    status = read_status(run)
    if status is None:
        return TrialCurve()
    history = read_history(run)
    values = {record.step: (value, seconds_of(record.reported_at)) for record, value in finite_values(history, metric)}
    points = thin([(step, value) for step, (value, _) in sorted(values.items())], _MAX_POINTS)
    return TrialCurve(
        tuple(points),
        {step: values[step][1] for step, _ in points},
        newest_of_each(history),
        max((record.step for record in history if not record.is_logged), default=None),
        status.attempt.owner.flow_run_id,
        status.attempt.number,
        is_over=not status.may_be_alive,
    )
