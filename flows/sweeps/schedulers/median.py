"""The median stopping rule (D. Golovin et al., Google Vizier, KDD 2017): a trial worse than the others' averages stops."""

import math
from dataclasses import dataclass
from statistics import fmean, mean, median
from typing import ClassVar

from prefect_torch.flows.sweeps.journal.history import History, TrialRecord

from .scheduling import Decision, ResumesAll, is_score, sort_key


@dataclass(frozen=True, slots=True)
class Median(ResumesAll):
    """Stops a trial whose best value is worse than the median of the others' averages up to the same time.

    As in Ray Tune, only others that have come as far count. The average of a trial that was stopped earlier covers only its bad
    beginning, and with many such averages no trial would be worse than the median.

    Attributes:
        grace_period: No trial is stopped before this time.
        min_trials: How many others must have come as far.

    """

    grace_period: float
    min_trials: int = 3
    asks_always: ClassVar[bool] = True
    promotes_first: ClassVar[bool] = True

    def first_milestone(self, number: int) -> float | None:  # noqa: ARG002 - the signature of Scheduler
        """Return the time from which a trial may be stopped."""
        return self.grace_period

    def decide(self, history: History, number: int) -> Decision:
        """Return whether the trial is stopped."""
        trial = history[number]
        time = trial.reports[-1].time
        others = (it for it in history.values() if it.number != number and it.reports and it.reports[-1].time >= time)
        averages = [average for other in others if (average := _mean(other, time)) is not None]
        if time < self.grace_period or len(averages) < self.min_trials:
            return Decision("running", self.grace_period)
        best = min((report.value for report in trial.reports), key=sort_key)
        middle = median(averages)
        if not is_score(best) or best > middle:
            return Decision("stopped", reason=f"worse than the median of {len(averages)} trials at {time:g}")
        return Decision("running", self.grace_period)


def _mean(trial: TrialRecord, time: float) -> float | None:
    values = [report.value for report in trial.reports if report.time <= time and math.isfinite(report.value)]
    try:
        return fmean(values) if values else None
    except OverflowError:  # of the sum
        return mean(values)  # exact, and slow
