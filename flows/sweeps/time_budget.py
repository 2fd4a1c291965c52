"""The time that a sweep takes, over all processes that lead it."""

from collections.abc import Callable

from prefect_torch.flows.sweeps.journal.events import SweepLed
from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials

_LONGEST_UNRECORDED_S, _SHARE_UNRECORDED = 60.0, 0.01  # of a budget: a kill loses the larger of these at most


class TimeBudget:
    """The time that a sweep may take, and what is used of it.

    Args:
        budget_s: The most seconds; None for no limit.
        recorded: The record of the trials, which has the time that was used before.
        clock: Returns the time in seconds.

    """

    def __init__(self, budget_s: float | None, recorded: RecordedTrials, clock: Callable[[], float]) -> None:
        self._budget_s = budget_s
        self._recorded = recorded
        self._clock = clock
        self._started_s = clock()
        self._recorded_s = recorded.used_s

    @property
    def used_s(self) -> float:
        """The time of the sweep so far, in this process and in those that led it before."""
        return self._recorded.used_s + self._clock() - self._started_s

    @property
    def is_used_up(self) -> bool:
        """Whether no trial may start or go on any more."""
        return self._budget_s is not None and self.used_s >= self._budget_s

    def record(self, attempt: int) -> None:
        """Record the used time if much of it is not recorded; `attempt` leads the sweep."""
        used_s = self.used_s
        if self._budget_s is None:
            return
        if used_s - self._recorded_s >= max(_LONGEST_UNRECORDED_S, _SHARE_UNRECORDED * self._budget_s):
            with self._recorded.lock:
                self._recorded.record(SweepLed(attempt, config=self._recorded.common, used_s=used_s))
            self._recorded_s = used_s
