"""The flow runs of a deployment that an earlier start of a sweep has left for its trials."""

from collections.abc import Iterable

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows.sweeps.asked_decisions import are_questions_expected, expect_questions
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.trial_storage import unpin_source

from .trial_flow_runs import cancel_flow_runs


class LeftTrials:
    """The trials whose flow runs an earlier start of the sweep has left, until these are cancelled.

    Those that go on meanwhile ask the sweep, get no answer, and stop: else they would train without decisions.

    Args:
        sweep: The sweep.
        are_deployed: Whether the trials of this start are flow runs of a deployment, too, which ask the sweep.

    """

    def __init__(self, sweep: CheckpointStore, *, are_deployed: bool) -> None:
        self._sweep = sweep
        self._are_deployed = are_deployed
        self._left: list[TrialRecord] = []

    def cancel_former(self, trials: Iterable[TrialRecord]) -> None:
        """Cancel the flow runs of the former trials of a sweep that begins again, and remove their pins; see `cancel`."""
        self.cancel(trials, "the sweep begins again without its trials")
        for trial in trials:
            if trial.source is not None:
                unpin_source(self._sweep, trial.source, trial.run)

    def cancel(self, trials: Iterable[TrialRecord], reason: str) -> None:
        """Cancel the flow runs that were left for those of `trials` that run, queued ones, too; those that stay are kept."""
        if are_questions_expected(self._sweep):
            self._left += cancel_flow_runs([trial for trial in trials if trial.state == "running"], reason)

    def cancel_again(self) -> None:
        """Cancel the flow runs that could not be cancelled before; costs nothing if there are none."""
        if self._left:
            self._left = cancel_flow_runs(self._left, "the sweep goes on without it")
            self.record_expected_questions()

    def record_expected_questions(self) -> None:
        """Record in the storage whether any trial may ask the sweep."""
        expect_questions(self._sweep, are_expected=self._are_deployed or bool(self._left))
