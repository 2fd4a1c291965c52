"""Writes past the page cache: they cost no copy, no CPU and none of the memory in which a training's data may be cached."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from typing import BinaryIO

ALIGNED_BYTES = 4096  # a multiple of every disk's block: what O_DIRECT requires of addresses, lengths and offsets (man 2 open)
_PIECE_BYTES = 4 * 2**20
_LEAST_BYTES = 2**20


def write_direct(file: BinaryIO, data: memoryview, passed: Callable[[memoryview], None]) -> memoryview:
    """Write the beginning of `data` into `file`, past the page cache, and return the rest.

    The rest is all of `data` if the memory or the file offset is not aligned, or if the filesystem does not support O_DIRECT,
    at all or from memory that a driver maps.

    Args:
        file: A raw file.
        data: The bytes to write.
        passed: Called with every piece that was written.

    """
    direct: int | None = getattr(os, "O_DIRECT", None)
    whole = len(data) // ALIGNED_BYTES * ALIGNED_BYTES
    if direct is None or whole < _LEAST_BYTES or data.readonly or not _is_aligned(data) or file.tell() % ALIGNED_BYTES:
        return data
    descriptor = file.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | direct)
        while done < whole:
            piece = data[done : min(done + _PIECE_BYTES, whole)]
            count = os.write(descriptor, piece)
            passed(piece[:count])
            done += count
            if count == 0 or count % ALIGNED_BYTES:  # the file takes no more this way, or the offset is no longer aligned
                break
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.EFAULT):  # this filesystem does not support it, or not from this memory
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return data[done:]


def _is_aligned(data: memoryview) -> bool:
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) % ALIGNED_BYTES == 0
