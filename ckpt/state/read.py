"""Reads of a stored state: only the needed bytes, in parallel, straight into place, and never used before verification."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from prefect_torch.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from prefect_torch.ckpt.storage.confirmed_reads import confirm_damage
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import Storage

from .image import memory_of
from .index import Chunk, TensorEntry, ValueEntry

_SPAN_BYTES = 4 * 2**20  # the most that one request reads of small blocks
_GAP_BYTES = 64 * 2**10  # a gap of this size is read along, rather than with another request
Take = Callable[[memoryview], None]
Into = Callable[[], memoryview]


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of a file that have a digest, with their destination.

    Attributes:
        file: The file's path.
        start: Their offset in it.
        bytes: Their number.
        digest: xxh3-128 of them.
        into: Returns the memory to read them into; None where only a part of them is wanted.
        take: Called with them once they are read and verified, or None.

    """

    file: str
    start: int
    bytes: int
    digest: str
    into: Into | None = None
    take: Take | None = None


@dataclass(frozen=True, slots=True)
class StateReader:
    """The files of one stored state.

    Attributes:
        storage: The storage that contains them.
        folder: The prefix of their keys, empty or ending with "/".
        where: Their location, for errors.

    """

    storage: Storage
    folder: str
    where: str

    def read(self, blocks: Sequence[Block]) -> None:
        """Read `blocks`, neighbours together, several at a time; all are verified and delivered when this returns.

        Raises:
            CheckpointCorruptError: If bytes are missing or differ; blocks read before stay.
            CheckpointNotFoundError: If a file is missing.

        """
        for_each(_spans(blocks), self._read_span)

    def read_values(self, values: Sequence[ValueEntry]) -> list[bytes]:
        """Return the bytes of each value."""
        found: list[bytes] = [b""] * len(values)

        def block(place: int, value: ValueEntry) -> Block:
            return value_block(value, lambda data: found.__setitem__(place, bytes(data)))

        self.read([block(place, value) for place, value in enumerate(values)])
        return found

    def _read_span(self, span: Sequence[Block]) -> None:
        first = span[0]
        if len(span) == 1 and first.into is not None:
            data = first.into()
        else:
            end = max(block.start + block.bytes for block in span)
            data = memoryview(bytearray(end - first.start))
        confirm_damage(self.storage, lambda storage: self._read_verified(span, data, storage))
        for block in span:  # only now: a block that a second read repeats must not have been delivered
            part = data[block.start - first.start :][: block.bytes]
            if block.into is not None and len(span) > 1:
                block.into()[:] = part
            if block.take is not None:
                block.take(part)

    def _read_verified(self, span: Sequence[Block], data: memoryview, storage: Storage) -> None:
        first = span[0]
        self._fill(first, data, storage)
        for block in span:
            self._verify(block, data[block.start - first.start :][: block.bytes])

    def _fill(self, first: Block, data: memoryview, storage: Storage) -> None:
        try:
            count = storage.get_range(f"{self.folder}{first.file}", first.start, data)
        except FileNotFoundError as exc:
            raise CheckpointNotFoundError(f"{self.where}/{first.file} is missing") from exc
        if count != len(data):
            raise CheckpointCorruptError(f"{self.where}/{first.file} ends {len(data) - count} bytes early")

    def _verify(self, block: Block, data: memoryview) -> None:
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest != block.digest:
            raise CheckpointCorruptError(
                f"{self.where}/{block.file} differs from what was stored: bytes {block.start} to {block.start + block.bytes} "
                f"have xxh3-128 {digest} instead of {block.digest}"
            )


def value_block(value: ValueEntry, take: Take) -> Block:
    """Return the read of one value."""
    return Block(value.file, value.start, value.bytes, value.digest, take=take)


def tensor_blocks(entry: TensorEntry, block_bytes: int, part: torch.Tensor, offsets: Sequence[int]) -> Iterator[Block]:
    """Yield the reads that fill `part`, which begins at `offsets` of the stored tensor, from every chunk that overlaps it."""
    part = part.detach()
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
            yield from _box_blocks(chunk, entry.item_bytes, block_bytes, lower, box)


