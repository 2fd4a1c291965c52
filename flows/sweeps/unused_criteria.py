"""Warnings about stop criteria and schedulers that never decide on a trial, since no report has what they need."""

import time
from collections.abc import Callable, Iterator, Sequence

from prefect_torch.ckpt import CheckpointError
from prefect_torch.ckpt.reporting.decisions import COUNTED_TIMES, time_of
from prefect_torch.ckpt.runs.history import MetricRecord, read_history
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.text import encodable
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.limits import limits_of
from prefect_torch.flows.sweeps.search_config import SearchConfig

_FIRST_LOOK_S = 60.0  # before the first look at running trials, which may have no other end; each next look is twice as late
_ENOUGH_REPORTS = 10


class UnusedCriteria:
    """Warns once about each limit, and about the scheduler, if it has decided nothing on a trial, and why.

    Each is checked once: on the first trial that completes, or, for limits, on the first running one that has reported often.

    Args:
        search: The configuration of the search.

    """

    def __init__(self, search: SearchConfig) -> None:
        self._search = search
        self._limits = {name: limit for name, limit in limits_of(search).items() if name not in COUNTED_TIMES}
        self._max_t = search.max_t if search.time_attr == "step" else None
        self._awaits_decision = True
        self._began_s, self._next_look_s = time.monotonic(), _FIRST_LOOK_S

    def warnings_while_running(self, trials: Callable[[], Sequence[TrialRecord]], sweep: Run) -> Iterator[str]:
        """Yield the warnings about limits that none of a running trial's reports has: the trial may have no other end.

        Costs a read of the trials' histories after one minute, two, four, until one of them has ten reports.

        Args:
            trials: Returns the trials that run.
            sweep: The sweep.

        """
        if not self._limits or time.monotonic() - self._began_s < self._next_look_s:
            return
        self._next_look_s *= 2
        for trial in trials():
            try:
                reports = _reports_of(trial, sweep)
            except (CheckpointError, OSError):  # no reason to end the sweep
                return
            if len(reports) >= _ENOUGH_REPORTS:
                yield from self._missing_limits(trial, reports, "so far ")
                return

    def warnings(self, trial: TrialRecord, first_decision: float | None, sweep: Run) -> Iterator[str]:
        """Yield the warnings on a trial that has ended; costs a read of its history while a warning is still possible.

        Args:
            trial: The trial.
            first_decision: The time from which its first checkpoint needed a decision; None if checkpoints decide nothing.
            sweep: The sweep.

        """
        if trial.state != "completed":
            return
        yield from self._early_end(trial)
        if any(report.checkpoint for report in trial.reports):
            self._awaits_decision = False
        due = first_decision if self._awaits_decision else None
        if due is None and not self._limits:
            return
        try:
            reports = _reports_of(trial, sweep)
        except (CheckpointError, OSError):  # no reason to end the sweep
            return
        yield from self._missing_limits(trial, reports)
        if due is None:
            return
        times = [time_of(self._search.time_attr, it.step, number, it.metrics) for number, it in enumerate(reports, 1)]
        longest = max((time for time in times if time is not None), default=0)
        self._awaits_decision = False
        if longest < due:
            yield (
                f"scheduler={self._search.scheduler!r} has not decided on trial {trial.number}: it ended at "
                f"{self._search.time_attr}={longest:g}, and the first decision is at {due:g}"
            )
        elif any(report.checkpoint is not None for report in reports):
            yield (
                f"scheduler={self._search.scheduler!r} has not decided on trial {trial.number}: no report of a checkpoint has "
                f"{self._search.metrics[0]!r}; report both in one call"
            )
        else:
            yield (
                f"scheduler={self._search.scheduler!r} has not decided on trial {trial.number}: it reached "
                f"{self._search.time_attr}={longest:g} without a checkpoint, and decisions are made on reports with one, from "
                "which the trial can go on; report one at least as often as there are decisions"
            )

    def _early_end(self, trial: TrialRecord) -> Iterator[str]:
        """Yield a warning if the first report of a trial has completed it: the limit was not meant in steps."""
        first = trial.reports[0] if trial.reports else None
        if self._max_t is not None and first is not None and first.num_reports == 1 and first.time > self._max_t:
            yield (
                f"max_t={self._max_t:g} has completed trial {trial.number} at its first report, at step={first.time:g}; the "
                "steps of Lightning and Transformers are those of the optimizer: give max_t in these, or "
                "time_attr='training_iteration', which counts reports"
            )
            self._max_t, self._awaits_decision = None, False

    def _missing_limits(self, trial: TrialRecord, reports: Sequence[MetricRecord], when: str = "") -> Iterator[str]:
        names = sorted({name for record in reports for name in record.metrics})
        limits, self._limits = self._limits, {}
        for name, limit in limits.items():
            if not _has(name, reports):
                given = f"stop={{{name!r}: {limit:g}}}" if name in (self._search.stop or {}) else f"max_t={limit:g}"
                yield (
                    f"{given} completes no trial: no report of trial {trial.number} {when}has {name!r} as "
                    f"a number; its reports have {encodable(', '.join(names)) or 'none at all'}"
                )


def _reports_of(trial: TrialRecord, sweep: Run) -> list[MetricRecord]:
    return [record for record in read_history(sweep.beside(trial.run)) if not record.is_logged]


def _has(name: str, reports: Sequence[MetricRecord]) -> bool:
    return any(time_of(name, report.step, 1, report.metrics) is not None for report in reports)
