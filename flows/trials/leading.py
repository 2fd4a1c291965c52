"""The loop of a sweep: it starts trials, records their ends, and deletes checkpoints that better trials displace."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from prefect_torch.flows.sweeps.trial_storage import delete_all, end_of, undecided, unpin_source
from prefect_torch.flows.sweeps.unused_criteria import UnusedCriteria
from prefect_torch.tasks.gang.termination import Termination
from prefect_torch.tasks.run_logs import get_run_logger

from .trial_runs import TrialRuns

_POLL_S = 0.5
_CHECK_S = 30.0


def lead_trials(
    search: Search,
    trials: TrialRuns,
    sweep: CheckpointStore,
    termination: Termination,
    check_lead: Callable[[], None] = lambda: None,
) -> None:
    """Run trials until the search has no more, beginning with those that ran when the sweep's process was killed.

    Args:
        search: The search.
        trials: Its trials.
        sweep: The sweep.
        termination: Whether the flow run is being terminated.
        check_lead: Raises FencedError if another process leads the sweep by now; called before a trial starts, and every half
            minute.

    Raises:
        FencedError: If another process leads the sweep by now.
        SweepFailedError: If too many trials, or all, have failed.
        TerminatedError: If the flow run was terminated; the trials have stopped.

    """
    waiting, has_news, unused = _recovered(search, sweep), True, UnusedCriteria(search.search_config)
    check_now_and_then = _now_and_then(check_lead)
    try:
        while True:
            termination.raise_if_requested()
            search.raise_if_failed()
            search.record_time()
            while trials.num_running() < search.search_config.max_concurrent:
                trial = waiting.pop(0) if waiting else search.next_trial()
                if trial is None:
                    break
                check_lead()
                trials.start(trial)
            if has_news:
                _delete_excess(search, trials, sweep)
            if not trials.num_running():
                break
            ended = trials.take_ended(_POLL_S)
            check_now_and_then()
            if ended:  # a trial that goes on is started again without an entry in the journal
                check_lead()
            for number, end in ended.items():
                _record_end(search, trials, sweep, number, end, termination)
                _warn(unused.warnings(search.trials[number], search.first_decision(number), sweep))
            _warn(unused.warnings_while_running(search.running, sweep))
            has_news = bool(ended)
    except Exception as exc:
        trials.terminate(termination.cause or exc)
        while trials.num_running():
            trials.take_ended(_POLL_S)
        trials.close()
        raise
    trials.close()
    _log_used_budget(search)
    search.raise_if_all_failed()


def _now_and_then(check_lead: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls another one every half minute; running trials outlast an outage of the storage."""
    checked_s = time.monotonic()

    def check() -> None:
        nonlocal checked_s
        if time.monotonic() >= checked_s + _CHECK_S:
            checked_s = time.monotonic()
            with suppress(StorageError, OSError):
                check_lead()

    return check


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        get_run_logger().warning("%s", line)


def _log_used_budget(search: Search) -> None:
    if search.budget.is_used_up:
        get_run_logger().info(
            "%d of %d trials were started in the time budget of %g s; with a higher one, the sweep goes on",
            len(search.trials),
            search.num_trials,
            search.search_config.time_budget_s,
        )


def _recovered(search: Search, sweep: CheckpointStore) -> list[TrialRecord]:
    """Return the trials that ran when the sweep's process was killed, and must continue.

    The end of those that completed is recorded. The others' committed reports at which the process waited for a decision, and
    none was recorded, are decided on first. Only trials that continue after that have the sweep's present config.
    """
    for trial in search.running():
        run = sweep.beside(trial.run)
        status = read_status(run)
        end = None if status is None or status.outcome is None else end_of(run, status.outcome)
        if end is not None and end.outcome == "completed":
            search.end(trial.number, end)
            continue
        points = search.points(trial.number, lambda: 0)
        # A scheduler that this start brings decides at the next report: the earlier ones waited for no decision of it.
        waited = None if points is None else replace(points, milestone=trial.milestone)
        for request in undecided(run, trial, waited):
            search.decide(trial.number, request)
            if search.trials[trial.number] is not trial:  # a decision was recorded
                break
    search.use_config()
    _unpin(search, sweep)  # a kill may have come between the last end and this
    return search.running()


def _record_end(
    search: Search, trials: TrialRuns, sweep: CheckpointStore, number: int, end: TrialEnd | None, termination: Termination
) -> None:
    trial = search.trials[number]
    if end is None and trial.state == "running":  # interrupted, unless by this process's own termination: it goes on
        if termination.cause is None:
            trials.start(trial)
        return
    if end is not None and trial.state == "running":
        search.end(number, end)
    _unpin(search, sweep)


def _unpin(search: Search, sweep: CheckpointStore) -> None:
    for source, clone in search.recorded.take_released():
        unpin_source(sweep, source, clone)


def _delete_excess(search: Search, trials: TrialRuns, sweep: CheckpointStore) -> None:
    """Delete the checkpoints of trials that are not among the best; failed deletions are tried again after the next trial."""
    busy = trials.running_runs()  # also of trials that have been stopped, and whose ranks are about to end
    for number, run in search.take_excess(is_over=not trials.num_running()):
        if run in busy:
            continue
        try:
            staying = delete_all(sweep.beside(run))
        except (StorageError, OSError) as exc:
            get_run_logger().warning("the checkpoints of trial %d could not be deleted yet: %s", number, exc)
            continue
        if not staying:
            search.record_deleted(number, run)
