"""What operations cost with many checkpoints and many ranks, in requests as an object store counts them."""

import _thread
import pickle
import threading
import time
from dataclasses import replace

import pytest
from commits import DIGEST, commit
from counting_storage import CountingStorage
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy, StorageError, TrainContext
from prefect_torch.ckpt.checkpoint_store import list_runs
from prefect_torch.ckpt.errors import PeerGoneError
from prefect_torch.ckpt.reporting import agreement
from prefect_torch.ckpt.reporting.agreement import Intent
from prefect_torch.ckpt.reporting.exchange.exits import RankExit, announce_exit, has_failure, read_exits
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from prefect_torch.ckpt.reporting.rank_part import RankPart
from prefect_torch.ckpt.runs.attempts.attempt import newest_attempt
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord, lost_records, read_history
from prefect_torch.ckpt.runs.manifest import FileEntry, ManifestMemory
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.storage import parallel
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.deployments.command_line.runs.run_summaries import summarize_runs
from prunes import prune_as_leader
from ranks import Session, folder
from storage_contract import StorageContract
from waiting_storage import WaitingStorage


class TestMemory(StorageContract):
    """The storage that the figures below are of."""

    @pytest.fixture
    def storage(self):
        return MemoryStorage()

    @pytest.fixture
    def raw_keys(self, storage):
        return lambda: set(storage._keys)


@pytest.fixture(params=[10, 1000])
def many(request):
    """A run with many checkpoints, whose requests are counted from now on."""
    counting = CountingStorage(MemoryStorage())
    store = CheckpointStore.open(counting, "run")
    claim_attempt(store, Owner.current(), world_size=1)
    manifests = [commit(store, step, loss=1 / (step + 1)) for step in range(request.param)]
    store.hint_latest(manifests[-2].id)
    history = HistoryWriter(store, attempt=1)
    for it in manifests:
        history.append(MetricRecord(1, it.step, it.metrics, it.id, "2026-11-21T00:00:00+00:00"))
    history.flush()
    counting.taken()
    return store, manifests, counting


def test_the_latest_costs_three_requests_at_any_count_and_a_resume_a_listing_more(many):
    store, manifests, counting = many
    assert store.latest() == manifests[-1]
    assert counting.taken() == {"get_bytes": 2, "list": 1}
    assert choose_checkpoint(store, lineage=1, verify="none") == manifests[-1]
    assert counting.taken() == {"get_bytes": 2, "list": 1, "folders": 1}  # of a bucket, those behind the newest alone


@pytest.mark.parametrize("hint", [b"", b'{"id": "999999-99999999-ffffffff"}', b'{"id": "000000-00000000-00000000"}'])
def test_newest_first_is_right_whatever_the_hint_says(many, hint):
    store, manifests, _ = many
    store.storage.put_bytes(store.layout.latest, hint)
    assert [it.id for it in store.newest_first()] == [it.id for it in reversed(manifests)]


def test_older_checkpoints_come_after_a_hint_whose_own_is_gone(many):
    store, manifests, _ = many
    store.storage.delete([store.layout.manifest(it.id) for it in manifests[-3:]])
    assert store.latest() == manifests[-4]
    assert choose_checkpoint(store, lineage=1, verify="none") == manifests[-4]


def test_a_prune_after_a_commit_reads_only_what_is_new(many):
    store, manifests, counting = many
    policy = RetentionPolicy(1, "loss", "min", keep_every_n_steps=2)
    training = replace(store, memory=ManifestMemory())
    assert len(prune_as_leader(training, policy).drop) == len(manifests) // 2 - 1  # of the odd ones, the newest is the best
    counting.taken()
    newest = commit(store, 5000, loss=-1)
    counting.taken()
    decided = prune_as_leader(training, policy)
    assert decided.keep[newest.id] == ("latest", "best", "every")
    assert decided.drop == (manifests[-1],)
    # A listing of pins before the mark, which is empty, so that another request confirms it, and one after it. The mark is put,
    # and an object by which the second listing of pins shows that it is one; both are removed with one request.
    assert counting.taken() == {"list": 4, "get_bytes": 1, "put_bytes": 2, "delete": 3}


def test_a_manifest_that_is_remembered_exists_only_while_it_is_listed(many):
    store, manifests, _ = many
    training = replace(store, memory=ManifestMemory())
    assert training.list() == manifests
    prune_as_leader(store, RetentionPolicy(3))
    assert training.list() == manifests[-3:]
    prune_as_leader(training, RetentionPolicy(3))
    assert [training.memory.recall(it.id) is not None for it in manifests[-4:]] == [False, True, True, True]


