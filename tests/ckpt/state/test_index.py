"""An index is believed only when every entry of it can be true."""

import copy
import gc
import itertools
import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt import CheckpointCorruptError, UnsupportedFormatError
from prefect_torch.ckpt.state.index import StateIndex, is_own_file
from prefect_torch.ckpt.state.loading.load_plan import Node

FILES = {"__0_0.distcp": 1000, "__0_1.distcp": 100}
CHUNK = {"file": "__0_0.distcp", "archive": [0, 300], "start": 64, "digests": ["00"]}
BODY = {
    "format": 1,
    "world_size": 2,
    "block_bytes": 4096,
    "tensors": {
        "w": {
            "path": ["w"],
            "dtype": "float32",
            "shape": [4, 5],
            "chunks": [
                {**CHUNK, "offsets": [0, 0], "sizes": [2, 5]},
                {**CHUNK, "offsets": [2, 0], "sizes": [2, 5], "start": 400},
            ],
        }
    },
    "values": {"v": {"path": ["v", 3, [0]], "file": "__0_1.distcp", "start": 0, "bytes": 100, "digest": "0", "tensor": None}},
}


def decode(body):
    return StateIndex.decode(body if isinstance(body, bytes) else json.dumps(body).encode(), "here", FILES)


def test_an_index_comes_back_as_it_was():
    index = decode(BODY)
    assert StateIndex.decode(index.encode(), "here", FILES) == index
    assert index.values["v"].path == ("v", 3, [0])


def changed(*path_and_value):
    *path, last, value = path_and_value
    body = copy.deepcopy(BODY)
    at = body
    for step in path:
        at = at[step]
    at[last] = value
    return body


FIRST = ("tensors", "w", "chunks", 0)
BAD = {
    "no JSON": b"{",
    "no object": b"[]",
    "a format that is none": changed("format", "1"),
    "an older format": changed("format", 0),
    "no ranks": changed("world_size", 0),
    "no blocks": changed("block_bytes", 0),
    "a negative size": changed("block_bytes", -1),
    "blocks of any size": changed("block_bytes", 2**40),
    "a number that is none": changed("world_size", True),
    "a file that is not there": changed(*FIRST, "file", "__9_0.distcp"),
    "a file elsewhere": changed(*FIRST, "file", "../../secret"),
    "a start after the end": changed(*FIRST, "start", 990),
    "a negative start": changed(*FIRST, "start", -1),
    "a fraction": changed(*FIRST, "start", 1.5),
    "a chunk beyond the shape": changed(*FIRST, "offsets", [3, 0]),
    "chunks that overlap": changed(*FIRST, "offsets", [1, 0]),
    "chunks that leave a gap": changed(*FIRST, "sizes", [1, 5]),
    "other dimensions": changed(*FIRST, "sizes", [10]),
    "no digest": changed(*FIRST, "digests", []),
    "a digest that is no text": changed(*FIRST, "digests", [1]),
    "an unknown dtype": changed("tensors", "w", "dtype", "__class__"),
    "a shape that is no list": changed("tensors", "w", "shape", "45"),
    "no chunks": changed("tensors", "w", "chunks", []),
    "an empty path": changed("tensors", "w", "path", []),
    "a step that is none": changed("tensors", "w", "path", [None]),
    "no place in a list": changed("values", "v", "path", [[]]),
    "a place before a list": changed("values", "v", "path", [[-1]]),
    "a small tensor without a shape": changed("values", "v", "tensor", ["int64"]),
    "a small tensor of nothing": changed("values", "v", "tensor", []),
    "a path that is a name": changed("values", "v", "path", "v"),
    "an endless value": b'{"format":1,"values":' + b"[" * 100_000,
    "a huge tensor": changed("tensors", "w", "shape", [2**62, 2**62]),
    "a value beyond its file": changed("values", "v", "bytes", 101),
    "a value in no file": changed("values", "v", "file", "x"),
    "a value of no bytes": changed("values", "v", "bytes", 0),
    "a path that is too deep": changed("values", "v", "path", ["x"] * 501),
    "a rank of very many digits": changed("values", {f"v@rank{'9' * 5000}": BODY["values"]["v"]}),
    "a rank that there is not": changed("values", {"v@rank2": BODY["values"]["v"]}),
    "an empty tensor that cannot be": changed(
        "tensors", "w", {**BODY["tensors"]["w"], "shape": [0, 2**62, 2**62], "chunks": []}
    ),
    "a small tensor that cannot be": changed("values", "v", "tensor", ["int64", [0, 2**62, 2**62]]),
    "a small tensor that is larger than its bytes": changed("values", "v", "tensor", ["int64", [13]]),
    "blocks that cut an element": changed("block_bytes", 42),
    "an array that is a text": {**BODY, "arrays": {"v": "array"}},
    "an array that is not there": {**BODY, "arrays": {"x": "array"}},
    "two names of one path": changed("values", "v", "path", ["w"]),
    "one name of two things": changed("values", {"w": BODY["values"]["v"]}),
    "no tensors": {key: value for key, value in BODY.items() if key != "tensors"},
    "tensors that are a list": changed("tensors", []),
}


