"""What the loop of a sweep deletes of trials that better ones displace, and what it records as deleted."""

from types import SimpleNamespace

import pytest
from commits import commit
from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.flows.trials import leading

RUN = "sweep/trial-0000-0123abcd"


@pytest.fixture
def displaced(tmp_path):
    """A trial's run, with a checkpoint."""
    store = CheckpointStore.open(tmp_path, RUN)
    commit(store, 0)
    return store


def delete_displaced(store, busy=()):
    """Return what is recorded as deleted, with the number of checkpoints that are left then."""
    recorded = []
    search = SimpleNamespace(
        take_excess=lambda *, is_over: ((0, RUN),),
        record_deleted=lambda number, run: recorded.append((number, run, len(store.list()))),
    )
    trials = SimpleNamespace(running_runs=lambda: frozenset(busy), num_running=lambda: len(busy))
    leading._delete_excess(search, trials, store.beside("sweep"))
    return recorded


def test_the_checkpoints_of_a_trial_whose_ranks_are_about_to_end_stay_until_then(displaced):
    assert delete_displaced(displaced, busy=[RUN]) == []
    assert len(displaced.list()) == 1
    assert delete_displaced(displaced, busy=["sweep/trial-0001-0123abcd"]) == [(0, RUN, 0)]


def test_a_run_with_a_pinned_checkpoint_counts_as_deleted_once_that_is_gone_too(displaced):
    pinned = displaced.latest().id
    displaced.pin(pinned)
    commit(displaced, 1)
    assert delete_displaced(displaced) == []
    assert [*displaced.ids()] == [pinned]
    displaced.unpin(pinned)
    assert delete_displaced(displaced) == [(0, RUN, 0)]


def test_a_deletion_that_fails_is_recorded_once_another_has_succeeded(displaced, monkeypatch):
    def fail(_):
        raise StorageError("no answer")

    with monkeypatch.context() as away:
        away.setattr(leading, "delete_all", fail)
        assert delete_displaced(displaced) == []
    assert delete_displaced(displaced) == [(0, RUN, 0)]