def test_a_memory_travels_empty_and_ends_somewhere(many, monkeypatch):
    _, manifests, _ = many
    monkeypatch.setattr("prefect_torch.ckpt.runs.manifest._MOST_FILES", 8)
    memory = ManifestMemory()
    for manifest in manifests:
        memory.remember(manifest)
    assert sum(memory.recall(it.id) is not None for it in manifests) == 4  # each counts as one more than its files
    memory.forget_all_but([])
    memory.remember(manifests[-1])
    assert memory.recall(manifests[-1].id) == manifests[-1]
    assert pickle.loads(pickle.dumps(memory)).recall(manifests[-1].id) is None


def test_the_start_of_an_attempt_reads_no_manifest_whose_report_is_recorded(many):
    store, manifests, counting = many
    assert lost_records(store, list(store.listed()), attempt=2) == []
    assert counting.taken()["get_bytes"] == 1  # the newest record
    late = commit(store, 5000, loss=3)
    listed = list(store.listed())
    counting.taken()
    assert [record.checkpoint for record in lost_records(store, listed, attempt=2)] == [late.id]
    assert counting.taken()["get_bytes"] == 2
    assert [record.checkpoint for record in read_history(store)] == [*(it.id for it in manifests), late.id]
    assert counting.taken()["get_bytes"] == 2  # a chunk, and the late one's manifest


def test_the_start_of_an_attempt_lists_the_metric_history_once_after_many_attempts():
    counting = CountingStorage(MemoryStorage())
    store = CheckpointStore.open(counting, "run")
    for attempt in range(1, 31):
        manifest = commit(store, attempt, attempt=attempt)
        if attempt != 10:  # whose leader was killed
            history = HistoryWriter(store, attempt)
            history.append(MetricRecord(attempt, attempt, {}, manifest.id, "2026-11-21T00:00:00+00:00"))
            history.close()
    listed = store.listed()[4:]
    counting.taken()
    assert [record.attempt for record in lost_records(store, listed, attempt=30)] == [10]
    assert counting.taken() == {"list": 1, "get_bytes": 25}  # the chunks of 24 attempts, and the manifest


def test_the_newest_attempt_costs_one_read_and_a_torn_claim_is_passed_over():
    counting = CountingStorage(MemoryStorage())
    store = CheckpointStore.open(counting, "run")
    attempts = [claim_attempt(store, Owner.current(), world_size=1) for _ in range(12)]
    counting.taken()
    assert newest_attempt(store) == attempts[-1]
    assert counting.taken() == {"list": 1, "get_bytes": 1}
    store.storage.put_bytes(store.layout.attempt(13, "00000000"), b"{")
    assert newest_attempt(store) == attempts[-1]


def play_other_ranks(key_value, world_size):
    """Tell what the other ranks tell in a report of a file each, and that they ended."""
    for rank in range(1, world_size):
        key_value.set(f"report 1/{rank}", Intent(rank, 0, "sync", [f"m{rank}"]).encode())
        part = RankPart([FileEntry(f"m{rank}", 4, DIGEST, rank)])
        key_value.set(f"report 1/files/{rank}", part.encode())
        announce_exit(key_value, RankExit(rank, 1, "returned"))


@pytest.mark.parametrize("world_size", [1, 1000])
def test_a_commit_costs_its_files_one_put_and_two_listings_at_any_number_of_ranks_and_checkpoints(
    many, tmp_path, world_size, monkeypatch
):
    store, _, counting = many
    monkeypatch.setattr(agreement, "new_id", lambda *_: "000001-00000000-0123abcd")
    for rank in range(1, world_size):
        store.storage.put_bytes(store.layout.data("000001-00000000-0123abcd", f"m{rank}"), b"data")
    key_value = MemoryKeyValue()
    play_other_ranks(key_value, world_size)
    session = Session(TrainContext(0, 0, 0, world_size, world_size, "run", 1), store, key_value)
    counting.taken()
    session.report({"loss": 0.0}, folder(tmp_path / "c", m0="data"), step=None)
    pages = 1 + world_size // 1000  # of the files
    assert counting.taken() == {"put_file": 1, "put_bytes": 1, "list": pages + 1, "size": 1}  # the fence, and the manifest
    session.finish()


def test_all_ranks_learn_how_all_ended_from_a_few_words():
    key_value = MemoryKeyValue()
    play_other_ranks(key_value, 100)
    peers = [Peers(key_value, rank, 100) for rank in (0, 1)]
    peers[0].leave(RankExit(0, 1, "returned"))
    announce_exit(key_value, RankExit(0, 7, "failed"))  # the first word counts
    assert peers[0].wait_for_all_exits() == [RankExit(0, 1, "returned")]
    assert peers[1].wait_for_all_exits() == [RankExit(0, 1, "returned")]
    assert len(key_value.get(["all left"], 1.0)[0]) < 200
    assert len(read_exits(key_value)) == 100
    assert not has_failure(key_value)


