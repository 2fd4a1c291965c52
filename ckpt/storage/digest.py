"""xxh3-128 of bytes in transit."""

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from .direct_io import write_direct
from .protocol import Transfer

CHUNK_BYTES = 2**20  # fits the L2 cache, so that hashing reads bytes that the copy has just touched


def digest_file(path: Path) -> Transfer:
    """Return the size and digest of the file at `path`."""
    with path.open("rb", buffering=0) as source:
        return digest_stream(source)


def digest_stream(source: BinaryIO) -> Transfer:
    """Return the size and digest of the rest of `source`."""
    return _digest(source, lambda _: None)


def copy_and_digest(source: BinaryIO, target: BinaryIO) -> Transfer:
    """Copy `source` to its end into `target`, read once, and return the size and digest."""
    return _digest(source, lambda data: write_all(target, data))


def _digest(source: BinaryIO, take: Callable[[memoryview], None]) -> Transfer:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    total = 0
    while count := source.readinto(buffer):  # type: ignore[attr-defined]  # every raw and buffered reader has it
        digest.update(buffer[:count])
        take(buffer[:count])
        total += count
    return Transfer(total, digest.hexdigest())


def write_and_digest(parts: Iterable[memoryview], target: BinaryIO) -> Transfer:
    """Write `parts` into the raw file `target`, past the page cache where possible, and return the size and digest."""
    digest = xxhash.xxh3_128()
    total = 0
    for part in parts:
        total += len(part)
        for piece in split([write_direct(target, part, digest.update)], CHUNK_BYTES):
            digest.update(piece)
            write_all(target, piece)
    return Transfer(total, digest.hexdigest())


def split(parts: Iterable[memoryview], most_bytes: int) -> Iterator[memoryview]:
    """Yield `parts` in pieces of at most `most_bytes`, without copying."""
    for part in parts:
        for start in range(0, len(part), most_bytes):
            yield part[start : start + most_bytes]


def write_all(target: BinaryIO, data: memoryview | bytes) -> None:
    """Write all of `data`, or raise.

    A raw file may take fewer bytes than it receives; a buffered one takes all of them, and some return nothing (paramiko's).

    Raises:
        OSError: If `target` takes no more: BlockingIOError if it may later.

    """
    left = memoryview(data)
    while left:
        count: int | None = target.write(left)
        if count is None:
            if isinstance(target, io.RawIOBase):
                raise BlockingIOError(errno.EAGAIN, f"{os.strerror(errno.EAGAIN)}, {len(left)} bytes were not written")
            return
        if count == 0:
            raise OSError(errno.EIO, f"the file takes no more: {len(left)} bytes were not written")
        left = left[count:]
