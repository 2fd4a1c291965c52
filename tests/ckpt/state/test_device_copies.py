"""Parts of tensors, and the sums by which a GPU compares them, on the CPU."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt.state.loading.tensor_blocks import boxes_of
from prefect_torch.ckpt.state.staging.device_copies import copied_to_host, cut_at_multiples, sums_of_words

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(shapes, st.sampled_from([1, 2, 4, 8]), st.integers(1, 40), st.integers(0, 99))
def test_parts_are_the_tensor_and_cross_no_multiple(shape, item_bytes, items_per_step, first):
    step, start = items_per_step * item_bytes, first * item_bytes
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    seen = []
    for cut in cut_at_multiples(shape, item_bytes, step, start):
        part = tensor[cut]
        assert part.is_contiguous()
        numbers = part.flatten().tolist()
        seen += numbers
        if numbers:
            assert (start + numbers[0] * item_bytes) // step == (start + numbers[-1] * item_bytes) // step
    assert seen == [*range(tensor.numel())]


@given(full_shapes, st.data())
def test_boxes_are_the_elements_in_their_order(shape, data):
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel())) if shape else 1
    boxes = [*boxes_of(shape, start if shape else 0, stop)]
    seen = [tensor[tuple(slice(*ends) for ends in zip(*box, strict=True))] for box in boxes]
    assert torch.cat([part.flatten() for part in seen] or [tensor[:0].flatten()]).tolist() == [
        *range(start if shape else 0, stop)
    ]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def variants():
    """Return tensors of one shape and dtype that all differ; the last ones only in signs and places."""
    base = torch.arange(1.0, 3_000_001.0)
    signs = [[], [1], [3], [1, 3], [0, 2], [5, 2_000_001], [2_000_001, 2_000_003]]
    flipped = []
    for places in signs:
        flipped.append(base.clone())
        flipped[-1][places] *= -1
    swapped = base.clone()
    swapped[[7, 2_500_000]] = swapped[[2_500_000, 7]]
    return [*flipped, swapped, base.flip(0), torch.zeros_like(base), torch.full_like(base, -0.0)]


def test_sums_tell_tensors_apart_by_each_bit_and_place():
    sums = [tuple(sums_of_words(tensor).flatten().tolist()) for tensor in variants()]
    assert len({*sums}) == len(sums)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("size", [1, 3, 70_001])
def test_sums_see_the_values_however_the_memory_lies(dtype, size):
    values = (torch.arange(size) % 2).to(dtype)
    strided = values.repeat_interleave(2)[::2]
    misaligned = torch.cat([values[:1], values])[1:]
    assert torch.equal(sums_of_words(strided), sums_of_words(values))
    assert torch.equal(sums_of_words(misaligned), sums_of_words(values))
    if dtype.is_complex:
        assert torch.equal(sums_of_words(values.conj()), sums_of_words(values.conj().resolve_conj()))
        assert not torch.equal(sums_of_words((values + 1j).conj()), sums_of_words(values + 1j))


def test_small_tensors_come_with_their_values_dtypes_and_shapes():
    tensors = [
        torch.ones(3),
        torch.tensor(2.0).bfloat16(),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.zeros(0, 3),
        torch.tensor(True),
    ]
    for copy, tensor in zip(copied_to_host(tensors), tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
