"""Batches on their way to a simulated GPU, whose streams run as late as they may: what is computed is what the loader gave."""

import pytest
import simulated_gpu as gpu
import torch
from prefect_torch.tasks.prepare.batch_transfer import on_device
from simulated_processes import Mutant, failure_of, on_simulated_gpu

NUM_BATCHES = 6
SIZE = 1000


class Encoding:
    """A batch that moves itself, as a tokenizer's does; its tensor is found by nobody else."""

    def __init__(self, values):
        self._values = values

    def to(self, device, non_blocking):
        return Encoding(self._values.to(device, non_blocking=non_blocking))

    def sum(self):
        return self._values.sum()


def check(kind, streams, *, copies_first):
    """Compute the sum of each batch on the next of `streams`, and look at the sums when all streams have run.

    Args:
        kind: What a batch is.
        streams: The streams of the computation.
        copies_first: Whether the stream of the copies runs first, as far as it does not wait; else the others do.

    """
    given = [kind(torch.full((SIZE,), float(number))) for number in range(NUM_BATCHES)]  # as pinned memory, they stay
    moved, sums = on_device(iter(given), gpu.DEVICE, may_look_ahead=True), []
    for number in range(NUM_BATCHES):
        with gpu.stream(streams[number % len(streams)]):
            batch = next(moved)
            sums.append(batch.sum())
            del batch
    copying = [stream for stream in gpu._streams if stream not in streams]
    for stream in [*copying, *streams] if copies_first else [*streams, *copying]:
        stream.synchronize()
    assert [gpu.values(total).item() / SIZE for total in sums] == [*range(NUM_BATCHES)]


@pytest.mark.parametrize("copies_first", [True, False])
@on_simulated_gpu
def test_batches_are_computed_on_after_their_copy_and_before_the_next_one_in_their_memory(copies_first):
    check(Encoding, [gpu.current_stream()], copies_first=copies_first)


@pytest.mark.parametrize("copies_first", [True, False])
@on_simulated_gpu
def test_a_batch_keeps_its_memory_while_another_stream_computes_on_it(copies_first):
    check(torch.clone, [gpu.Stream(), gpu.Stream()], copies_first=copies_first)


MUTANTS = {
    "the computation does not wait for the copy": (
        test_batches_are_computed_on_after_their_copy_and_before_the_next_one_in_their_memory,
        False,
        Mutant("tasks.prepare.batch_transfer", "current.wait_stream(self._stream)", "pass"),
    ),
    "the copy does not wait for the computation": (
        test_batches_are_computed_on_after_their_copy_and_before_the_next_one_in_their_memory,
        True,
        Mutant("tasks.prepare.batch_transfer", "self._stream.wait_stream(self._module.current_stream(self._device))", "pass"),
    ),
    "the stream is not recorded": (
        test_a_batch_keeps_its_memory_while_another_stream_computes_on_it,
        True,
        Mutant("tasks.prepare.batch_transfer", "part.record_stream(stream)", "pass"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_wait_that_is_missing_is_noticed(name):
    test, copies_first, mutant = MUTANTS[name]
    failure = failure_of(test, {"copies_first": copies_first}, mutant)
    assert (failure or "it passes").splitlines()[-1].startswith("AssertionError"), failure
