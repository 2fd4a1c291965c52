"""Crash at every storage operation of everything that writes; the next start finds the run whole."""

import pytest
import torch
from crash_points import crash_points, open_run
from faulty_storage import FaultyStorage
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CommitFailedError, RetentionPolicy, StorageError
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.quarantine import quarantine, why_quarantined
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.retry import CredentialsExpiredError, RetryingStorage
from prunes import prune_as_leader
from ranks import Attempt, folder, read_files

POLICY = RetentionPolicy(2, "score")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path / "store")


class Files:
    """Each rank reports a file that tells its score."""

    LEAST_OPERATIONS = 8  # of two reports by two ranks

    def reported(self, tmp_path, score, rank):
        return {"checkpoint": folder(tmp_path / f"r{rank}", **{f"m{rank}": str(score)})}

    def check(self, checkpoint, score, world_size):
        assert read_files(checkpoint) == {f"m{rank}": str(score).encode() for rank in range(world_size)}


class State:
    """All ranks report tensors and values that tell the score, and a value of their own."""

    LEAST_OPERATIONS = 14

    def reported(self, tmp_path, score, rank):
        return {"state": self._state(score, rank)}

    def check(self, checkpoint, score, world_size):
        for rank in range(world_size):
            state, expected = self._state(0, 9), self._state(score, rank)
            checkpoint.load_state(state, rank=rank, world_size=world_size)
            assert (state["score"], state["rank"]) == (score, rank)
            assert all(torch.equal(state[name], expected[name]) for name in ("w", "small"))

    def _state(self, score, rank):
        return {"w": torch.full((700, 500), float(score)), "small": torch.tensor(score), "score": score, "rank": rank}


FILES = Files()
CONTENTS = pytest.mark.parametrize("content", [FILES, State()], ids=["files", "state"])
UPLOADS = pytest.mark.parametrize("upload", ["sync", "async"])


def report(store, tmp_path, scores, world_size=1, upload="sync", content=FILES):
    """Report a checkpoint per score and return the ranks' errors."""

    def train(session, rank):
        for score in scores:
            session.report({"score": score}, **content.reported(tmp_path, score, rank), upload=upload)

    return Attempt(store, world_size).run(train)


def check_whole(store, world_size=1, content=FILES):
    """Every listed checkpoint has all its bytes, and they are its own."""
    manifests = store.list()
    for manifest in manifests:
        store.verify(manifest)
        content.check(store.checkpoint(manifest), manifest.metrics["score"], world_size)
    return manifests


@CONTENTS
@UPLOADS
def test_a_crash_at_any_operation_of_a_report_leaves_the_old_or_the_new_checkpoint(tmp_path, upload, content):
    def prepare(number, after):
        storage = LocalStorage(tmp_path / f"store-{number}-{after}")
        report(open_run(storage), tmp_path, [1], content=content)
        return storage

    def run(faulty):
        store = open_run(faulty)
        session = Attempt(store).session()
        session.report({"score": 2}, **content.reported(tmp_path, 2, 0), upload=upload)
        session.finish()

    fired = 0
    for faulty in crash_points(prepare, run):
        fired += faulty.fired
        store = open_run(faulty.inner)
        before = [manifest.metrics["score"] for manifest in check_whole(store, content=content)]
        assert before in ([1], [1, 2])
        assert store.latest().metrics["score"] == before[-1]
        assert report(store, tmp_path, [3], content=content) == [None]  # the next attempt goes on
        assert [manifest.metrics["score"] for manifest in check_whole(store, content=content)] == [*before, 3]
        collect_garbage(store, grace_s=0, keep_quarantined_days=0)  # a torn manifest is set aside
        data = {info.key.split("/")[2] for info in faulty.inner.list("run/checkpoints/")}
        assert data == {manifest.id for manifest in check_whole(store, content=content)}
    assert fired > 10


@CONTENTS
@UPLOADS
def test_an_error_at_any_operation_of_two_ranks_is_raised_on_both_and_loses_nothing(tmp_path, upload, content):
    fired = 0
    for number in range(1, 100):
        faulty = FaultyStorage(LocalStorage(tmp_path / f"{upload}-{number}"), error=StorageError("no answer"))
        store = open_run(faulty)
        attempt = Attempt(store, 2)
        faulty.crash_at = len(faulty.operations) + number

        def train(session, rank):
            for score in (1, 2):
                session.report({"score": score}, **content.reported(tmp_path, score, rank), upload=upload)

        errors = attempt.run(train)
        faulty.crash_at = None
        if not faulty.fired:
            assert errors == [None, None]
            break
        fired += 1
        assert all(isinstance(error, CommitFailedError) for error in errors), errors
        kept = [manifest.metrics["score"] for manifest in check_whole(store, 2, content)]
        assert kept in ([], [1], [2])
        assert report(store, tmp_path, [3], 2, content=content) == [None, None]
        assert [manifest.metrics["score"] for manifest in check_whole(store, 2, content)] == [*kept, 3]
    assert fired >= content.LEAST_OPERATIONS


PASSING = [StorageError("503 SlowDown"), CredentialsExpiredError("ExpiredToken")]  # one of each class that is retried


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_a_fault_that_passes_at_any_operation_is_not_noticed(tmp_path, error, after):
    """Of two ranks that report twice, prune and collect garbage; also when the answer is lost after success."""
    fired = 0
    for number in range(1, 100):
        faulty = FaultyStorage(MemoryStorage(), number, after=after, error=error)
        store = open_run(RetryingStorage(lambda faulty=faulty: faulty, RetryPolicy(60, 0, 0)))
        assert report(store, tmp_path, [1, 2, 3], world_size=2) == [None, None]
        prune_as_leader(store, POLICY)
        collect_garbage(store)
        assert [manifest.metrics["score"] for manifest in check_whole(store, 2)] == [2, 3]
        fired += faulty.fired
        if not faulty.fired:
            break
    assert fired > 30


