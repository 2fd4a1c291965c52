"""The index files of very many shards, which rank 0 makes beside its training."""

import gc
import json
import pickle
import sys

import pytest
from prefect_torch.ckpt.reporting.rank_part import RankPart, decode_parts
from prefect_torch.ckpt.state import index as index_module
from prefect_torch.ckpt.state import index_files
from prefect_torch.ckpt.state.index import Chunk, StateIndex, TensorEntry, tensors_file
from prefect_torch.ckpt.state.index_files import store_index
from prefect_torch.ckpt.storage.protocol import Transfer

RANKS, TENSORS = 16, 1000


def part(rank):
    """Return a rank's part of a commit, with its rows of each tensor."""
    chunk = Chunk((rank, 0), (1, 8), tensors_file(rank), (0, 500), 64, ("0" * 32,))
    tensors = {f"w.{it}": TensorEntry(("w", f'{it} "é"'), "float32", (RANKS, 8), (chunk,)) for it in range(TENSORS)}
    return RankPart(state=StateIndex(RANKS, 4096, tensors, {}).fields()).encode()


@pytest.fixture
def collections():
    """The generations of the garbage collections that begin meanwhile."""
    begun = []

    def count(phase, info):
        if phase == "start":
            begun.append(info["generation"])

    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.callbacks.append(count)
    yield begun
    gc.callbacks.remove(count)
    gc.set_threshold(*usual)


def test_shards_of_many_ranks_are_merged_without_a_search_for_garbage_among_them(collections):
    messages, stored = [part(rank) for rank in range(RANKS)], {}

    def put(path, buffers):
        stored[path] = b"".join(buffers)
        return Transfer(0, "")

    gc.collect()
    collections.clear()
    parts = decode_parts(messages)
    store_index([part.state for part in parts], put)
    assert len(collections) < 20, "of some 600"
    whole = StateIndex.merged([part.state for part in parts])
    assert stored[".state.json"] == json.dumps(whole.fields(), allow_nan=False, separators=(",", ":")).encode()


def num_calls(work):
    """Return how many functions in Python begin during `work`: in those in C, no other thread gets the interpreter."""
    begun = []
    sys.setprofile(lambda frame, event, _: begun.append(frame) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(begun)


def test_the_training_runs_while_large_index_files_are_encoded():
    """It waits for a piece of them, and not for all."""
    entries = {f"{name}": [[number, f"{number}"] for number in range(20)] for name in range(20_000)}
    body, encoded = {"tensors": entries}, {}
    assert num_calls(lambda: pickle.dumps(body)) + num_calls(lambda: json.dumps(body, separators=(",", ":"))) < 10
    assert num_calls(lambda: encoded.update(pickle=index_files._pickled(body))) > len(encoded["pickle"]) / 2**17
    assert num_calls(lambda: encoded.update(json=index_module._encode(body, 2))) > len(entries)
    assert pickle.loads(encoded["pickle"]) == body
    assert encoded["json"] == json.dumps(body, separators=(",", ":"))
