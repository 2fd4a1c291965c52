"""Writes of files, in the way that suits each filesystem of fsspec: judged by its behaviour, never by its name."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fsspec import AbstractFileSystem
from prefect_torch.ckpt.errors import StorageError
from prefect_torch.ckpt.storage.digest import write_all
from prefect_torch.ckpt.storage.keys import temporary_name

from .connections import FileSystem
from .folders import MANY_OTHERS, make_folder
from .reads import look_up

_PIECE_BYTES = 2**15  # the most that an SFTP server transfers in one request


def can_replace(fs: FileSystem, folder: str) -> bool:
    """Return whether a rename in `folder` replaces a file; costs five requests, or none if a rename would be a copy."""
    if type(fs).mv is AbstractFileSystem.mv:
        return False
    new, old = f"{folder}/{temporary_name()}", f"{folder}/{temporary_name()}"
    fs.pipe_file(new, b"new")
    fs.pipe_file(old, b"old")
    with suppress(Exception):  # each library has an exception of its own; a lost connection fails the next line
        fs.mv(new, old)
    replaced: bool = fs.cat_file(old) == b"new"
    for path in [old] if replaced else [old, new]:
        fs.rm_file(path)
    return replaced


@contextmanager
def create(fs: FileSystem, path: str) -> Iterator[Any]:
    """Yield a file to write, and create its directories: a concurrent delete may remove an empty one meanwhile."""
    with _opened_new(fs, path) as file:
        if not hasattr(file, "set_pipelined"):
            yield file
            return
        pipelined = _Pipelined(file)
        yield pipelined
        pipelined.settle()


class _Pipelined:
    """A file of paramiko's that waits for the server's acknowledgement at the end, and not after each 32 KiB.

    Waiting costs 40 ms each (Nagle's algorithm and delayed acknowledgements): 25 s for 20 MiB instead of one. Closing such a
    file ignores outstanding acknowledgements. So the last piece is held back, and written without pipelining, which
    waits for all earlier ones.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._held = b""
        file.set_pipelined(True)

    def write(self, data: memoryview) -> int:
        if data:
            write_all(self._file, self._held)
            most = max(0, len(data) - _PIECE_BYTES)
            write_all(self._file, data[:most])
            self._held = bytes(data[most:])
        return len(data)

    def settle(self) -> None:
        self._file.set_pipelined(False)
        write_all(self._file, self._held)


def require_whole(fs: FileSystem, path: str, num_bytes: int) -> None:
    """Compare the stored size with `num_bytes`, by one request.

    Raises:
        StorageError: If it differs; the file is removed.

    """
    fs.invalidate_cache()
    size = look_up(fs, path)["size"]
    if size != num_bytes:
        fs.rm_file(path)
        raise StorageError(f"{path}: {size} of {num_bytes} bytes were stored")


def _opened_new(fs: FileSystem, path: str) -> Any:
    for _ in range(MANY_OTHERS):
        make_folder(fs, path.rpartition("/")[0])
        with suppress(FileNotFoundError):
            return fs.open(path, "wb")
    return fs.open(path, "wb")
