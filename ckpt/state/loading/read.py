"""Reads of a stored state: only the needed bytes, in parallel, straight into place, and never used before verification."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import xxhash
from prefect_torch.ckpt.errors import CheckpointCorruptError, StateMismatchError
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.state.index import ValueEntry
from prefect_torch.ckpt.state.objects.values import read_value, why_unreadable
from prefect_torch.ckpt.state.staging.buffer import memory_of
from prefect_torch.ckpt.state.staging.device_copies import wait_for_current_streams
from prefect_torch.ckpt.state.staging.host_memory import HostMemory
from prefect_torch.ckpt.storage.confirmed_reads import confirm_damage
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.storage.retry import with_retries
from prefect_torch.ckpt.storage.sizes import refuse_part

SPAN_BYTES = 4 * 2**20  # the most that one request reads of small blocks
_GAP_BYTES = 64 * 2**10  # a gap of up to this size is read as well, which is cheaper than another request
_NUM_SLOTS = 8  # as many reads are under way at a time
T = TypeVar("T")
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
        take: Called with them once they are read and verified, or None; it must not keep the memory.
        device: The device that `take` copies them to, or None.
        is_replicated: Whether every rank probably reads them: a value of all ranks, or a part of a tensor that is read whole.

    """

    file: str
    start: int
    bytes: int
    digest: str
    into: Into | None = None
    take: Take | None = None
    device: torch.device | None = None
    is_replicated: bool = False


@dataclass(frozen=True, slots=True)
class StateReader:
    """The files of one stored state.

    Attributes:
        storage: The storage that contains them.
        folder: The prefix of their keys, empty or ending with "/".
        where: Their location, for errors.
        files: The committed entry of each, by path.

    """

    storage: Storage
    folder: str
    where: str
    files: Mapping[str, FileEntry]

    def read(self, blocks: Sequence[Block]) -> None:
        """Read `blocks`, neighbours together, several at a time; all are verified and delivered when this returns.

        Blocks for devices are delivered by threads on streams of their own. They come after the work that the calling thread
        has queued on the devices' current streams, and before all work that is queued after this returns.

        Raises:
            CheckpointCorruptError: If bytes, or a file, are missing or differ; blocks read before stay.

        """
        if not blocks:
            return
        spans = [*_spans(blocks)]
        slots = _Slots(spans)
        wait_for_current_streams(slots.devices)  # queued work may still write to the targets, or read their old values
        for_each(spans, partial(self._read_span, slots))

    def read_values(self, values: Sequence[ValueEntry]) -> list[bytes]:
        """Return the bytes of each value."""
        found: list[bytes] = [b""] * len(values)

        def block(number: int, value: ValueEntry) -> Block:
            return value_block(value, lambda data: found.__setitem__(number, bytes(data)))

        self.read([block(number, value) for number, value in enumerate(values)])
        return found

    def check_size(self, file: str, storage: Storage) -> None:
        """Raise unless a file has its committed size: before much memory is made for it, whose size the manifest alone tells.

        Raises:
            CheckpointCorruptError: If it has another size.
            FileNotFoundError: If it is missing.

        """
        key, expected = f"{self.folder}{file}", self.files[file].bytes
        size = storage.size(key)
        refuse_part(storage, key, size, expected)
        if size != expected:
            raise CheckpointCorruptError(f"{self.where}/{file} has {size} bytes instead of {expected}")

    def _read_span(self, slots: "_Slots", span: Sequence[Block]) -> None:
        first = span[0]
        if _size(span) > SPAN_BYTES and not _is_in_place(span):
            check = partial(self.check_size, first.file)
            confirm_damage(self.storage, lambda storage: self._retried(first.file, storage, check))
        with slots.memory_for(span) as data:
            confirm_damage(self.storage, lambda storage: self._read_verified(span, data, storage))
            for block in span:  # only once all are verified: a second read must not repeat delivered blocks
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
        key = f"{self.folder}{first.file}"

        def read(storage: Storage) -> int:
            count = storage.get_range(key, first.start, data)
            size = self.files[first.file].bytes
            refuse_part(storage, key, count + size - len(data), size)
            return count

        count = self._retried(first.file, storage, read)
        if count != len(data):
            raise CheckpointCorruptError(f"{self.where}/{first.file} ends {len(data) - count} bytes early")

    def _retried(self, file: str, storage: Storage, call: Callable[[Storage], T]) -> T:
        try:
            return with_retries(storage, "reading", f"{self.folder}{file}", call)
        except FileNotFoundError as exc:
            raise CheckpointCorruptError(f"{self.where}/{file} is missing") from exc

    def _verify(self, block: Block, data: memoryview) -> None:
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest != block.digest:
            raise CheckpointCorruptError(
                f"{self.where}/{block.file} differs from what was stored: bytes {block.start} to {block.start + block.bytes} "
                f"have xxh3-128 {digest} instead of {block.digest}"
            )


