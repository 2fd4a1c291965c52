import pytest
from owners import HERE, OWNERS
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, record_resumed_from, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.deletion.limits import PruneLimits, prune_limits

CHECKPOINT = "000001-00000002-08df6443"


@pytest.fixture
def store(tmp_path):
    return CheckpointStore.open(tmp_path, "run")


def test_a_run_without_an_attempt_has_no_limits(store):
    assert prune_limits(store, None) == PruneLimits()


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_a_prune_is_limited_until_all_reports_are_stored_for_certain(store, owner):
    record_resumed_from(store, claim_attempt(store, owner, world_size=1), f"{store.path}/checkpoints/{CHECKPOINT}")
    assert prune_limits(store, read_status(store)) == PruneLimits((CHECKPOINT,), up_to="")
    write_outcome(store, Outcome(1, "preempted"))  # the last ones may have failed to be stored
    assert prune_limits(store, read_status(store)) == PruneLimits(up_to="")
    for ending in ("completed", "stopped"):
        write_outcome(store, Outcome(1, ending))
        assert prune_limits(store, read_status(store)) == PruneLimits()


def test_a_prune_is_limited_where_a_newer_claim_cannot_be_read(store):
    claim_attempt(store, HERE, world_size=1)
    write_outcome(store, Outcome(1, "completed"))
    torn = claim_attempt(store, HERE, world_size=1)
    store.storage.put_bytes(store.layout.attempt(torn.number, torn.token), b"{")
    assert prune_limits(store, read_status(store)) == PruneLimits(up_to="")