@pytest.mark.parametrize("what", BAD)
def test_an_index_that_cannot_be_true_is_corrupt(what):
    with pytest.raises(CheckpointCorruptError, match="here is not the index of a state"):
        decode(BAD[what])


def decoding_s(num_chunks, *, overlap=False):
    """Return the seconds of this thread for an index of a tensor with one row, each element in a chunk of its own."""
    chunks = [{**CHUNK, "offsets": [0, column], "sizes": [1, 1]} for column in range(num_chunks)]
    if overlap:
        chunks[5]["offsets"] = [0, 6]
    body = {**BODY, "tensors": {"w": {"path": ["w"], "dtype": "float32", "shape": [1, num_chunks], "chunks": chunks}}}
    gc.disable()  # else the objects of all tests are looked through
    try:
        begun_s = time.thread_time()
        decode(body)
        return time.thread_time() - begun_s
    finally:
        gc.enable()


def test_very_many_chunks_of_one_row_cost_linear_time():
    assert decoding_s(8000) < 24 * min(decoding_s(1000) for _ in range(3))
    with pytest.raises(CheckpointCorruptError, match="two chunks of 'w' overlap"):
        decoding_s(8000, overlap=True)


@given(st.data())
def test_chunks_overlap_as_their_elements_do(data):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3))
    boxes, left = [], math.prod(shape)
    while left:
        offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
        sizes = [data.draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
        if math.prod(sizes) <= left:
            boxes.append((offsets, sizes))
            left -= math.prod(sizes)
    elements = [
        element
        for box in boxes
        for element in itertools.product(*(range(low, low + size) for low, size in zip(*box, strict=True)))
    ]
    chunks = [{**CHUNK, "offsets": offsets, "sizes": sizes} for offsets, sizes in boxes]
    body = {**BODY, "tensors": {"w": {"path": ["w"], "dtype": "float32", "shape": shape, "chunks": chunks}}}
    if len(set(elements)) == len(elements):
        decode(body)
    else:
        with pytest.raises(CheckpointCorruptError, match="two chunks of 'w' overlap"):
            decode(body)


def test_an_index_of_a_newer_format_asks_for_an_upgrade():
    with pytest.raises(UnsupportedFormatError, match="here has format 2 and this version reads 1: upgrade"):
        decode(changed("format", 2))


def test_fields_that_a_later_version_adds_to_an_index_are_ignored():
    body = changed("added", {"x": [1]})
    for entry in (body["tensors"]["w"], *body["tensors"]["w"]["chunks"], body["values"]["v"]):
        entry["added"] = 1
    assert decode(body) == decode(BODY)


def test_a_state_uses_names_that_no_other_file_has():
    assert all(is_own_file(path) for path in (".metadata", ".state.json", "__0_0.distcp", "__123_1.distcp"))
    assert not any(is_own_file(path) for path in ("model.pt", "sub/.metadata", "__0_2.distcp", "__0.distcp"))


def test_an_order_of_what_is_not_there_changes_nothing_and_one_that_is_needless_is_not_stored():
    entry = BODY["values"]["v"]
    values = {name: {**entry, "path": ["d", name]} for name in "xy"}
    part = {"format": 1, "world_size": 1, "block_bytes": 4096, "tensors": {}, "values": values}
    orders = [
        {"path": ["d"], "keys": ["x", "z", "y"], "rank": None},
        {"path": ["e", [], [-1]], "keys": [[], "x"], "rank": None},
    ]
    assert StateIndex.merged([{**part, "orders": orders}]).encode() == StateIndex.merged([part]).encode()
    odd = decode({**BODY, "values": values, "orders": orders})
    assert list(Node.tree(odd, 0).children["d"].children) == ["x", "y"]
    turned = StateIndex.merged([None, {**part, "orders": [{"path": ["d"], "keys": ["y", "x"]}]}])
    assert list(Node.tree(turned, None).children["d"].children) == ["y", "x"]