def value_block(value: ValueEntry, take: Take, *, is_replicated: bool = False) -> Block:
    """Return the read of one value."""
    return Block(value.file, value.start, value.bytes, value.digest, take=take, is_replicated=is_replicated)


def stored_value(name: str, entry: ValueEntry, data: bytes, where: str) -> Any:
    """Return the value that `data`, the bytes of `entry`, encode.

    Args:
        name: Its name.
        entry: Its entry in the index.
        data: Its bytes, verified.
        where: The location of the state's files.

    Raises:
        StateMismatchError: If torch.load(weights_only=True) does not read it in this process.
        CheckpointCorruptError: If it is not the tensor that its entry describes, by which the place for it is chosen.

    """
    try:
        value = read_value(data)
    except Exception as exc:  # noqa: BLE001 - torch.load may raise any error
        raise StateMismatchError(
            f"{name!r} in {where}/{entry.file} is a value that torch.load(weights_only=True) does not read in this process "
            f"({why_unreadable(exc)}): if the checkpoint is your own, allow the same types as the process that reported it, by "
            "torch.serialization.add_safe_globals, or leave it out of the state to load into"
        ) from None  # torch's message advises to read it unsafely
    if entry.tensor is not None and _form(value) != entry.tensor:
        dtype, shape = entry.tensor
        raise CheckpointCorruptError(
            f"{name!r} in {where}/{entry.file} is not the tensor that the index describes, {dtype} {list(shape)}"
        )
    return value


def _form(value: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the dtype and shape of a tensor with memory of this host; None for all else."""
    if not isinstance(value, torch.Tensor) or not value.is_cpu or value.layout is not torch.strided:
        return None
    return str(value.dtype).removeprefix("torch."), tuple(value.shape)


class _Slots:
    """Memory for blocks that are not read into place: as much as concurrent reads need, page-locked if a block is for a GPU."""

    def __init__(self, spans: Sequence[Sequence[Block]]) -> None:
        self.devices = {block.device for span in spans for block in span if block.device is not None}
        sizes = [_size(span) for span in spans if not _is_in_place(span)]
        self._bytes = max((size for size in sizes if size <= SPAN_BYTES), default=0)
        slots = HostMemory(self._bytes * min(_NUM_SLOTS, len(sizes)))
        for device in self.devices:
            slots.register(device)
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        memory = memory_of(slots.tensor)
        for start in range(0, len(memory), max(self._bytes, 1)):
            self._free.put(memory[start : start + self._bytes])
        self._slots = slots

    @contextmanager
    def memory_for(self, span: Sequence[Block]) -> Iterator[memoryview]:
        """Yield the memory to read `span` into."""
        size = _size(span)
        if _is_in_place(span):
            assert span[0].into is not None
            yield span[0].into()
        elif size > self._bytes:
            yield memoryview(bytearray(size))
        else:
            slot = self._free.get()
            try:
                yield slot[:size]
            finally:
                self._free.put(slot)


def _is_in_place(span: Sequence[Block]) -> bool:
    return len(span) == 1 and span[0].into is not None


def _size(span: Sequence[Block]) -> int:
    return max(block.start + block.bytes for block in span) - span[0].start


def _spans(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Yield `blocks` in groups of small neighbours."""
    span: list[Block] = []
    for block in sorted(blocks, key=lambda block: (block.file, block.start)):
        if span:
            end = max(known.start + known.bytes for known in span[-1:])
            near = block.file == span[0].file and block.start - end <= _GAP_BYTES
            if not near or block.start + block.bytes - span[0].start > SPAN_BYTES:
                yield span
                span = []
        span.append(block)
    if span:
        yield span
