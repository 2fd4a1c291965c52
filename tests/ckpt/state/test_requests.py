"""What a state asks of the storage: how often, and what follows when it fails or lies."""

import json
import re
import tracemalloc
from dataclasses import replace

import pytest
import torch
from crash_points import open_run
from faulty_storage import FaultyStorage
from prefect_torch.ckpt import CheckpointCorruptError, StorageError
from prefect_torch.ckpt.errors import MalformedRecordError
from prefect_torch.ckpt.state.index import INDEX_FILE
from prefect_torch.ckpt.storage.fsspec_files import backend
from prefect_torch.ckpt.storage.fsspec_files.backend import FsspecStorage
from prefect_torch.ckpt.storage.local_files import storage as local
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from ranks import Attempt
from xxhash import xxh3_128_hexdigest


def state_of(score, rank=0):
    return {"w": torch.full((700, 500), float(score)), "small": torch.tensor(score), "score": score, "rank": rank}


def report(store, score):
    Attempt(store).run(lambda session, _: session.report({"score": score}, state=state_of(score)))


def test_an_error_at_any_operation_of_a_load_is_raised_and_a_second_try_succeeds(tmp_path):
    storage = LocalStorage(tmp_path / "store")
    report(open_run(storage), 1)
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
    assert faulty.counts() == {"size": 2, "get_range": 2}  # of the index, and of the tensors


@pytest.mark.parametrize("is_remote", [False, True])
def test_an_index_that_is_larger_than_a_record_is_loaded(tmp_path, monkeypatch, is_remote):
    """It has an entry for each tensor of each rank: of millions, more than 1 GiB."""
    storage = FsspecStorage(f"memory://{tmp_path}", {}) if is_remote else LocalStorage(tmp_path)
    store = open_run(storage)
    Attempt(store).run(lambda session, _: session.report({}, state={f"{it}": torch.ones(20_000) for it in range(50)}))
    newest = store.latest()
    index_bytes = next(entry.bytes for entry in newest.files if entry.path == ".state.json")
    monkeypatch.setattr(backend if is_remote else local, "MOST_RECORD_BYTES", index_bytes - 1)
    with pytest.raises(MalformedRecordError):
        storage.get_bytes(store.layout.data(newest.id, ".state.json"))
    state = {"7": torch.zeros(20_000)}
    store.checkpoint(newest).load_state(state)
    assert torch.equal(state["7"], torch.ones(20_000))


def with_claims(store, claims):
    """Return a manifest of the newest checkpoint with other sizes of files; the value "score" fills the one that has it."""
    newest = store.latest()
    index = json.loads(store.storage.get_bytes(store.layout.data(newest.id, INDEX_FILE)))
    value = index["values"]["score"]
    value |= {"start": 0, "bytes": claims.get(value["file"], value["bytes"])}
    data = json.dumps(index).encode()
    store.storage.put_bytes(store.layout.data(newest.id, INDEX_FILE), data)
    files = [replace(it, bytes=claims.get(it.path, it.bytes)) for it in newest.files if it.path != INDEX_FILE]
    of_index = next(it for it in newest.files if it.path == INDEX_FILE)
    size = claims.get(INDEX_FILE, len(data))
    return replace(newest, files=(*files, replace(of_index, bytes=size, digest=xxh3_128_hexdigest(data))))


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("file", [INDEX_FILE, "__0_1.distcp"])
def test_a_file_that_is_smaller_than_committed_costs_no_memory(tmp_path, is_remote, file):
    storage = FsspecStorage(f"memory://{tmp_path}", {}) if is_remote else LocalStorage(tmp_path)
    store = open_run(storage)
    report(store, 1)
    checkpoint = store.checkpoint(with_claims(store, {file: 2**27}))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptError, match=rf"{re.escape(file)} has \d+ bytes instead of {2**27}"):
            checkpoint.load_state({"score": 0})
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_file_that_ends_early_or_differs_is_corrupt_however_it_is_read(tmp_path):
    storage = LocalStorage(tmp_path / "store")
    report(open_run(storage), 1)
    store = open_run(storage)
    path = storage.local_path(store.layout.data(store.latest().id, "__0_0.distcp"))
    data = path.read_bytes()
    for damaged in (data[:-3000], bytes([*data[:9000], data[9000] ^ 1]) + data[9001:]):
        path.write_bytes(damaged)
        for target in (torch.zeros(700, 500), torch.zeros(500, 700).t()):
            with pytest.raises(CheckpointCorruptError, match=r"__0_0\.distcp (ends|differs)"):
                store.checkpoint(store.latest()).load_state({"w": target})
