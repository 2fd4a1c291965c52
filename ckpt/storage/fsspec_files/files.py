"""File operations that fsspec leaves to each filesystem: judged by a filesystem's behaviour, never by its name."""

import ftplib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from prefect_torch.ckpt.errors import MalformedRecordError, StorageError
from prefect_torch.ckpt.storage.digest import write_all
from prefect_torch.ckpt.storage.keys import temporary_name

FileSystem: TypeAlias = Any  # fsspec ships no types

_PIECE_BYTES = 2**15  # the most that an SFTP server transfers in one request
_REQUESTS_ON_THE_WAY = 64
_LONGEST_END_S = 3.0
_MANY_OTHERS = 10  # more processes do not create or remove the directories of one put


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
    with _opened(fs, path) as file:
        if hasattr(file, "prefetch"):  # without it, paramiko requests 32 KiB, waits, and requests the next
            there = file.stat().st_size
            _require_few(path, there, most)
            file.prefetch(there, max_concurrent_requests=_REQUESTS_ON_THE_WAY)
        elif most is not None:
            known = getattr(file, "size", None)
            _require_few(path, fs.info(path)["size"] if known is None else known, most)
        yield file
        size = getattr(file, "size", None)
        num_read: int | None = None if size is None else file.tell()
    if num_read is not None and num_read != size:  # the size may be that of a compressed response
        _require_read(path, num_read, fs.info(path)["size"])


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
            return b"".join(file.readv([(start, there)], _REQUESTS_ON_THE_WAY)) if there > 0 else b""
        data: bytes = file.read(num_bytes)
    if len(data) < num_bytes:
        _require_read(path, len(data), min(num_bytes, fs.info(path)["size"] - start))
    return data


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


def _require_read(path: str, num_read: int, num_there: int) -> None:
    if num_read < num_there:
        raise StorageError(f"{path}: {num_read} of {num_there} bytes came")


def _require_few(path: str, num_there: int, most: int | None) -> None:
    if most is not None and num_there > most:
        raise MalformedRecordError(f"{path} has {num_there} bytes, and a record {most} at most")


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


def make_folder(fs: FileSystem, folder: str) -> None:
    """Create `folder` and its parents; other processes may create them concurrently."""
    for _ in range(_MANY_OTHERS):
        try:
            fs.makedirs(folder, exist_ok=True)
        except PermissionError:
            raise
        except Exception:  # noqa: BLE001 - fsspec checks, then creates; each library has its own error for a race
            if fs.isdir(folder):
                return
        else:
            return
    fs.makedirs(folder, exist_ok=True)


def require_whole(fs: FileSystem, path: str, num_bytes: int) -> None:
    """Compare the stored size with `num_bytes`, by one request.

    Raises:
        StorageError: If it differs; the file is removed.

    """
    fs.invalidate_cache()
    size = fs.info(path)["size"]
    if size != num_bytes:
        fs.rm_file(path)
        raise StorageError(f"{path}: {size} of {num_bytes} bytes were stored")


def find_files(fs: FileSystem, folder: str) -> dict[str, dict[str, Any]]:
    """Return the files below `folder` by their paths, without links; all of them, or an error.

    Costs a request for each directory, unless the filesystem has its own recursive listing.
    """
    fs.invalidate_cache()
    if not _walks(fs):
        found: dict[str, dict[str, Any]] = fs.find(folder, detail=True)
        return {path: info for path, info in found.items() if info.get("type", "file") == "file"}
    files: dict[str, dict[str, Any]] = {}
    folders = [folder]
    while folders:
        listed = folders.pop()
        with suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
            for info in fs.ls(listed, detail=True):
                if info["type"] == "directory" and info["name"] != listed:
                    folders.append(info["name"])
                elif info["type"] == "file":
                    files[info["name"]] = info
    return files


def rmdir_spares_files(fs: FileSystem, folder: str) -> bool:
    """Return whether `rmdir` refuses a directory into which another process has just put a file; costs six requests.

    HDFS and WebDAV (https://www.rfc-editor.org/rfc/rfc4918#section-9.6.1) delete a directory with all that is in it. webdav4's
    `rmdir` lists the directory first, too early to see that file: so `ls` shows nothing here.
    """
    inner = f"{folder}/{temporary_name()}"
    path = f"{inner}/{temporary_name()}"
    make_folder(fs, inner)
    fs.pipe_file(path, b"")
    # Each library has an exception of its own; a lost connection fails the next line.
    with _showing_nothing(fs), suppress(Exception):
        fs.rmdir(inner)
    fs.invalidate_cache()
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return False
    fs.rmdir(inner)
    return True


@contextmanager
def _showing_nothing(fs: FileSystem) -> Iterator[None]:
    own = vars(fs).get("ls")
    fs.ls = lambda *_, **__: []
    try:
        yield
    finally:
        if own is None:
            del fs.ls
        else:  # an asynchronous filesystem's
            fs.ls = own


def remove_empty(fs: FileSystem, folder: str, root: str, may_remove: Callable[[FileSystem, str], bool]) -> None:
    """Remove `folder` if it is empty and may be removed, then its parent; never `root`."""
    while folder.startswith(f"{root}/"):
        with suppress(OSError, NotImplementedError):  # another process stores something here again, or no directories exist
            if not fs.ls(folder, detail=False) and may_remove(fs, folder):
                fs.rmdir(folder)
                folder = folder.rpartition("/")[0]
                continue
        return


def _walks(fs: FileSystem) -> bool:
    """Return whether fsspec's own walk would list `fs`: it silently leaves out a directory whose listing fails."""
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._find is AsyncFileSystem._find  # noqa: SLF001 - the method that an asynchronous one overrides instead
    return type(fs).find is AbstractFileSystem.find


def _reads_by_opening(fs: FileSystem) -> bool:
    """Return whether `fs` reads a file's bytes only by opening it."""
    return type(fs).cat_file is AbstractFileSystem.cat_file and not isinstance(fs, AsyncFileSystem)


def _is_ftp(fs: FileSystem) -> bool:
    return isinstance(getattr(fs, "ftp", None), ftplib.FTP)


def _opened_new(fs: FileSystem, path: str) -> Any:
    for _ in range(_MANY_OTHERS):
        make_folder(fs, path.rpartition("/")[0])
        with suppress(FileNotFoundError):
            return fs.open(path, "wb")
    return fs.open(path, "wb")
