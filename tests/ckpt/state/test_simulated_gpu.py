"""The simulated GPU does what a GPU may do to code that does not wait, and what it must for code that does."""

import threading

import pytest
import simulated_gpu as gpu
import torch
from simulated_processes import on_simulated_gpu


@on_simulated_gpu
def test_nothing_runs_before_something_waits_and_then_no_more_than_it_waits_for():
    one, other = gpu.Stream(), gpu.Stream()
    tensor, later = gpu.on_device(torch.zeros(2)), gpu.on_device(torch.zeros(2))
    with gpu.stream(one):
        tensor.add_(1)
        event = one.record_event()
        tensor.add_(1)
    with gpu.stream(other):
        other.wait_event(event)
        later.copy_(tensor)
    assert gpu.values(tensor).tolist() == [0, 0]
    assert not event.query()
    other.synchronize()
    assert gpu.values(tensor).tolist() == gpu.values(later).tolist() == [1, 1]
    torch.get_device_module(gpu.DEVICE).synchronize()
    assert gpu.values(tensor).tolist() == [2, 2]


@on_simulated_gpu
def test_values_that_the_host_asks_for_are_awaited_and_counted():
    tensor = gpu.on_device(torch.arange(4.0)).mul_(2)
    before = gpu.counts["synchronize"]
    assert tensor.sum().item() == 12
    assert tensor.cpu().tolist() == [0, 2, 4, 6]
    assert gpu.counts["synchronize"] - before == 2


@on_simulated_gpu
def test_each_thread_has_a_current_stream():
    seen = []
    with gpu.stream(gpu.Stream()):
        thread = threading.Thread(target=lambda: seen.append(gpu.current_stream()))
        thread.start()
        thread.join()
        assert seen[0] is not gpu.current_stream()


@pytest.mark.parametrize("is_recorded", [True, False])
@on_simulated_gpu
def test_freed_memory_is_handed_on_at_once_unless_a_stream_is_recorded(is_recorded):
    side, result = gpu.Stream(), torch.empty(3, device=gpu.DEVICE)
    batch = torch.full((3,), 5.0, device=gpu.DEVICE)
    side.wait_stream(gpu.current_stream())
    with gpu.stream(side):
        result.copy_(batch)
    if is_recorded:
        batch.record_stream(side)
    del batch
    next_batch = torch.full((3,), 9.0, device=gpu.DEVICE)
    next_batch.cpu()
    side.synchronize()
    assert gpu.values(result).tolist() == [5.0 if is_recorded else 9.0] * 3


@on_simulated_gpu
def test_memory_of_the_host_must_outlive_a_copy():
    tensor, target = gpu.on_device(torch.ones(3)), torch.zeros(3)
    target.copy_(tensor, non_blocking=True)
    assert target.tolist() == [0, 0, 0]
    del target
    with pytest.raises(AssertionError, match="the host's memory was freed before a copy"):
        gpu.current_stream().synchronize()


@on_simulated_gpu
def test_strided_copies_take_memory_of_the_device_and_dense_ones_none():
    tensor = gpu.on_device(torch.arange(1000.0).reshape(10, 100))
    for source, taken in ((tensor, 0), (tensor.t(), 4000), (tensor[:, ::2], 2000)):
        target = torch.empty(source.shape)
        with gpu.memory.peak() as temporaries:
            target.copy_(source)
        assert temporaries.bytes == taken
        assert torch.equal(target, gpu.values(source))


@on_simulated_gpu
def test_a_conjugated_copy_that_is_not_awaited_is_wrong_as_with_cuda():
    tensor, target = gpu.on_device(torch.full((2,), 1 + 2j)), torch.zeros(2, dtype=torch.complex64)
    target.copy_(tensor.conj(), non_blocking=True)
    gpu.current_stream().synchronize()
    assert target.tolist() == [1 + 2j] * 2
    target.copy_(tensor.conj())
    assert target.tolist() == [1 - 2j] * 2
