"""Bytes written to a local file and digested while they move: past the page cache where that is faster.

Not on FUSE: what is mounted there may be a bucket, which takes a file's bytes in their order only
(https://github.com/awslabs/mountpoint-s3/blob/main/doc/SEMANTICS.md; Databricks' volumes). Past the page cache, the kernel may
send many requests of one write at a time.
"""

import errno
import fcntl
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash
from prefect_torch.ckpt.errors import is_of_full_disk
from prefect_torch.ckpt.storage.digest import CHUNK_BYTES, RunningDigest, copy_and_digest, split, write_all
from prefect_torch.ckpt.storage.machine.anonymous_memory import anonymous_memory
from prefect_torch.ckpt.storage.machine.mounts import may_be_fuse
from prefect_torch.ckpt.storage.protocol import Transfer

from .direct_io import ALIGNED_BYTES, write_direct

_SMALL_BYTES = 2**16
_LEAST_BYTES = 8 * 2**20  # for smaller files, threads and buffers cost more than they gain
_PIECE_BYTES = 4 * 2**20
_PIECES = 4  # one is read and digested while others are written
_WRITERS = 2  # the disk always has a next write, and never waits for Python
_REFUSED = (errno.EINVAL, errno.EFAULT)  # this filesystem does not support O_DIRECT, or not from this memory


def write_and_digest(parts: Iterable[memoryview], target: io.FileIO) -> Transfer:
    """Write `parts` into the raw file `target`, past the page cache where possible, and return the size and digest."""
    digest, is_in_order = RunningDigest(), may_be_fuse(target.fileno())
    for part in parts:
        rest = part if is_in_order else write_direct(target, part, digest.update)
        for piece in digest.passed(split([rest], CHUNK_BYTES)):
            write_all(target, piece)
    return digest.transfer()


def copy_file(source: io.FileIO, target: io.FileIO) -> Transfer:
    """Copy `source` to its end into the new file `target`, read once, and return the size and digest.

    A large file is read, digested and written at the same time, past the page cache, with 16 MiB of memory: the copy then
    costs the time of the slowest of the three, and evicts nothing that a training has cached.
    """
    size = os.fstat(source.fileno()).st_size
    if size <= CHUNK_BYTES:
        data = source.read(size + 1)  # one read also shows that the file ends there
        if len(data) != size:
            data += source.readall()
        write_all(target, data)
        return Transfer(len(data), xxhash.xxh3_128_hexdigest(data))
    if size < _LEAST_BYTES or not hasattr(os, "O_DIRECT") or may_be_fuse(target.fileno()):
        return copy_and_digest(source, target)
    pieces = [memoryview(anonymous_memory(_PIECE_BYTES)) for _ in range(_PIECES)]
    digest, writing, offset = RunningDigest(), deque[Future[None]](), 0
    _set_direct(target.fileno(), on=True)
    with ThreadPoolExecutor(_WRITERS, "prefect-torch-write") as pool:
        while True:
            if len(writing) == _PIECES:
                writing.popleft().result()
            piece = pieces[offset // _PIECE_BYTES % _PIECES]
            count = _fill(source, piece)
            digest.update(piece[:count])
            if count < _PIECE_BYTES:
                break
            writing.append(pool.submit(_write_at, target.fileno(), piece, offset))
            offset += count
        for future in writing:
            future.result()
    whole = count // ALIGNED_BYTES * ALIGNED_BYTES
    _write_at(target.fileno(), piece[:whole], offset)
    _set_direct(target.fileno(), on=False)  # the rest has no whole block
    _write_at(target.fileno(), piece[whole:count], offset + whole)
    return digest.transfer()


def read_small(path: str | Path) -> bytes | None:
    """Return the content of a file of less than 64 KiB, with as few system calls as possible; None for any other."""
    source = os.open(path, os.O_RDONLY)
    try:
        data = os.read(source, _SMALL_BYTES)
        return data if len(data) == os.fstat(source).st_size < _SMALL_BYTES else None
    finally:
        os.close(source)


def write_small(data: bytes, target: int, path: Callable[[], Path]) -> Transfer:
    """Write `data` into a new file, and return the size and digest; closes the descriptor `target`.

    Args:
        data: The content.
        target: The file's descriptor.
        path: Returns its path, for errors.

    Raises:
        OSError: If the file does not take all of it.

    """
    try:
        written = Transfer(len(data), xxhash.xxh3_128_hexdigest(data))
        left = memoryview(data)
        while left and (count := os.write(target, left)):
            left = left[count:]
        require_whole(target, written, path)
    finally:
        os.close(target)
    return written


@contextmanager
def naming_if_full(path: Callable[[], Path]) -> Iterator[None]:
    """Name the written file in the error of a full filesystem, quota or file: a write to a descriptor does not know it."""
    try:
        yield
    except OSError as exc:
        is_file_full = exc.errno == errno.EFBIG  # RLIMIT_FSIZE, or the filesystem's own limit
        if (is_of_full_disk(exc) or is_file_full) and exc.filename is None:
            exc.filename = str(path())
        raise


def require_whole(file: int, written: Transfer, path: Callable[[], Path]) -> None:
    """Raise OSError unless the open file has the size of the written bytes: a rename would make a short one durable."""
    size = os.fstat(file).st_size
    if size != written.bytes:
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: {size} of {written.bytes} bytes are in the file", str(path()))


def _fill(source: io.FileIO, piece: memoryview) -> int:
    """Read as much as `piece` takes, fewer bytes only at the end of the file, and return their number."""
    done = 0
    while done < len(piece) and (count := source.readinto(piece[done:])):
        done += count
    return done


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`; switch O_DIRECT off where the file refuses it, also for an offset that is no longer aligned."""
    while data:
        was_direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        try:
            count = os.pwrite(descriptor, data, offset)
        except OSError as exc:
            if exc.errno not in _REFUSED or not was_direct:
                raise
            _set_direct(descriptor, on=False)
            continue
        if count == 0:
            raise OSError(errno.EIO, f"the file takes no more: {len(data)} bytes were not written")
        data, offset = data[count:], offset + count


def _set_direct(descriptor: int, *, on: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as exc:
        if exc.errno not in _REFUSED:
            raise
