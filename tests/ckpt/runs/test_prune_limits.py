import pytest
from commits import commit
from owners import HERE, OWNERS
from prefect_torch.ckpt import RetentionPolicy
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, record_resumed_from, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.deletion.limits import PruneLimits, prune_limits
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord

CHECKPOINT = "000001-00000002-08df6443"


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


def test_a_prune_is_limited_where_the_outcome_says_that_the_last_reports_are_not_stored(store):
    claim_attempt(store, HERE, world_size=1)
    write_outcome(store, Outcome(1, "completed", lacks_reports=True))
    assert prune_limits(store, read_status(store)) == PruneLimits(up_to="")


def test_a_prune_is_limited_where_a_newer_claim_cannot_be_read(store):
    claim_attempt(store, HERE, world_size=1)
    write_outcome(store, Outcome(1, "completed"))
    torn = claim_attempt(store, HERE, world_size=1)
    store.storage.put_bytes(store.layout.attempt(torn.number, torn.token), b"{")
    assert prune_limits(store, read_status(store)) == PruneLimits(up_to="")


def test_the_prune_of_a_store_keeps_what_the_newest_attempt_may_need(store):
    claim_attempt(store, HERE, world_size=1)
    manifests = [commit(store, step) for step in range(4)]
    attempt = claim_attempt(store, HERE, world_size=1)
    record_resumed_from(store, attempt, store.path_of(manifests[0].id))

    def dropped(**more):
        return [manifest.step for manifest in store.prune(RetentionPolicy(1), dry_run=True, **more).drop]

    assert store.prune(RetentionPolicy(1)).drop == ()
    writer = HistoryWriter(store, 1)
    writer.append(MetricRecord(1, 2, {}, manifests[2].id, "2026-11-21T00:00:00+00:00"))
    writer.flush()
    assert dropped() == dropped(up_to=manifests[3].id) == [1, 2]
    assert dropped(up_to=manifests[1].id) == dropped(in_use=(manifests[2].id,)) == [1]
    write_outcome(store, Outcome(attempt.number, "completed"))
    assert dropped() == [0, 1, 2]
