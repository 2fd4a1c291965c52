"""Leads a claimed sweep from what earlier starts have left to the end of its last trial."""

from collections.abc import Iterable

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.claims import ClaimRenewal, check_fence
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.trial_storage import remove_lost_pin
from prefect_torch.tasks.gang.termination import Termination
from prefect_torch.tasks.run_logs import get_run_logger

from .leading import lead_trials
from .left_trials import LeftTrials
from .trial_runs import TrialRuns


class SweepLeader:
    """Leads one start of a sweep; every step ends with FencedError once another flow run has claimed the sweep.

    Args:
        sweep: The sweep.
        claim: The key of this process's claim on it.
        search: Its search, with the trials so far.
        are_deployed: Whether its trials are flow runs of a deployment.

    """

    def __init__(self, sweep: CheckpointStore, claim: str, search: Search, *, are_deployed: bool) -> None:
        self._sweep = sweep
        self._claim = claim
        self._search = search
        self._are_deployed = are_deployed
        self._before = dict(search.trials)
        self._renewal = ClaimRenewal(sweep, claim)
        self._left = LeftTrials(sweep, are_deployed=are_deployed)

    def check(self) -> None:
        """Raise FencedError if another process leads the sweep by now."""
        check_fence(self._sweep, self._claim)

    def take_over(self, former: Iterable[TrialRecord]) -> None:
        """Release what earlier starts have left: pins, and flow runs of trials that this start does not continue.

        Args:
            former: The trials of a sweep that begins again without them.

        """
        self.check()  # the journal may have been read for minutes, and another flow run leads the sweep by now
        remove_lost_pin(self._sweep, self._before.values())
        self._left.cancel_former(former)
        if not self._are_deployed:
            self._left.cancel(self._before.values(), "the sweep goes on with its trials in its own process")
        self.check()  # so may have been each request to Prefect
        self._left.record_expected_questions()

    def lead(self, trials: TrialRuns, termination: Termination) -> None:
        """Run the trials until the search has no more; see the errors of `lead_trials`."""
        lead_trials(self._search, trials, self._sweep, termination, self._keep_lead)

    def close(self) -> None:
        """Cancel the flow runs that could not be cancelled before, and warn if no trial ran."""
        self._left.cancel_again()
        if self._before and self._search.trials == self._before:
            get_run_logger().warning("%s", self._nothing_left())

    def _keep_lead(self) -> None:
        if self._renewal.is_due:  # also where trials run for weeks without an entry in the journal
            self._renewal.renew()
        self.check()
        self._left.cancel_again()

    def _nothing_left(self) -> str:
        """Return why no trial ran, and how to begin a new search, as Ray's Tuner does under a name that was used before."""
        budget, budget_s = self._search.budget, self._search.search_config.time_budget_s
        spent = f"the time budget of {budget_s:g} s is used up" if budget.is_used_up else "none was left"
        return (
            f"no trial ran: {spent}, so the result is the earlier one; another RunConfig.name begins a new sweep, and "
            "resume='never' begins this one again"
        )
