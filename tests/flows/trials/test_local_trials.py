"""The trials of a sweep in its process, and their decisions."""

import threading
from types import SimpleNamespace

import httpx
import pytest
from commits import commit
from prefect.exceptions import ObjectNotFound
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.reporting.decisions import Verdict
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows import FailureConfig
from prefect_torch.flows.sweeps.failures import SweepFailedError
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from prefect_torch.flows.trials import local_trials
from prefect_torch.flows.trials.local_trials import LocalTrials, _Running
from prefect_torch.flows.trials.trial_runs import TrialDecisions
from prefect_torch.tasks.gang.termination import CancelledInPrefect, TerminatedError, Termination


def ended(run, flow_run_id, ending):
    attempt = claim_attempt(run, Owner.current(flow_run_id), world_size=1)
    write_outcome(run, Outcome(attempt.number, ending, flow_run_id))


@pytest.mark.parametrize("before", ["stopped", "preempted", "completed"])
def test_a_start_that_has_not_trained_ends_with_its_own_error_and_not_as_the_one_before(tmp_path, before):
    run = Run.open(tmp_path, "sweep/trial-0000-0123abcd")
    ended(run, "before", before)
    commit(run, 1, loss=0.5)
    trials = LocalTrials(None, None, CheckpointStore.open(tmp_path, "sweep"))
    error = ValueError("working_dir='code': there is no directory code")
    start = _Running(TrialRecord(0, run.name, {}, 0), Termination(0.0), flow_run_id="now", error=error)
    assert trials._end_of(start) == TrialEnd(
        "failed", "ValueError: working_dir='code': there is no directory code", {"loss": 0.5}
    )


@pytest.mark.parametrize(
    "error", [ObjectNotFound(None), httpx.ConnectError("refused by a server that has given up"), KeyError("id")]
)
def test_a_trial_that_prefect_refuses_ends_the_sweep_and_goes_on_with_it(tmp_path, error):
    trials = LocalTrials(None, None, CheckpointStore.open(tmp_path, "sweep"))
    start = _Running(TrialRecord(3, "sweep/trial-0003-0123abcd", {}, 0), Termination(0.0), is_requested=True, error=error)
    with pytest.raises(SweepFailedError, match=r"trial 3 has no flow run.*goes on when it is started again"):
        trials._end_of(start)
    start.termination.request(error)  # as of the others, when the sweep ends
    assert trials._end_of(start) is None


def test_a_trial_that_waits_for_its_flow_run_while_the_sweep_is_cancelled_hides_no_other(tmp_path):
    trials = LocalTrials(None, None, CheckpointStore.open(tmp_path, "sweep"))
    waiting = _Running(TrialRecord(3, "sweep/trial-0003-0123abcd", {}, 0), Termination(0.0), is_requested=True)
    waiting.error = TerminatedError("terminated (CancelledInPrefect)")
    trials._running = {3: waiting}
    trials.terminate(CancelledInPrefect())
    waiting.has_ended.set()
    assert trials.take_ended(0) == {3: None}


def test_a_start_that_was_stopped_or_overtaken_ends_as_the_newest_attempt_does(tmp_path):
    run = Run.open(tmp_path, "sweep/trial-0000-0123abcd")
    trials = LocalTrials(None, None, CheckpointStore.open(tmp_path, "sweep"))
    start = _Running(TrialRecord(0, run.name, {}, 0), Termination(0.0), flow_run_id="now", error=ValueError("fenced"))
    ended(run, "now", "stopped")
    assert trials._end_of(start) is None, "the journal has the decision"
    ended(run, "another", "completed")
    assert trials._end_of(start) == TrialEnd("completed", has_reported=False)


def test_a_run_in_which_its_trial_does_not_go_on_ends_at_its_next_report():
    trial = TrialRecord(0, "sweep/new", {}, 0, earlier_runs=("sweep/old",))
    search = SimpleNamespace(trials={0: trial}, points=lambda *_: None, decide=lambda *_: Verdict(goes_on=True))
    old, new = (TrialDecisions(search, None, 0, run) for run in ("sweep/old", "sweep/new"))
    assert old.points().includes(0, 1, {}, has_checkpoint=False)
    assert not old.decide(None).goes_on
    assert new.points() is None
    assert new.decide(None).goes_on
    search.trials[0] = TrialRecord(0, "sweep/new", {}, 0, state="paused")
    assert not new.decide(None).goes_on


def test_a_trial_that_goes_on_begins_once_its_ranks_before_the_pause_have_ended(monkeypatch):
    begun, winding_down = [], threading.Event()

    def train(_, running):
        begun.append(running.trial.run)
        assert winding_down.wait(10)

    monkeypatch.setattr(LocalTrials, "_train", train)
    monkeypatch.setattr(LocalTrials, "_end_of", lambda *_: None)
    monkeypatch.setattr(local_trials, "SubflowClients", object)
    trials = LocalTrials(SimpleNamespace(failure=FailureConfig()), None, None)
    for run in ("sweep/old", "sweep/new"):
        trials.start(TrialRecord(0, run, {}, 0))
    assert trials.num_running() == 1
    assert trials.running_runs() == {"sweep/old", "sweep/new"}
    assert trials.take_ended(0.1) == {}
    assert "sweep/new" not in begun
    winding_down.set()
    assert trials.take_ended(10) == {0: None}
    assert begun == ["sweep/old", "sweep/new"]
