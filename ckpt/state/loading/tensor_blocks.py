"""Which blocks of a stored tensor fill a part of it, and where in the part their elements belong."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from prefect_torch.ckpt.state.index import Chunk, TensorEntry
from prefect_torch.ckpt.state.staging.buffer import memory_of
from prefect_torch.ckpt.state.staging.device_copies import wait_for_current_streams

from .read import Block, Into


def tensor_blocks(entry: TensorEntry, block_bytes: int, part: torch.Tensor, offsets: Sequence[int]) -> Iterator[Block]:
    """Yield the reads that fill `part`, which begins at `offsets` of the stored tensor, from every chunk that overlaps it."""
    part, is_whole = part.detach(), tuple(part.shape) == entry.shape
    for chunk in entry.chunks:
        lower = [max(a, b) for a, b in zip(chunk.offsets, offsets, strict=True)]
        upper = [
            min(a + a_size, b + b_size)
            for a, a_size, b, b_size in zip(chunk.offsets, chunk.sizes, offsets, part.shape, strict=True)
        ]
        if all(low < high for low, high in zip(lower, upper, strict=True)):
            box = part
            for dimension, (low, high, start) in enumerate(zip(lower, upper, offsets, strict=True)):
                box = box.narrow(dimension, low - start, high - low)
            for block in _box_blocks(chunk, entry.item_bytes, block_bytes, lower, box):
                yield replace(block, is_replicated=True) if is_whole else block


def _box_blocks(chunk: Chunk, item_bytes: int, block_bytes: int, lower: Sequence[int], box: torch.Tensor) -> Iterator[Block]:
    """Yield the reads that fill `box`, which is wholly inside `chunk` and begins at `lower` of the tensor."""
    sizes, row_items = chunk.sizes, math.prod(chunk.sizes[1:])
    corner = [low - offset for low, offset in zip(lower, chunk.offsets, strict=True)]
    first, rows = (corner[0], box.shape[0]) if corner else (0, 1)
    start, stop = first * row_items * item_bytes, (first + rows) * row_items * item_bytes
    memory: memoryview | None = None
    if tuple(box.shape[1:]) == sizes[1:] and box.is_contiguous():  # whole rows, as one line
        sizes, corner, box = (math.prod(sizes),), [first * row_items], box.view(-1)
        memory = memory_of(box) if box.is_cpu else None
    device = None if box.is_cpu else box.device
    end = min(-(-stop // block_bytes) * block_bytes, math.prod(chunk.sizes) * item_bytes)
    for at in range(start // block_bytes * block_bytes, end, block_bytes):
        size, digest = min(block_bytes, end - at), chunk.digests[at // block_bytes]
        if memory is not None and start <= at and at + size <= stop:
            yield Block(chunk.file, chunk.start + at, size, digest, into=_part(memory, at - start, size))
        else:
            take = _Placement(box, corner, sizes, at // item_bytes)
            yield Block(chunk.file, chunk.start + at, size, digest, take=take, device=device)


def _part(memory: memoryview, start: int, size: int) -> Into:
    return lambda: memory[start : start + size]


@dataclass(frozen=True, slots=True)
class _Placement:
    """The copy of a block's elements into a part of a tensor.

    Attributes:
        box: The part.
        corner: The index in the chunk at which it begins.
        sizes: The chunk's shape.
        first: The number of the block's first element in the chunk.

    """

    box: torch.Tensor
    corner: Sequence[int]
    sizes: Sequence[int]
    first: int

    def __call__(self, data: memoryview) -> None:
        """Copy the elements of `data` that are in the part, and return when they have arrived."""
        is_gathered = False
        elements = torch.frombuffer(data, dtype=torch.uint8).view(self.box.dtype)
        corner, ends = self.corner, [low + size for low, size in zip(self.corner, self.box.shape, strict=True)]
        at = 0
        for lower, upper in boxes_of(self.sizes, self.first, self.first + len(elements)):
            shape = [high - low for low, high in zip(lower, upper, strict=True)]
            stored, at = elements[at : at + math.prod(shape)].view(shape), at + math.prod(shape)
            inside = [(max(a, b), min(c, d)) for a, b, c, d in zip(lower, corner, upper, ends, strict=True)]
            if all(low < high for low, high in inside):
                source = stored[tuple(slice(low - a, high - a) for (low, high), a in zip(inside, lower, strict=True))]
                with torch.inference_mode():  # the part may be an inference tensor, which only this mode can change
                    target = self.box[tuple(slice(low - b, high - b) for (low, high), b in zip(inside, corner, strict=True))]
                    target.copy_(source)
                is_gathered = is_gathered or not target.is_contiguous()
        if is_gathered and not self.box.is_cpu:  # the device copies once more, on this thread's stream, and torch does not wait
            wait_for_current_streams([self.box.device])


def boxes_of(sizes: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes that are elements `start` to `stop` of a tensor of shape `sizes`, in order; each by its two corners."""
    if len(sizes) <= 1:
        yield ((start,), (stop,)) if sizes else ((), ())
        return
    row = math.prod(sizes[1:])
    while start < stop:
        number, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:
            whole = (stop - start) // row
            yield (number, *[0] * (len(sizes) - 1)), (number + whole, *sizes[1:])
            start += whole * row
            continue
        end = min(stop - number * row, row)
        for lower, upper in boxes_of(sizes[1:], inside, end):
            yield (number, *lower), (number + 1, *upper)
        start = number * row + end
