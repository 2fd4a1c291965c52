"""A crash or an error at every storage operation of a state's report and load; the next start finds the run whole."""

import contextlib

import pytest
import torch
from faulty_storage import Crash, FaultyStorage
from prefect_torch.ckpt import CheckpointCorruptError, CheckpointStore, CommitFailedError, StorageError
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.storage.local import LocalStorage
from prefect_torch.ckpt.storage.protocol import StorageSpec
from ranks import Attempt


def open_run(storage) -> CheckpointStore:
    return CheckpointStore(storage, Layout("run"), StorageSpec(storage.url))


def state_of(score, rank=0):
    return {"w": torch.full((700, 500), float(score)), "small": torch.tensor(score), "score": score, "rank": rank}


def report(store, scores, world_size=1, upload="async"):
    def train(session, rank):
        for score in scores:
            session.report({"score": score}, state=state_of(score, rank), upload=upload)

    return Attempt(store, world_size).run(train)


def scores_of(store, world_size=1):
    """Check that every checkpoint is whole and its own, and return their scores."""
    manifests = store.list()
    for manifest in manifests:
        store.verify(manifest)
        for rank in range(world_size):
            state = state_of(0, 9)
            store.checkpoint(manifest).load_state(state, rank=rank, world_size=world_size)
            expected = state_of(manifest.metrics["score"], rank if world_size > 1 else 0)
            assert (state["score"], state["rank"]) == (expected["score"], expected["rank"])
            assert torch.equal(state["w"], expected["w"])
            assert torch.equal(state["small"], expected["small"])
    return [manifest.metrics["score"] for manifest in manifests]


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_operation_of_a_report_leaves_the_old_or_the_new_state(tmp_path, after):
    fired = 0
    for number in range(1, 100):
        storage = LocalStorage(tmp_path / f"store-{number}")
        report(open_run(storage), [1])
        faulty = FaultyStorage(storage, number, after=after)
        with contextlib.suppress(Crash):
            session = Attempt(open_run(faulty)).session()
            session.report({"score": 2}, state=state_of(2), upload="sync")
        if not faulty.fired:
            break
        fired += faulty.fired
        store = open_run(storage)
        kept = scores_of(store)
        assert kept in ([1], [1, 2])
        assert report(store, [3]) == [None]
        assert scores_of(store) == [*kept, 3]
    assert fired > 10


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_an_error_at_any_operation_of_two_ranks_is_raised_on_both_and_loses_nothing(tmp_path, upload):
    fired = 0
    for number in range(1, 100):
        faulty = FaultyStorage(LocalStorage(tmp_path / f"{upload}-{number}"), error=StorageError("no answer"))
        store = open_run(faulty)
        attempt = Attempt(store, 2)
        faulty.crash_at = len(faulty.operations) + number

        def train(session, rank):
            for score in (1, 2):
                session.report({"score": score}, state=state_of(score, rank), upload=upload)

        errors = attempt.run(train)
        faulty.crash_at = None
        if not faulty.fired:
            assert errors == [None, None]
            break
        fired += 1
        assert all(isinstance(error, CommitFailedError) for error in errors), errors
        kept = scores_of(store, 2)
        assert kept in ([], [1], [2])
        assert report(store, [3], world_size=2) == [None, None]
        assert scores_of(store, 2) == [*kept, 3]
    assert fired >= 14


def test_an_error_at_any_operation_of_a_load_is_raised_and_a_second_try_succeeds(tmp_path):
    storage = LocalStorage(tmp_path / "store")
    report(open_run(storage), [1])
    for number in range(1, 100):
        faulty = FaultyStorage(storage, number, error=StorageError("no answer"))
        checkpoint = open_run(faulty).checkpoint(open_run(storage).latest())
        state = state_of(0)
        try:
            checkpoint.load_state(state)
        except StorageError:
            checkpoint.load_state(state)
        assert torch.equal(state["w"], state_of(1)["w"])
        if not faulty.fired:
            break
    assert number > 3


def test_a_report_costs_two_files_a_rank_and_three_small_ones(tmp_path):
    faulty = FaultyStorage(LocalStorage(tmp_path / "store"))
    attempt = Attempt(open_run(faulty), 2)
    faulty.operations.clear()

    def train(session, rank):
        for score in range(10):
            session.report({"score": score}, state=state_of(score, rank))

    assert attempt.run(train) == [None, None]
    # each rank's tensors and values, the index and torch's metadata; the manifest; the fence
    assert faulty.counts() == {"put_buffers": 60, "put_bytes": 10, "list": 10}


def test_a_load_reads_neighbours_together_and_only_what_it_needs(tmp_path):
    storage = LocalStorage(tmp_path / "store")
    many = {
        "small": {str(number): torch.full((200, 100), float(number)) for number in range(40)},
        "large": torch.ones(3000, 1000),
    }
    Attempt(open_run(storage)).run(lambda session, _: session.report({}, state=many))
    faulty = FaultyStorage(storage)
    store = open_run(faulty)
    target = {"small": {str(number): torch.zeros(200, 100) for number in range(40)}}
    store.checkpoint(open_run(storage).latest()).load_state(target)
    assert all(torch.equal(target["small"][name], many["small"][name]) for name in many["small"])
    assert faulty.counts() == {"size": 1, "get_bytes": 1, "get_range": 1}


def test_a_file_that_ends_early_or_differs_is_corrupt_however_it_is_read(tmp_path):
    storage = LocalStorage(tmp_path / "store")
    report(open_run(storage), [1])
    store = open_run(storage)
    path = storage.local_path(store.layout.data(store.latest().id, "__0_0.distcp"))
    data = path.read_bytes()
    for damaged in (data[:-3000], bytes([*data[:9000], data[9000] ^ 1]) + data[9001:]):
        path.write_bytes(damaged)
        for target in (torch.zeros(700, 500), torch.zeros(500, 700).t()):
            with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp (ends|differs)"):
                store.checkpoint(store.latest()).load_state({"w": target})