def _box_blocks(chunk: Chunk, item_bytes: int, block_bytes: int, lower: Sequence[int], box: torch.Tensor) -> Iterator[Block]:
    """Yield the reads that fill `box`, which is wholly inside `chunk` and begins at `lower` of the tensor."""
    row_bytes = math.prod(chunk.sizes[1:]) * item_bytes
    first_row = lower[0] - chunk.offsets[0] if lower else 0
    rows = box.shape[0] if lower else 1
    start, stop = first_row * row_bytes, (first_row + rows) * row_bytes
    begin = start // block_bytes * block_bytes
    end = min(-(-stop // block_bytes) * block_bytes, math.prod(chunk.sizes) * item_bytes)
    whole_rows = tuple(box.shape[1:]) == chunk.sizes[1:]
    if whole_rows and box.is_contiguous() and box.device.type == "cpu":
        memory = memory_of(box)
        for at, size, digest in _each(chunk, block_bytes, begin, end):
            if start <= at and at + size <= stop:
                yield Block(chunk.file, chunk.start + at, size, digest, into=_part(memory, at - start, size))
            else:
                yield Block(chunk.file, chunk.start + at, size, digest, take=_copies(memory, at - start))
        return

    def place(data: torch.Tensor) -> None:
        stored = data[start - begin : stop - begin]
        stored = (stored if stored.storage_offset() % item_bytes == 0 else stored.clone()).view(box.dtype)
        stored = stored.view((rows, *chunk.sizes[1:]) if lower else ())
        for dimension, low in enumerate(lower[1:], 1):
            stored = stored.narrow(dimension, low - chunk.offsets[dimension], box.shape[dimension])
        with torch.no_grad():
            box.copy_(stored)

    parts = list(_each(chunk, block_bytes, begin, end))
    scratch = _Scratch(end - begin, len(parts), place)
    for at, size, digest in parts:
        yield Block(chunk.file, chunk.start + at, size, digest, scratch.at(at - begin, size), scratch.count)


def _part(memory: memoryview, start: int, size: int) -> Into:
    return lambda: memory[start : start + size]


class _Scratch:
    """Memory for blocks that cannot be read into place: allocated from the first read until the last block is placed.

    Args:
        size: Its size in bytes.
        num_blocks: The number of blocks that are read into it.
        place: Called with it, by any thread, when all blocks are read and verified.

    """

    def __init__(self, size: int, num_blocks: int, place: Callable[[torch.Tensor], None]) -> None:
        self._size = size
        self._left = num_blocks
        self._place = place
        self._one_at_a_time = threading.Lock()
        self._memory: torch.Tensor | None = None

    def at(self, start: int, size: int) -> Into:
        """Return a function that returns a part of it."""
        return lambda: memory_of(self._made()[start : start + size])

    def count(self, _: memoryview) -> None:
        """Record that a block is verified."""
        with self._one_at_a_time:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._place(self._made())
            self._memory = None

    def _made(self) -> torch.Tensor:
        with self._one_at_a_time:
            if self._memory is None:
                self._memory = torch.empty(self._size, dtype=torch.uint8, device="cpu")
            return self._memory


def _each(chunk: Chunk, block_bytes: int, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
    for at in range(begin, end, block_bytes):
        yield at, min(block_bytes, end - at), chunk.digests[at // block_bytes]


def _copies(memory: memoryview, offset: int) -> Take:
    """Return a function that copies a block's overlap with `memory`, in which it begins at `offset`, maybe below 0."""

    def take(data: memoryview) -> None:
        low, high = max(0, offset), min(len(memory), offset + len(data))
        memory[low:high] = data[low - offset : high - offset]

    return take


def _spans(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Yield `blocks` in groups of small neighbours."""
    span: list[Block] = []
    for block in sorted(blocks, key=lambda block: (block.file, block.start)):
        if span:
            end = max(known.start + known.bytes for known in span[-1:])
            near = block.file == span[0].file and block.start - end <= _GAP_BYTES
            if not near or block.start + block.bytes - span[0].start > _SPAN_BYTES:
                yield span
                span = []
        span.append(block)
    if span:
        yield span
