"""Ranged reads of an object, several concurrent ones for a large object, in reused memory."""

import mmap
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

RANGE_BYTES = 4 * 2**20
_LARGE_BYTES = 16 * RANGE_BYTES  # smaller files are read several at a time, and threads of their own would only cost
_AHEAD = 8

Read = Callable[[int, memoryview], int]


def read_in_order(size: int, read: Read, take: Callable[[memoryview], None]) -> None:
    """Call `take` with all bytes of an object, in order, as they arrive; holds 4 MiB of a small object, 32 MiB of a large one.

    Args:
        size: The number of bytes.
        read: Fills the given memory with the bytes from an offset on, and returns their number.
        take: Called by the caller's thread; the memory, aligned to pages, is reused when it returns.

    """
    for wanted, data in _ahead(size, read) if size > _LARGE_BYTES else _one_by_one(size, read):
        take(data)
        if len(data) < wanted:  # the object ends here, which its digest will show
            return


def _one_by_one(size: int, read: Read) -> Iterator[tuple[int, memoryview]]:
    buffer = _memory(min(size, RANGE_BYTES))
    for start in range(0, size, RANGE_BYTES):
        data = buffer[: size - start]
        yield len(data), data[: read(start, data)]


def _ahead(size: int, read: Read) -> Iterator[tuple[int, memoryview]]:
    buffers = [_memory(RANGE_BYTES) for _ in range(_AHEAD)]
    under_way: deque[tuple[memoryview, Future[int]]] = deque()
    with ThreadPoolExecutor(_AHEAD, "prefect-torch-range") as pool:
        for number, start in enumerate(range(0, size, RANGE_BYTES)):
            if len(under_way) == _AHEAD:
                yield _arrived(*under_way.popleft())
            data = buffers[number % _AHEAD][: size - start]
            under_way.append((data, pool.submit(read, start, data)))
        while under_way:
            yield _arrived(*under_way.popleft())


def _arrived(data: memoryview, reading: "Future[int]") -> tuple[int, memoryview]:
    return len(data), data[: reading.result()]


def _memory(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]  # of pages, as writes past the page cache require