def test_a_crash_at_any_operation_of_a_prune_keeps_every_good_checkpoint(tmp_path):
    scores = [5, 1, 4, 2, 3]

    def prepare(number, after):
        storage = LocalStorage(tmp_path / f"store-{number}-{after}")
        report(open_run(storage), tmp_path, scores)
        return storage

    fired = 0
    for faulty in crash_points(prepare, lambda faulty: prune_as_leader(open_run(faulty), POLICY)):
        fired += faulty.fired
        store = open_run(faulty.inner)
        left = {manifest.metrics["score"] for manifest in check_whole(store)}
        assert {5, 4, 3} <= left
        prune_as_leader(store, POLICY)
        collect_garbage(store, grace_s=0)
        assert {manifest.metrics["score"] for manifest in check_whole(store)} == {5, 4, 3}
        data = {info.key.split("/")[2] for info in faulty.inner.list("run/checkpoints/")}
        assert data == {manifest.id for manifest in store.list()}
    assert fired > 10


def test_a_crash_at_any_operation_of_a_resume_with_a_damaged_newest_still_resumes_from_the_one_before(tmp_path):
    """And the damaged one can be restored once its bytes are back."""
    damaged = {}

    def prepare(number, after):
        storage = LocalStorage(tmp_path / f"store-{number}-{after}")
        store = open_run(storage)
        report(store, tmp_path, [1, 2])
        newest = store.list()[-1]
        path = storage.local_path(store.layout.data(newest.id, "m0"))
        path.write_bytes(b"X")
        damaged[storage] = (newest.id, path)
        return storage

    fired = 0
    for faulty in crash_points(prepare, lambda faulty: choose_checkpoint(open_run(faulty), lineage=1, verify="digest")):
        fired += faulty.fired
        store = open_run(faulty.inner)
        chosen = choose_checkpoint(store, lineage=1, verify="digest")
        assert chosen.metrics["score"] == 1
        newest, path = damaged[faulty.inner]
        path.write_bytes(b"2")
        assert store.restore(newest).metrics["score"] == 2
        assert [manifest.metrics["score"] for manifest in check_whole(store)] == [1, 2]
    assert fired > 5


def test_a_crash_at_any_operation_of_garbage_collection_leaves_committed_data_alone(tmp_path):
    def prepare(number, after):
        storage = LocalStorage(tmp_path / f"store-{number}-{after}")
        store = open_run(storage)
        report(store, tmp_path, [1, 2, 3])
        storage.delete([store.layout.manifest(store.list()[0].id)])  # its data is garbage now
        return storage

    fired = 0
    for faulty in crash_points(prepare, lambda faulty: collect_garbage(open_run(faulty), grace_s=0)):
        fired += faulty.fired
        store = open_run(faulty.inner)
        assert [manifest.metrics["score"] for manifest in check_whole(store)] == [2, 3]
        collect_garbage(store, grace_s=0)
        assert len({info.key.split("/")[2] for info in faulty.inner.list("run/checkpoints/")}) == 2
    assert fired > 3


def test_a_report_costs_its_files_and_one_manifest_and_lists_only_newer_attempts(storage, tmp_path):
    faulty = FaultyStorage(storage)
    attempt = Attempt(open_run(faulty), 2)
    faulty.operations.clear()

    def train(session, rank):
        for score in range(10):
            session.report({"score": score}, folder(tmp_path / f"r{rank}", **{f"m{rank}": "x"}))

    assert attempt.run(train) == [None, None]
    assert faulty.counts() == {"put_file": 20, "put_bytes": 10, "list": 10}
    assert {key for verb, key in faulty.operations if verb == "list"} == {"run/attempts/"}


def test_finding_the_latest_costs_three_requests_with_any_number_of_checkpoints(storage, tmp_path):
    store = open_run(storage)
    report(store, tmp_path, range(30))
    store.hint_latest(store.list()[-2].id)
    faulty = FaultyStorage(storage)
    assert open_run(faulty).latest().metrics["score"] == 29
    assert len(faulty.operations) <= 3


def set_aside(storage):
    """Leave a run whose newest checkpoint is in quarantine, though it is whole."""
    store = open_run(storage)
    newest = store.list()[-1]
    quarantine(store, newest.id, "a connection flipped a bit, twice")
    return newest


def test_a_crash_at_any_operation_of_a_restore_leaves_the_checkpoint_in_quarantine_or_brings_it_back(tmp_path):
    def prepare(number, after):
        storage = LocalStorage(tmp_path / f"store-{number}-{after}")
        report(open_run(storage), tmp_path, [1, 2])
        set_aside(storage)
        return storage

    def run(faulty):
        store = open_run(faulty)
        store.restore(next(iter(why_quarantined(store))))

    fired = 0
    for faulty in crash_points(prepare, run):
        fired += faulty.fired
        store = open_run(faulty.inner)
        choose_checkpoint(store, lineage=1, verify="digest")  # sets a torn manifest aside once more
        for waiting in why_quarantined(store):
            store.restore(waiting)
        assert [manifest.metrics["score"] for manifest in check_whole(store)] == [1, 2]
        assert why_quarantined(store) == {}
    assert fired > 10
