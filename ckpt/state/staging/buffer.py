"""The bytes of a file of tensors, prepared once, so that a state is staged by one copy of its raw data into place."""

import ctypes
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from . import spare_memory
from .device_copies import copy_each, queued_copies
from .host_memory import HostMemory

_ALIGNED_BYTES = 64  # torch's alignment of raw data within an archive, kept in the file for reads straight into memory
_SURE_BYTES = 2**20  # from this size, a write of the data's length is the data and never a header or footer


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The position of one chunk in the file.

    Attributes:
        start: The offset of the archive that torch.load reads.
        bytes: The archive's size.
        raw_start: The offset of the raw data in the file.
        raw_bytes: Their size.

    """

    start: int
    bytes: int
    raw_start: int
    raw_bytes: int


class StagingBuffer:
    """A file of chunks, each as torch.save would write it, in memory that is allocated once and reused.

    Costs the file's size in memory. Not safe to stage while it is read.

    Args:
        chunks: The dtype and shape of each chunk.
        previous: A buffer that is no longer used, whose memory is reused if it is large enough, else released first.

    """

    def __init__(
        self,
        chunks: Sequence[tuple[torch.dtype, tuple[int, ...]]],
        *,
        previous: "StagingBuffer | None" = None,
    ) -> None:
        headers_and_footers = [_header_and_footer(dtype, shape) for dtype, shape in chunks]
        self.is_exact = all(_is_readable(dtype) for dtype in {dtype for dtype, _ in chunks})
        self.slots: list[ChunkLayout] = []
        end = 0
        for (dtype, shape), (header, footer) in zip(chunks, headers_and_footers, strict=True):
            raw_start = -(-(end + len(header)) // _ALIGNED_BYTES) * _ALIGNED_BYTES
            raw_bytes = torch.Size(shape).numel() * dtype.itemsize
            start, end = raw_start - len(header), raw_start + raw_bytes + len(footer)
            self.slots.append(ChunkLayout(start, end - start, raw_start, raw_bytes))
        self._device: torch.device | None = None
        self._memory = _reused_or_new(previous, end)
        memory = self._memory.tensor
        self.data = memory_of(memory[:end]) if end else memoryview(b"")
        for slot, (header, footer) in zip(self.slots, headers_and_footers, strict=True):
            self.data[slot.start : slot.raw_start] = header
            self.data[slot.start + slot.bytes - len(footer) : slot.start + slot.bytes] = footer
        self._views = [
            memory[slot.raw_start : slot.raw_start + slot.raw_bytes].view(dtype).view(shape)
            for slot, (dtype, shape) in zip(self.slots, chunks, strict=True)
        ]

    def stage(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the chunks' values into the buffer; when this returns, the tensors may change.

        The values are those after all work that this thread has queued on the devices' current streams. These streams must
        already wait for writes on other streams. Tensors of the CPU are copied while the devices copy theirs.
        """
        with torch.inference_mode():  # the memory may have been allocated in this mode, such as by an evaluation that reports
            if all(tensor.is_cpu for tensor in tensors):
                copy_each(self._views, tensors)
                return
            pairs = [*zip(self._views, tensors, strict=True)]
            remote = [pair for pair in pairs if not pair[1].is_cpu]
            local = [pair for pair in pairs if pair[1].is_cpu]
            self._device = remote[0][1].device
            with queued_copies([view for view, _ in remote], [tensor for _, tensor in remote]):
                copy_each([view for view, _ in local], [tensor for _, tensor in local])

    def register(self) -> None:
        """Page-lock the memory if staged tensors were on a GPU; after the first report, in the background of the training."""
        if self._device is not None:
            self._memory.register(self._device)

    def reserialize(self) -> None:
        """Write each chunk's archive as the installed torch.save does, which is needed only if `is_exact` is false.

        Raises:
            RuntimeError: If torch.save's archives of one dtype and shape differ in size.

        """
        for slot, view in zip(self.slots, self._views, strict=True):
            archive = io.BytesIO()
            torch.save(view.clone(), archive)
            if archive.tell() != slot.bytes:
                raise RuntimeError(
                    f"torch {torch.__version__} saves equal shapes in different sizes; report a directory instead"
                )
            self.data[slot.start : slot.start + slot.bytes] = archive.getbuffer()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; it keeps the tensor alive."""
    assert tensor.is_contiguous()
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * count).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # kept as long as the memory is
    return memoryview(memory).cast("B")


def _reused_or_new(previous: StagingBuffer | None, size: int) -> HostMemory:
    if previous is not None:
        memory = previous._memory  # noqa: SLF001 - of the same class, no longer used
        if len(memory.tensor) >= size:
            return memory
        previous.data, previous._views = memoryview(b""), []  # noqa: SLF001 - of the same class, no longer used
        memory.release()  # before the new memory is allocated, or both would exist together
    return spare_memory.take(size) or HostMemory(size)


class _Recorder:
    """A file that records the archive header and footer around the data, and does not read the data."""

    def __init__(self, data_bytes: int) -> None:
        self._data_bytes = data_bytes
        self.parts = [b"", b""]
        self._after = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size == self._data_bytes and not self._after:
            self._after = 1
        else:
            self.parts[self._after] += bytes(data)
        return size

    def flush(self) -> None:
        """Do nothing: everything is in memory."""


@cache
def _header_and_footer(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the archive header and footer of torch.save around a tensor's raw data, without a checksum of the data."""
    size = torch.Size(shape).numel() * dtype.itemsize
    # Never touched where it is large, so it costs no memory; torch.empty fills its memory where algorithms are deterministic.
    untouched = torch.UntypedStorage(size, device="cpu")  # type: ignore[no-untyped-call]  # torch has no types for it
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(untouched).view(shape)
    with _without_checksums():
        if size >= _SURE_BYTES:
            recorder = _Recorder(size)
            torch.save(tensor, recorder)  # type: ignore[arg-type]  # it only writes and flushes
            return recorder.parts[0], recorder.parts[1]
        archive = io.BytesIO()
        torch.save(tensor, archive)
    whole = archive.getvalue()
    start = torch._C.PyTorchFileReader(io.BytesIO(whole)).get_record_offset("data/0")  # type: ignore[attr-defined]  # noqa: SLF001 - torch.load's own
    return whole[:start], whole[start + size :]


class _without_checksums:  # noqa: N801 - reads as a statement
    def __enter__(self) -> None:
        self._before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)

    def __exit__(self, *_: object) -> None:
        torch.serialization.set_crc32_options(self._before)


@cache
def _is_readable(dtype: torch.dtype) -> bool:
    """Return whether torch.load reads other values between the same header and footer; tried once per dtype."""
    raw = torch.arange(8 * dtype.itemsize, dtype=torch.uint8, device="cpu").remainder(2)  # 0 and 1 are values of every dtype
    expected = raw.view(dtype)
    header, footer = _header_and_footer(dtype, tuple(expected.shape))
    try:
        loaded = torch.load(io.BytesIO(header + bytes(memory_of(raw)) + footer), weights_only=True, mmap=False)
    except Exception:  # noqa: BLE001 - after any error such a file would be unreadable
        return False
    return bool(loaded.dtype == dtype and torch.equal(loaded.view(torch.uint8), raw))
