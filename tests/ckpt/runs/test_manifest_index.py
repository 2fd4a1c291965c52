"""The index of manifests makes many cheap to read; nothing that lies in it or is missing from it changes what is read."""

import json
import math
from dataclasses import replace

import pytest
from commits import commit
from counting_storage import CountingStorage
from crash_points import crash_points, open_run
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.index import segments as segments_module
from prefect_torch.ckpt.runs.index import writer as writer_module
from prefect_torch.ckpt.runs.index.reading import read_manifests
from prefect_torch.ckpt.runs.index.segments import FEW, list_segments, read_index, read_segment
from prefect_torch.ckpt.runs.index.writer import IndexWriter
from prefect_torch.ckpt.runs.manifest import FileEntry, ManifestMemory, new_id
from prefect_torch.flows import Result
from prunes import prune_as_leader
from wrapped_storage import WrappedStorage


@pytest.fixture
def counting():
    return CountingStorage(MemoryStorage())


@pytest.fixture
def store(counting):
    return CheckpointStore.open(counting, "run")


@pytest.fixture
def manifests(store):
    return [commit(store, step, loss=1 / (step + 1)) for step in range(3 * FEW)]


def repair(store):
    writer = IndexWriter(store)
    while writer.repair(store.listed()):
        pass


def segments(store):
    return list_segments(store.storage, store.layout)


def only_segment(store):
    (segment,) = segments(store)
    return segment.key


def test_many_manifests_are_read_by_a_listing_and_a_read_for_each_segment(store, manifests, counting):
    repair(store)
    counting.taken()
    assert store.list() == manifests
    assert counting.taken() == {"list": 2, "get_bytes": 1}
    assert store.best(1, "loss", "min") == manifests[-1:]
    assert counting.taken() == {"list": 2, "get_bytes": 1}
    training = replace(store, memory=ManifestMemory())
    assert training.list() == training.list() == manifests
    assert counting.taken() == {"list": 3, "get_bytes": 1}


def test_few_manifests_are_read_themselves(store, manifests, counting):
    repair(store)
    counting.taken()
    assert read_manifests(store, store.listed()[:FEW]) == manifests[:FEW]
    assert counting.taken() == {"list": 1, "get_bytes": FEW}


def test_a_prune_goes_by_the_index_and_what_it_deletes_is_gone(store, manifests, counting):
    repair(store)
    counting.taken()
    policy = RetentionPolicy(2 * FEW, "loss", "max")
    assert prune_as_leader(store, policy, dry_run=True).drop == tuple(manifests[2 * FEW : -1])
    assert counting.taken() == {"list": 4, "get_bytes": 1}  # one confirms that there are no pins
    prune_as_leader(store, policy)
    assert store.list() == [*manifests[: 2 * FEW], manifests[-1]]


def test_a_checkpoint_exists_only_while_its_manifest_is_listed_and_has_the_indexed_size(store, manifests):
    repair(store)
    gone, changed, damaged, *_ = manifests
    store.storage.delete([store.layout.manifest(gone.id)])
    other = replace(changed, metrics={"loss": 12345.678})
    store.storage.put_bytes(store.layout.manifest(changed.id), other.encode())
    store.storage.put_bytes(store.layout.manifest(damaged.id), damaged.encode()[:-9])
    assert store.list() == [other, *manifests[3:]]


def test_attached_metrics_are_seen_with_the_index(store, manifests):
    repair(store)
    store.attach_metrics(manifests[5].id, {"accuracy": 0.9})
    assert store.list()[5].metrics == {"loss": manifests[5].metrics["loss"], "eval": {"accuracy": 0.9}}
    repair(store)
    assert store.list()[5].reported == manifests[5].metrics


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {"loss": math.inf, "deep": {"a": -1.5, "b": None}, "name": "x", "flag": True}},
        {"metrics": {"__float__": "x"}, "metadata": {"a": [1, {"b": "\ud800"}], "__float__": "y"}},
        {"files": ()},
        {"parent": "s3://bucket/run/checkpoints/x", "timings": {"stall_s": 0.25}},
        {"world_size": 10**6, "timings": {"durable_s": 3.0, "stall_s": 1e-9}},
    ],
)
def test_any_manifest_comes_back_from_the_index_as_from_its_own_object(store, manifests, changes):
    far = [replace(it, id=new_id(9, 10**it.step), step=10**it.step, attempt=9) for it in manifests[:18]]
    odd = [replace(it, **changes) if number % 2 else it for number, it in enumerate([*manifests, *far])]
    for manifest in odd:
        store.storage.put_bytes(store.layout.manifest(manifest.id), manifest.encode())
    one_by_one = store.list()
    repair(store)
    assert len(read_index(store.storage, store.layout)) == len(odd)
    assert [(it.id, repr(it)) for it in store.list()] == [(it.id, repr(it)) for it in one_by_one]


