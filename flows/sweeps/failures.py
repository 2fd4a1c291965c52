"""When the failures of trials end their sweep."""

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from prefect_torch.ckpt.text import show_count
from prefect_torch.flows.sweeps.journal.history import History
from prefect_torch.flows.sweeps.trial_end import NO_METRIC

_MOST_WITHOUT_METRIC = 3
_AFRESH = "; resume='never' begins the sweep again"  # a trial that has trained to its end would report no more
_RESTARTED = "; SearchConfig(restart_errored=True) starts failed trials again"


class SweepFailedError(RuntimeError):
    """Too many trials of a sweep have failed."""


@dataclass(frozen=True, slots=True)
class Failures:
    """The failed trials of a sweep.

    Attributes:
        sweep: The sweep's name.
        trials: All its trials.
        failed: The numbers of those that have failed.
        has_completed: Whether a trial has completed.

    """

    sweep: str
    trials: History
    failed: AbstractSet[int]
    has_completed: bool

    def raise_if_too_many(self, most: int | None) -> None:
        """Raise if more than `most` have failed, or at least three because they lack the metric, which no other trial has.

        Raises:
            SweepFailedError: With the first error.

        """
        if not self.has_completed and len(self.failed) >= _MOST_WITHOUT_METRIC:
            reasons = [self.trials[number].reason or "" for number in sorted(self.failed)]
            without = [reason for reason in reasons if reason.startswith(NO_METRIC)]
            if len(without) >= _MOST_WITHOUT_METRIC and not self._is_metric_known():
                raise SweepFailedError(f"{len(without)} trials of sweep {self.sweep!r} ended so: {without[0]}{_AFRESH}")
        if most is not None and len(self.failed) > most:
            first = self.trials[min(self.failed)]
            raise SweepFailedError(
                f"{show_count(len(self.failed), 'trial')} of sweep {self.sweep!r} failed, and max_failed_trials={most}; "
                f"the first, trial {first.number}: {first.reason}{_remedy(first.reason)}"
            )

    def _is_metric_known(self) -> bool:
        """Return whether a report that led to a decision has the metric, and the time, so that their names are right."""
        reports = (report for trial in self.trials.values() for report in trial.reports)
        return any(not math.isnan(report.value) and not math.isnan(report.time) for report in reports)

    def raise_if_all(self) -> None:
        """Raise if all trials have failed.

        Raises:
            SweepFailedError: With the first error.

        """
        if self.failed and len(self.failed) == len(self.trials):
            reason = self.trials[min(self.failed)].reason
            raise SweepFailedError(f"all trials of sweep {self.sweep!r} failed; the first: {reason}{_remedy(reason)}")


def _remedy(reason: str | None) -> str:
    """Return how to start failed trials again: another start of the sweep without this raises the same error."""
    return _AFRESH if (reason or "").startswith(NO_METRIC) else _RESTARTED
