"""Reads of files, in the way that suits each filesystem of fsspec: judged by its behaviour, never by its name."""

import ftplib
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from prefect_torch.ckpt.errors import MalformedRecordError, StorageError

from .connections import FileSystem

_REQUESTS_ON_THE_WAY = 64
_LONGEST_END_S = 3.0


@contextmanager
def open_whole(fs: FileSystem, path: str, most: int | None = None) -> Iterator[Any]:
    """Yield a file to read from its beginning to its end.

    Args:
        fs: The filesystem.
        path: The file.
        most: The most bytes that it may have; None for any number.

    Raises:
        StorageError: If it ends before its size: some libraries take a lost connection for the end.
        MalformedRecordError: If it has more than `most` bytes.

    """
    size: int | None = None
    with _opened(fs, path) as file:
        if hasattr(file, "prefetch"):  # without it, paramiko requests 32 KiB, waits, and requests the next
            size = there = file.stat().st_size
            _require_few(path, there, most)
            file.prefetch(there, max_concurrent_requests=_REQUESTS_ON_THE_WAY)
        elif most is not None:
            known = getattr(file, "size", None)
            _require_few(path, look_up(fs, path)["size"] if known is None else known, most)
        yield file
        size = getattr(file, "size", size)
        num_read: int | None = None if size is None else file.tell()
    if num_read is not None and num_read != size:  # the size may be that of a compressed response
        _require_read(path, num_read, look_up(fs, path)["size"])


def look_up(fs: FileSystem, path: str) -> dict[str, Any]:
    """Return what `fs.info` does, also where that takes every failure for a missing file.

    pyarrow's for HDFS does so (HadoopFileSystem::GetFileInfo); its open tells the reason.

    Raises:
        FileNotFoundError: If nothing is at `path`.
        StorageError: If something is, though none was found at first.

    """
    try:
        found: dict[str, Any] = fs.info(path)
    except FileNotFoundError:
        if _is_hdfs(fs):
            with fs.open(path, "rb"):
                raise StorageError(f"{path}: its status was not given, but it can be opened") from None
        raise
    return found


def read_range(fs: FileSystem, path: str, start: int, num_bytes: int) -> bytes:
    """Return up to `num_bytes` bytes from `start` on; fewer only at the file's end.

    Raises:
        StorageError: As `open_whole` raises it.

    """
    if not (_reads_by_opening(fs) or _is_ftp(fs)):
        found: bytes = fs.cat_file(path, start=start, end=start + num_bytes)
        return found
    with _opened(fs, path, start) as file:
        if hasattr(file, "readv"):  # paramiko's read() would wait for each 32 KiB
            there = min(num_bytes, file.stat().st_size - start)
            found = b"".join(file.readv([(start, there)], _REQUESTS_ON_THE_WAY)) if there > 0 else b""
            _require_read(path, len(found), there)
            return found
        data: bytes = file.read(num_bytes)
    if len(data) < num_bytes:
        _require_read(path, len(data), min(num_bytes, look_up(fs, path)["size"] - start))
    return data


def read_whole(fs: FileSystem, path: str, most: int) -> bytes:
    """Return the content of a small file.

    Raises:
        MalformedRecordError: If it has more than `most` bytes: it is not small, and would fill the memory.

    """
    if not _reads_by_opening(fs):
        _require_few(path, fs.info(path).get("size") or 0, most)
        data: bytes = fs.cat_file(path)
        return data
    with open_whole(fs, path, most) as file:
        content: bytes = file.read()
        return content


def _require_read(path: str, num_read: int, num_there: int) -> None:
    if num_read < num_there:
        raise StorageError(f"{path}: {num_read} of {num_there} bytes came")


def _require_few(path: str, num_there: int, most: int | None) -> None:
    if most is not None and num_there > most:
        raise MalformedRecordError(f"{path} has {num_there} bytes, and a record {most} at most")


def _reads_by_opening(fs: FileSystem) -> bool:
    """Return whether `fs` reads a file's bytes only by opening it; for HDFS, fsspec seeks 0 in a stream that cannot seek."""
    return _is_hdfs(fs) or (type(fs).cat_file is AbstractFileSystem.cat_file and not isinstance(fs, AsyncFileSystem))


def _is_hdfs(fs: FileSystem) -> bool:
    is_hdfs: bool = fs.protocol == "hdfs"
    return is_hdfs


def _is_ftp(fs: FileSystem) -> bool:
    return isinstance(getattr(fs, "ftp", None), ftplib.FTP)


@contextmanager
def _opened(fs: FileSystem, path: str, start: int = 0) -> Iterator[Any]:
    """Yield a file to read from `start` on.

    fsspec's own file for FTP ends each block with an abort and waits for two responses, of which some servers send only one.
    """
    if _is_ftp(fs):
        with _received(fs, path, start) as received:
            yield received
        return
    with fs.open(path, "rb") as file:
        if start:
            file.seek(start)
        yield file


@contextmanager
def _received(fs: FileSystem, path: str, start: int) -> Iterator["_Received"]:
    info = fs.info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(path)
    fs.ftp.voidcmd("TYPE I")
    connection = fs.ftp.transfercmd(f"RETR {path}", start or None)
    with connection:
        received = _Received(connection, info["size"])
        try:
            yield received
        finally:
            connection.close()  # if not all was read, the server notices, and its one response reports it
            _hear_end(fs.ftp)


def _hear_end(ftp: ftplib.FTP) -> None:
    """Receive the response to a transfer, or close the connection if there is none; the caller compares the data's size."""
    assert ftp.sock is not None
    longest_s = ftp.sock.gettimeout()
    ftp.sock.settimeout(_LONGEST_END_S)
    try:
        with suppress(ftplib.Error):
            ftp.voidresp()
        ftp.sock.settimeout(longest_s)
    except (OSError, EOFError):
        ftp.close()


class _Received:
    """A file as an FTP server sends it, with its size on the server."""

    def __init__(self, connection: socket.socket, size: int) -> None:
        self.size = size
        self._connection = connection
        self._num_bytes = 0

    def readinto(self, into: memoryview) -> int:
        count = self._connection.recv_into(into)
        self._num_bytes += count
        return count

    def read(self, num_bytes: int | None = None) -> bytes:
        left = content = memoryview(bytearray(self.size if num_bytes is None else num_bytes))
        while left and (count := self.readinto(left)):
            left = left[count:]
        return bytes(content[: len(content) - len(left)])

    def tell(self) -> int:
        return self._num_bytes
