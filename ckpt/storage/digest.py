"""xxh3-128 of bytes in transit."""

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import xxhash

from .protocol import Transfer
from .retry import raise_if_ended

Part = TypeVar("Part", bound=bytes | memoryview)
CHUNK_BYTES = 2**20  # fits the L2 cache, so that hashing reads bytes that the copy has just touched


class RunningDigest:
    """The size and digest of the bytes that have passed so far."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes; a large file may take minutes, so its transfer ends here if its context does."""
        raise_if_ended()
        self._digest.update(data)
        self._bytes += len(data)

    def passed(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Yield `parts`, and add each of them to the digest before."""
        for part in parts:
            self.update(part)
            yield part

    def transfer(self) -> Transfer:
        """Return the size and digest."""
        return Transfer(self._bytes, self._digest.hexdigest())


def digest_file(path: Path) -> Transfer:
    """Return the size and digest of the file at `path`."""
    with path.open("rb", buffering=0) as source:
        return digest_stream(source)


def digest_stream(source: BinaryIO) -> Transfer:
    """Return the size and digest of the rest of `source`."""
    return _digest(source, lambda _: None)


def copy_and_digest(source: BinaryIO, target: BinaryIO, most_bytes: int | None = None) -> Transfer:
    """Copy `source` into `target`, read once, and return the size and digest.

    Args:
        source: The file to read.
        target: The file to write.
        most_bytes: Where to stop; None for the end of `source`.

    """
    return _digest(source, lambda data: write_all(target, data), most_bytes)


def _digest(source: BinaryIO, take: Callable[[memoryview], None], most_bytes: int | None = None) -> Transfer:
    digest = RunningDigest()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    left = most_bytes
    while count := source.readinto(buffer[:left]):  # type: ignore[attr-defined]  # every raw and buffered reader has it
        digest.update(buffer[:count])
        take(buffer[:count])
        if left is not None:
            left -= count
    return digest.transfer()


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