JUNK = {
    "nothing": b"",
    "no JSON": b"x",
    "a list": b"[]\n[]",
    "a digest of something else": b'{"format":1,"digest":"0"}\n[]',
    "a cut one": None,
}


@pytest.mark.parametrize("junk", JUNK)
def test_a_segment_that_is_damaged_is_left_out_and_made_anew(store, manifests, junk, caplog):
    repair(store)
    key = only_segment(store)
    store.storage.put_bytes(key, store.storage.get_bytes(key)[:-1] if JUNK[junk] is None else JUNK[junk])
    assert store.list() == manifests
    assert f"{key} " in caplog.text
    repair(store)
    assert only_segment(store) != key
    assert len(read_index(store.storage, store.layout)) == len(manifests)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, "x"),
        (1, "../x"),
        (2, -1),
        (2, 10**30),
        (2, -(10**30)),
        (3, True),
        (4, [1]),
        (5, [["/etc/passwd", 1, "0", 0]]),
        (5, [[]]),
        (8, "now"),
        (8, "2026-01-01T00:00:00"),
        (8, "0001-01-01T00:00:00+14:00"),
        (8, "9999-12-31T23:59:59-14:00"),
        (10, []),
    ],
)
def test_a_row_of_another_type_is_no_manifest(store, manifests, place, value, caplog):
    """Sealed anew, as whoever can write to the storage could."""
    repair(store)
    key = only_segment(store)
    rows = json.loads(store.storage.get_bytes(key).partition(b"\n")[2])
    rows[0][place] = value
    store.storage.put_bytes(key, segments_module._seal([json.dumps(row).encode() for row in rows]))
    assert store.list() == manifests
    assert "left out" in caplog.text


def test_a_segment_of_a_newer_version_and_other_files_are_left_alone(store, manifests):
    newer, other = store.layout.index_segment(5, "00000000"), f"{store.layout.index}notes.txt"
    store.storage.put_bytes(newer, b'{"format":2}\n')
    store.storage.put_bytes(other, b"x")
    repair(store)
    assert store.list() == manifests
    assert {newer, other} < set(store.keys(store.layout.index))


def test_a_segment_that_vanishes_before_it_is_read_costs_reads(store, manifests):
    repair(store)
    (segment,) = segments(store)
    store.storage.delete([segment.key])
    assert read_segment(store.storage, segment) is None
    assert store.list() == manifests


@pytest.mark.parametrize("num_newer", [0, 2])
def test_a_training_of_many_commits_leaves_few_segments_that_hold_all(store, monkeypatch, num_newer):
    for number in range(num_newer):  # as a newer version left them before a downgrade
        store.storage.put_bytes(store.layout.index_segment(5, f"0000000{number}"), b'{"format":2}\n')
    monkeypatch.setattr(writer_module, "FEW", 4)
    monkeypatch.setattr(writer_module, "LARGEST", 4 * 256)
    writer = IndexWriter(store)
    due = 0
    for step in range(4 * 16 * 5):
        if writer.add(commit(store, step).id):
            writer.write()
            due += 1
    assert due == 16 * 5
    assert len(segments(store)) <= 2 * 16 + num_newer
    assert len(read_index(store.storage, store.layout)) == 4 * 16 * 5


def test_a_training_that_keeps_few_checkpoints_has_no_index(store):
    writer = IndexWriter(store)
    for step in range(2 * FEW):
        is_due = writer.add(commit(store, step).id)
        prune_as_leader(store, RetentionPolicy(3))
        if is_due:
            writer.write()
    assert segments(store) == []


def test_segments_of_checkpoints_that_are_gone_are_deleted(store, manifests):
    repair(store)
    store.storage.delete([store.layout.manifest(it.id) for it in manifests[FEW:]])
    repair(store)
    assert store.list() == manifests[:FEW]
    assert [it.count for it in segments(store)] == [FEW]


