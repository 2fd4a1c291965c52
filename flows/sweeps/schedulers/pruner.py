"""Any pruner of Optuna's: a trial that it would prune stops."""

import math
from itertools import takewhile
from typing import ClassVar, Protocol

from prefect_torch.flows.sweeps.journal.history import History, TrialRecord, TrialState

from .scheduling import Decision, ResumesAll


class Pruning(Protocol):
    """A pruner, with its record of the trials."""

    def report(self, number: int, step: int, value: float) -> bool:
        """Add a report of a trial, whose lower `value` is better, and return whether the trial is to stop."""
        ...

    def end(self, number: int, state: TrialState) -> None:
        """Record that a trial has come to an end, after which it has no more reports."""
        ...


class PrunedTrials(ResumesAll):
    """Stops a trial at a report at which a pruner would.

    The pruner's record is rebuilt from the history, so a sweep that is started again has it, too: each new report is added
    once. After another start, a pruner that depends on the order in which trials reported gets the reports trial by trial.

    Args:
        pruning: The pruner.
        grace_period: No trial is stopped before this time.
        counts_reports: Whether the steps that the pruner sees number the reports of a trial, from 1, since a time may be a
            fraction or missing; else they are the times.

    """

    asks_always: ClassVar[bool] = True
    promotes_first: ClassVar[bool] = True

    def __init__(self, pruning: Pruning, grace_period: float, *, counts_reports: bool) -> None:
        self._pruning = pruning
        self._counts_reports = counts_reports
        self._grace_period = grace_period
        self._following: dict[int, int] = {}  # the step from which it has no report yet, of each trial
        self._ended: set[int] = set()

    def first_milestone(self, number: int) -> float | None:  # noqa: ARG002 - the signature of Scheduler
        """Return 0: the pruner sees every report."""
        return 0.0

    def decide(self, history: History, number: int) -> Decision:
        """Return whether the trial is stopped."""
        for other in history.values():
            if other.number != number:
                self._catch_up(other)
        trial = history[number]
        prunes = self._catch_up(trial)
        time = trial.reports[-1].time
        if prunes and time >= self._grace_period:
            return Decision("stopped", reason=f"pruned at {time:g}")
        return Decision("running", 0.0)

    def _catch_up(self, trial: TrialRecord) -> bool:
        """Add the new reports of a trial to the pruner, and return whether it would prune the trial at the last one."""
        if trial.number in self._ended:
            return False
        prunes = False
        for step, value in self._new_reports(trial):
            if step >= self._following.get(trial.number, 0):
                self._following[trial.number] = int(step) + 1
                prunes = self._pruning.report(trial.number, int(step), value)
        # Not a failed one: Optuna would refuse its reports after a restart, and its pruners do not look for failed trials.
        if trial.state in ("completed", "stopped"):
            self._pruning.end(trial.number, trial.state)
            self._ended.add(trial.number)
        return prunes

    def _new_reports(self, trial: TrialRecord) -> list[tuple[float, float]]:
        """Return step and value of the reports that the pruner lacks: the last ones, so that it does not look at thousands.

        The others have been trained again after a restart, or have no step: an earlier start had a metric as time.
        """
        following = self._following.get(trial.number, 0)
        places = range(len(trial.reports), 0, -1)
        steps = places if self._counts_reports else (report.time for report in reversed(trial.reports))
        newest_first = zip(steps, (report.value for report in reversed(trial.reports)), strict=True)
        new = list(takewhile(lambda it: math.isnan(it[0]) or it[0] >= following, newest_first))
        return [it for it in reversed(new) if not math.isnan(it[0])]
