from dataclasses import replace

import pytest
from owners import HERE, OWNERS
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.attempts.status import read_status


def test_a_run_without_an_attempt_has_no_status(store):
    assert read_status(store) is None


@pytest.mark.parametrize("state", OWNERS)
def test_without_an_outcome_the_process_decides(store, state):
    claim_attempt(store, OWNERS[state], world_size=1)
    status = read_status(store)
    assert (status.state, status.may_be_alive, status.is_completed) == (state, state != "lost", False)
    assert status.is_process_gone is {"running": False, "lost": True, "unknown": None}[state]


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("ending", ["completed", "failed", "preempted", "cancelled"])
def test_an_outcome_decides_wherever_the_process_is(store, owner, ending):
    claim_attempt(store, owner, world_size=1)
    write_outcome(store, Outcome(1, ending))
    status = read_status(store)
    assert (status.state, status.may_be_alive, status.is_completed) == (ending, False, ending == "completed")


def test_a_process_that_ends_after_its_outcome_was_stored_is_not_lost(store, monkeypatch):
    claimed = claim_attempt(store, HERE, world_size=1)

    def ends(_):
        write_outcome(store, Outcome(claimed.number, "completed"))
        return True

    before = read_status(store)
    monkeypatch.setattr(Owner, "is_process_gone", ends)
    assert read_status(store).state == "completed"
    assert before.state == "running"


def test_an_overtaken_attempt_is_lost_also_while_its_process_lives_unless_it_had_an_outcome(store):
    claim_attempt(store, HERE, world_size=1)
    status = replace(read_status(store), is_overtaken=True)
    assert (status.state, status.may_be_alive) == ("lost", False)
    assert replace(status, outcome=Outcome(1, "failed")).state == "failed"


def test_the_newest_attempt_counts(store):
    claim_attempt(store, HERE, world_size=1)
    write_outcome(store, Outcome(1, "completed"))
    claim_attempt(store, HERE, world_size=1)
    assert (read_status(store).attempt.number, read_status(store).state) == (2, "running")