def test_a_rank_that_ends_after_another_number_of_reports_is_told_to_all():
    key_value = MemoryKeyValue()
    for rank, reports in enumerate([2, 2, 1]):
        announce_exit(key_value, RankExit(rank, reports, "returned"))
    told = [RankExit(0, 2, "returned"), RankExit(2, 1, "returned")]
    assert [Peers(key_value, rank, 3).wait_for_all_exits() for rank in range(3)] == [told] * 3


def test_a_failure_ends_the_wait_for_all_ends_on_every_rank():
    key_value = MemoryKeyValue()
    announce_exit(key_value, RankExit(1, 1, "returned"))
    announce_exit(key_value, RankExit(3, None, "died", "SIGKILL"))
    assert has_failure(key_value)
    known = [RankExit(1, 1, "returned"), RankExit(3, None, "died", "SIGKILL")]
    assert [Peers(key_value, rank, 4).wait_for_all_exits() for rank in (0, 1, 2)] == [known] * 3


def test_an_error_names_some_of_many_ranks_that_left():
    key_value = MemoryKeyValue()
    for rank in range(1, 50):
        announce_exit(key_value, RankExit(rank, 1, "died" if rank == 40 else "returned"))
    with pytest.raises(
        PeerGoneError, match=r"^rank 40 died .*; rank 7 returned after 1 report; and 41 more, so report 0 of rank 0"
    ):
        Peers(key_value, 0, 51).exchange("report 0", b"")


def test_a_run_is_not_searched_for_what_is_older_than_the_run_itself(many):
    store, _, counting = many
    assert collect_garbage(store) == []
    young = counting.taken()
    assert collect_garbage(store, grace_s=0) == []
    old = counting.taken()
    assert (young["remove_interrupted"], old["remove_interrupted"]) == (0, 1)
    assert young["list"] < old["list"]


def test_many_reads_are_under_way_at_once_and_their_order_stays():
    barrier = threading.Barrier(32)
    assert read_all(range(64), lambda number: (barrier.wait(30), number)[1]) == list(range(64))


def test_a_few_reads_are_under_way_at_once_after_one_that_takes_long():
    barrier = threading.Barrier(7)

    def read(number):
        if number == 0:
            time.sleep(0.01)
        else:
            barrier.wait(30)
        return number, threading.current_thread()

    numbers, threads = zip(*read_all(range(8), read), strict=True)
    assert numbers == tuple(range(8))
    assert len(set(threads)) == 8


def test_a_few_quick_reads_start_no_thread(monkeypatch):
    monkeypatch.setattr(parallel, "_QUICK_S", 30)  # on a loaded machine, any of them may take a millisecond
    assert set(read_all(range(8), lambda _: threading.current_thread())) == {threading.current_thread()}


def test_a_few_reads_within_one_of_many_start_no_threads():
    def read_three(_):
        return {threading.current_thread(), *read_all(range(3), lambda _: (time.sleep(0.002), threading.current_thread())[1])}

    assert [len(threads) for threads in read_all(range(9), read_three)] == [1] * 9


def test_the_runs_of_a_storage_are_found_and_summarized_at_the_same_time():
    inner = MemoryStorage()
    names = [f"run-{number:02}" for number in range(20)]
    for number, name in enumerate(names):
        store = CheckpointStore.open(inner, name)
        claim_attempt(store, Owner.current(), world_size=1)
        for step in range(number % 3):
            commit(store, step)
    inner.put_bytes("no-run/data", b"")
    awaited = ("run.json", "", "attempts")
    storage = WaitingStorage(inner, *awaited)
    assert list(list_runs(storage)) == names
    assert [(it.name, it.checkpoints) for it in summarize_runs(storage)] == [(it, n % 3) for n, it in enumerate(names)]
    assert min(storage.most[folder] for folder in awaited) >= 4


def test_the_first_error_ends_many_reads():
    read = []

    def fail(number):
        read.append(number)
        raise StorageError(f"of {number}")

    with pytest.raises(StorageError, match="of 0"):
        read_all(range(10_000), fail)
    assert len(read) <= 32


def test_whoever_is_interrupted_does_not_wait_for_many_reads():
    read, pause = [], threading.Event()

    def read_slowly(number):
        read.append(number)
        pause.wait(0.001)
        if number == 0:
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        read_all(range(100_000), read_slowly)
    assert len(read) < 50_000
