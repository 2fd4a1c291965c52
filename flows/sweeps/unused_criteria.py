"""Warnings of stop criteria and schedulers that decided nothing on a completed trial, as no report had what they need."""

from collections.abc import Iterator, Sequence

from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.reporting.decisions import time_of
from prefect_torch.ckpt.runs.history import MetricRecord, read_history
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.search_config import SearchConfig


class UnusedCriteria:
    """Warns once of each limit, and of the scheduler, that it has decided nothing on a completed trial, and why.

    There is no warning of one that the first such trial has reported.

    Args:
        search: The configuration of the search.

    """

    def __init__(self, search: SearchConfig) -> None:
        self._search = search
        self._limits = dict(search.stop or {})
        self._awaits_decision = True

    def warnings(self, trial: TrialRecord, first_decision: float | None, storage: StorageSpec) -> Iterator[str]:
        """Yield the warnings on a trial that has ended; costs a read of its history while any may follow.

        Args:
            trial: The trial.
            first_decision: The time at whose first checkpoint it was to be decided on it; None for none.
            storage: The storage of the sweep.

        """
        if trial.state != "completed":
            return
        if any(report.checkpoint for report in trial.reports):
            self._awaits_decision = False
        due = first_decision if self._awaits_decision else None
        if due is None and not self._limits:
            return
        records = read_history(Run.open(storage, trial.run))
        reports = [record for record in records if not record.is_logged]
        names = sorted({name for record in reports for name in record.metrics})
        limits, self._limits = self._limits, {}
        for name, limit in limits.items():
            if not _has(name, reports):
                yield (
                    f"stop={{{name!r}: {limit:g}}} completes no trial: no report of trial {trial.number} has {name!r} as a "
                    f"number; its reports have {', '.join(names) or 'none at all'}"
                )
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
        else:
            yield (
                f"scheduler={self._search.scheduler!r} has not decided on trial {trial.number}: it reached "
                f"{self._search.time_attr}={longest:g} without a checkpoint, and decisions are made on reports with one, from "
                "which the trial can go on; report one at least as often as there are decisions"
            )


def _has(name: str, reports: Sequence[MetricRecord]) -> bool:
    return any(time_of(name, report.step, 1, report.metrics) is not None for report in reports)