def test_an_index_is_rebuilt_some_thousands_at_a_time(store, manifests, monkeypatch):
    monkeypatch.setattr(writer_module, "_AT_ONCE", FEW)
    writer = IndexWriter(store)
    assert [writer.repair(store.listed()) for _ in range(4)] == [True, True, False, False]
    assert store.list() == manifests
    assert len(read_index(store.storage, store.layout)) == len(manifests)


def test_a_call_reads_no_more_bytes_of_manifests_than_it_may_hold(store, manifests, monkeypatch):
    monkeypatch.setattr(writer_module, "_MOST_READ", sum(it.bytes for it in store.listed()[:70]))
    assert IndexWriter(store).repair(store.listed())
    assert [it.count for it in segments(store)] == [70]
    repair(store)
    assert len(manifests) - len(read_index(store.storage, store.layout)) < FEW
    assert store.list() == manifests


class Weighing(WrappedStorage):
    """Weighs what is stored of the index."""

    weights = ()

    def _do(self, verb, *args, **kwargs):
        if verb == "put_bytes" and "/index/" in args[0]:
            self.weights = (*self.weights, len(args[1]))
        return super()._do(verb, *args, **kwargs)


def test_segments_of_manifests_with_very_many_files_stay_small_and_are_stored_few_times(monkeypatch):
    """Those of 512 ranks came to 590 MB in one object, and to a multiple of that in the leader's memory."""
    most = 40_000
    monkeypatch.setattr(writer_module, "FEW", 4)
    for module in (segments_module, writer_module):
        monkeypatch.setattr(module, "MOST_BYTES", most)
    storage = Weighing(MemoryStorage())
    store = CheckpointStore.open(storage, "run")
    files = tuple(FileEntry(f"state/rank-{rank:04}.data", 10**9, f"{rank:032x}", rank) for rank in range(16))
    writer = IndexWriter(store)
    for step in range(4 * 16 * 5):
        manifest = replace(commit(store, step), files=files)
        store.storage.put_bytes(store.layout.manifest(manifest.id), manifest.encode())
        if writer.add(manifest.id):
            writer.write()
    indexed = [it.manifest.files for it in read_index(store.storage, store.layout).values()]
    assert indexed == [it.files for it in store.list()] == [files] * (4 * 16 * 5)
    total = sum(it.bytes for it in segments(store))
    assert max(storage.weights) <= most + 2000, "and a row"
    assert len(segments(store)) <= 2 * total / most + 16
    assert sum(storage.weights) <= 3 * total


@pytest.mark.parametrize("work", ["repair", "write"])
def test_a_crash_at_any_operation_leaves_what_is_read_and_the_next_repair_completes_it(monkeypatch, work):
    monkeypatch.setattr(writer_module, "FEW", 4)
    monkeypatch.setattr("prefect_torch.ckpt.runs.index.reading.FEW", 4)
    monkeypatch.setattr(writer_module, "LARGEST", 4 * 256)
    monkeypatch.setattr(writer_module, "_MERGED", 2)

    def prepare(number, way):
        storage = MemoryStorage()
        store = open_run(storage)
        committed = [commit(store, step).id for step in range(6)]
        repair(store)
        for step in range(6, 12):
            commit(store, step)
        if work == "repair":
            store.storage.delete([store.layout.manifest(it) for it in committed[:4]])  # most of its segment
        return storage

    def run(faulty):
        store = open_run(faulty)
        writer = IndexWriter(store)
        if work == "repair":
            writer.repair(store.listed())
        else:
            writer.add(store.listed()[6].id)
            writer.write()

    fired = 0
    for faulty in crash_points(prepare, run):
        fired += faulty.fired
        store = open_run(faulty.inner)
        ids = [it.id for it in store.listed()]
        assert [it.id for it in store.list()] == ids
        repair(store)
        assert [it.id for it in store.list()] == ids
        assert len(ids) - len(read_index(store.storage, store.layout).keys() & set(ids)) < 4
    assert fired > 6


def test_a_result_lists_checkpoints_once(store, manifests, counting):
    claim_attempt(store, Owner.current(), world_size=1)
    repair(store)
    counting.taken()
    result = Result.from_storage(counting, "run")
    assert result.checkpoint.id == manifests[-1].id
    assert len(result.history) == len(manifests)
    assert counting.taken()["get_bytes"] <= 6
