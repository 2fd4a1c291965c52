"""What the prune task asks before it deletes; that prunes prune is shown with a real server in tests/flows."""

import os

import pytest
from prefect.logging import disable_run_logger
from prefect_torch.ckpt import CheckpointStore, FencedError, RetentionPolicy, StorageError
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion import marks, pruning
from prefect_torch.ckpt.runs.deletion.limits import PruneLimits
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.tasks.prune_task import REFUSED, prune_checkpoints
from ranks import Attempt, folder


def prune(store, claim, num_to_keep=1):
    limits = None if claim is None else PruneLimits(claim=claim)
    with disable_run_logger():
        return prune_checkpoints.fn(store.spec, "run", RetentionPolicy(num_to_keep), limits)


def test_an_overtaken_attempt_deletes_nothing(tmp_path):
    store = CheckpointStore.open(tmp_path / "store", "run")
    first = Attempt(store)
    session = first.session()
    for _ in range(3):
        session.report({}, folder(tmp_path / "c", model="x"))
    second = Attempt(store)
    for num_to_keep in (1, 9):  # it collects no garbage either
        with pytest.raises(FencedError, match="attempt 1 of run 'run' was overtaken by attempt 2"):
            prune(store, first.claim, num_to_keep)
    assert len(store.list()) == 3
    prune(store, second.claim)
    assert len(store.list()) == 1


def test_what_a_caller_keeps_is_kept_beside_what_a_running_attempt_needs(tmp_path):
    store = CheckpointStore.open(tmp_path / "store", "run")
    session = Attempt(store).session()
    for _ in range(3):
        session.report({}, folder(tmp_path / "c", model="x"))
    claim_attempt(store, Owner.current(), world_size=1)  # which has yet to store the reports of the first in the history
    oldest = store.list()[0].id
    with disable_run_logger():
        decided = prune_checkpoints.fn(store.spec, "run", RetentionPolicy(1), PruneLimits(in_use=(oldest,)), dry_run=True)
    assert decided.drop == ()


def test_a_dry_run_deletes_no_garbage_either(tmp_path):
    store = CheckpointStore.open(tmp_path / "store", "run")
    Attempt(store).session().report({}, folder(tmp_path / "c", model="x"), step=1)  # an earlier step of it is garbage at once
    half = store.layout.data("000001-00000000-00000000", "model")
    store.storage.put_bytes(half, b"half")
    with disable_run_logger():
        prune_checkpoints.fn(store.spec, "run", RetentionPolicy(1), dry_run=True)
        assert store.storage.get_bytes(half) == b"half"
        prune_checkpoints.fn(store.spec, "run", RetentionPolicy(1))
    assert find_size(store.storage, half) is None


def test_an_attempt_that_is_overtaken_during_a_prune_deletes_no_more(tmp_path, monkeypatch):
    store = CheckpointStore.open(tmp_path / "store", "run")
    first = Attempt(store)
    session = first.session()
    for _ in range(4):
        session.report({}, folder(tmp_path / "c", model="x"))
    oldest, delete = store.list()[0], type(store.storage).delete

    def overtaken(self, keys):
        keys = list(keys)
        delete(self, keys)
        if keys == [store.layout.manifest(oldest.id)]:
            claim_attempt(store, Owner.current(), world_size=1)

    monkeypatch.setattr(pruning, "_AT_ONCE", 1)
    monkeypatch.setattr(marks, "_RENEW_S", -1.0)  # as if each deletion took minutes
    monkeypatch.setattr(type(store.storage), "delete", overtaken)
    with pytest.raises(FencedError, match="overtaken by attempt 2"):
        prune(store, first.claim)
    assert len(store.list()) == 3
    assert list(store.storage.list(store.layout.deletions)) == []


def test_an_attempt_whose_run_was_deleted_and_begun_again_prunes_nothing(tmp_path):
    store = CheckpointStore.open(tmp_path / "store", "run")
    deleted = Attempt(store)
    store.storage.delete(store.keys("run/"))
    begun = Attempt(store)
    for _ in range(2):
        begun.session().report({}, folder(tmp_path / "c", model="x"))
    with pytest.raises(FencedError, match="the claim of attempt 1 on run 'run' is gone"):
        prune(store, deleted.claim)
    assert len(store.list()) == 2


def test_where_nothing_may_be_deleted_the_prune_of_a_training_keeps_all_and_completes(tmp_path, monkeypatch):
    store = CheckpointStore.open(tmp_path / "store", "run")
    attempt = Attempt(store)
    session = attempt.session()
    for _ in range(3):
        session.report({}, folder(tmp_path / "c", model="x"))

    def refused(self, keys):
        raise PermissionError("WORM protected")

    monkeypatch.setattr(type(store.storage), "delete", refused)
    decided = prune(store, attempt.claim)
    assert (list(decided.keep.values()), decided.drop) == ([("latest", "last"), (REFUSED,), (REFUSED,)], ())
    write_outcome(store, Outcome(attempt.number, "completed"))
    with pytest.raises(StorageError, match=r"2 of 2 checkpoints of run 'run' could not be deleted.*WORM protected$"):
        prune(store, None)
    assert len(store.list()) == 3


def test_a_training_that_keeps_all_deletes_what_a_killed_attempt_has_left(tmp_path):
    store = CheckpointStore.open(tmp_path / "store", "run")
    for _ in range(2):
        attempt = Attempt(store)
        attempt.session().report({}, folder(tmp_path / "c", model="x"))
    first, second = store.list()
    store.pin(first.id)
    half = "000001-00000005-00000000"
    store.storage.put_bytes(store.layout.data(half, "model"), b"half")
    prune(store, attempt.claim, None)
    assert sorted(store.storage.folders(store.layout.checkpoints)) == [first.id, half, second.id]
    os.utime(store.storage.local_path(store.layout.data(half, "model")), (0, 0))
    decided = prune(store, attempt.claim, None)
    assert (decided.keep, decided.drop) == ({first.id: ("pinned",)}, ())
    assert sorted(store.storage.folders(store.layout.checkpoints)) == [first.id, second.id]
