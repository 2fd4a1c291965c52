from dataclasses import replace

import pytest
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, record_resumed_from, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.attempts.standing import PruneLimits, prune_limits, read_standing

CHECKPOINT = "000001-00000002-08df6443"
HERE = Owner.current()
OWNERS = {"running": HERE, "lost": replace(HERE, started=0), "unknown": replace(HERE, host="elsewhere/boot")}


@pytest.fixture
def store(tmp_path):
    return CheckpointStore.open(tmp_path, "run")


def test_a_run_without_an_attempt_has_no_standing_and_no_limits(store):
    assert read_standing(store) is None
    assert prune_limits(store, None) == PruneLimits()


@pytest.mark.parametrize("state", OWNERS)
def test_without_an_outcome_the_process_decides(store, state):
    claim_attempt(store, OWNERS[state], world_size=1)
    standing = read_standing(store)
    assert (standing.state, standing.may_be_alive, standing.is_completed) == (state, state != "lost", False)
    assert standing.is_process_gone is {"running": False, "lost": True, "unknown": None}[state]


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("ending", ["completed", "failed", "preempted", "cancelled"])
def test_an_outcome_decides_wherever_the_process_is(store, owner, ending):
    claim_attempt(store, owner, world_size=1)
    write_outcome(store, Outcome(1, ending))
    standing = read_standing(store)
    assert (standing.state, standing.may_be_alive, standing.is_completed) == (ending, False, ending == "completed")


def test_the_newest_attempt_counts(store):
    claim_attempt(store, HERE, world_size=1)
    write_outcome(store, Outcome(1, "completed"))
    claim_attempt(store, HERE, world_size=1)
    assert (read_standing(store).attempt.number, read_standing(store).state) == (2, "running")


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_a_prune_is_limited_until_all_reports_are_stored_for_certain(store, owner):
    record_resumed_from(store, claim_attempt(store, owner, world_size=1), f"{store.path}/checkpoints/{CHECKPOINT}")
    assert prune_limits(store, read_standing(store)) == PruneLimits((CHECKPOINT,), up_to="")
    write_outcome(store, Outcome(1, "preempted"))  # the last ones may have failed to be stored
    assert prune_limits(store, read_standing(store)) == PruneLimits(up_to="")
    for ending in ("completed", "stopped"):
        write_outcome(store, Outcome(1, ending))
        assert prune_limits(store, read_standing(store)) == PruneLimits()


def test_a_prune_is_limited_where_a_newer_claim_cannot_be_read(store):
    claim_attempt(store, HERE, world_size=1)
    write_outcome(store, Outcome(1, "completed"))
    torn = claim_attempt(store, HERE, world_size=1)
    store.storage.put_bytes(store.layout.attempt(torn.number, torn.token), b"{")
    assert prune_limits(store, read_standing(store)) == PruneLimits(up_to="")
