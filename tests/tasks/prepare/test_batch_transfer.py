"""Batches on their way to a device; the device "meta" stands in for a GPU, except where a stream is needed."""

from collections import OrderedDict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from prefect_torch.tasks.prepare import batch_transfer
from prefect_torch.tasks.prepare.batch_transfer import moved, on_device, one_ahead
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


class Pair(NamedTuple):
    first: Any
    second: Any


def test_tensors_move_however_nested():
    one = torch.ones(1)
    packed = torch.nn.utils.rnn.pack_sequence([one])
    batch = {"tensors": [one, (one, 3)], "pair": Pair(one, "text"), "packed": packed, "none": None, "more": OrderedDict(a=one)}
    after = moved(batch, META)
    assert after["tensors"][0].is_meta
    assert after["tensors"][1][0].is_meta
    assert after["pair"].first.is_meta
    assert after["packed"].data.is_meta
    assert after["more"]["a"].is_meta
    assert not batch["more"]["a"].is_meta
    assert (after["tensors"][1][1], after["pair"].second, after["none"]) == (3, "text", None)


def test_what_moves_itself_is_told_not_to_wait():
    """A blocking copy waits until the computation on the batch before is done."""
    told = []

    class Encoding:
        def to(self, device, non_blocking=False):
            told.append((device, non_blocking))
            return self

    class Old:
        def to(self, device):
            told.append(device)
            return self

    moved([Encoding(), Old()], META)
    assert told == [(META, True), META]


def test_copies_to_a_device_have_one_stream_in_all_epochs(monkeypatch):
    """The allocator keeps memory for each stream; the module of a device that records stands for torch.cuda."""
    made, waits = [], []

    class Stream:
        def __init__(self, device):
            made.append(device)

        def wait_stream(self, other):
            waits.append((self, other))

    computing = Stream(None)
    module = SimpleNamespace(Stream=Stream, current_stream=lambda _: computing, stream=lambda _: nullcontext())
    monkeypatch.setattr(torch, "meta", module, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    batch_transfer._stream.cache_clear()
    for _ in range(3):
        batches = list(on_device(iter([{"x": 1}] * 4), META, may_look_ahead=True))
        assert batches == [{"x": 1}] * 4
    assert made == [None, META]
    copying = waits[0][0]
    assert waits[:3] == [(copying, computing), (computing, copying), (copying, computing)]
    assert len(waits) == 3 * 4 * 2
    batch_transfer._stream.cache_clear()


class StridedOnly(TorchDispatchMode):
    """Records streams for the tensors for which torch does on a GPU."""

    def __init__(self):
        super().__init__()
        self.recorded = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.record_stream.default:
            return function(*args, **(kwargs or {}))
        if args[0].layout is not torch.strided:
            raise NotImplementedError(f"aten::record_stream of {args[0].layout}")
        return self.recorded.append(args[0])


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize(
    ("layout", "num_parts"),
    [
        (torch.strided, 1),
        (torch.sparse_coo, 2),
        *((each, 3) for each in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)),
    ],
)
def test_the_stream_of_a_sparse_batch_is_recorded_for_what_has_its_memory(layout, num_parts):
    dense = torch.eye(4)
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    tensor = dense if layout is torch.strided else dense.to_sparse(layout=layout, **blocks)
    with StridedOnly() as gpu:
        batch_transfer._record([tensor.to("meta")], torch.Stream(device="cpu"))
    assert len(gpu.recorded) == num_parts


def test_without_a_device_or_on_the_cpu_batches_stay_what_the_loader_gives():
    batches = iter([torch.ones(1)])
    assert on_device(batches, None, may_look_ahead=True) is batches
    assert on_device(batches, torch.device("cpu"), may_look_ahead=True) is batches
    (batch,) = on_device(batches, META, may_look_ahead=False)
    assert batch.is_meta


def test_the_next_batch_is_begun_before_the_one_at_hand_is_handed_out_and_no_more_are_taken():
    told = []

    def source():
        for number in range(3):
            told.append(f"take {number}")
            yield number

    def begin(number):
        told.append(f"begin {number}")
        return number

    ahead = one_ahead(source(), begin, lambda number: told.append(f"hand over {number}"))
    assert next(ahead) == 0
    assert told == ["take 0", "begin 0", "hand over 0", "take 1", "begin 1"]
    assert list(ahead) == [1, 2]
    assert told[5:] == ["hand over 1", "take 2", "begin 2", "hand over 2"]
    assert list(one_ahead([], begin)) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a GPU")
def test_on_a_gpu_copies_beside_the_computation_arrive_whole():
    device = torch.device("cuda", torch.cuda.current_device())
    batches = [{"x": torch.full((1024, 1024), float(number)).pin_memory()} for number in range(20)]
    sums = []
    for batch in on_device(iter(batches), device, may_look_ahead=True):
        assert batch["x"].device == device
        busy = batch["x"]
        for _ in range(10):  # so that the next copy begins while this is computed on, and its memory is free
            busy = busy * 1.0
        sums.append(busy.mean())
        del batch, busy
    assert torch.stack(sums).tolist() == [float(number) for number in range(20)]
