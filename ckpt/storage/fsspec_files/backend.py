"""Any filesystem of fsspec as a storage: memory, SFTP, HDFS, WebDAV and more."""

import errno
import inspect
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import fsspec
from fsspec.config import apply_config
from prefect_torch.ckpt.errors import CheckpointError, StorageError, full_storage
from prefect_torch.ckpt.storage.digest import RunningDigest, copy_and_digest, digest_stream, write_all
from prefect_torch.ckpt.storage.keys import check_key, is_temporary, is_unlisted, temporary_name
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import MOST_RECORD_BYTES, ObjectInfo, Splits, Transfer
from prefect_torch.ckpt.text import without_secrets

from .connections import Connections, FileSystem, with_limited_waits
from .folders import find_files, make_folder, remove_empty, rmdir_spares_files
from .reads import look_up, open_whole, read_range, read_whole
from .writes import can_replace, create, require_whole

_WRAPPERS = {"blockcache", "cached", "dir", "filecache", "generic", "simplecache"}
# A class's name, FTP's code, or paramiko's words where it has no key, or may not trust the server's; not its words for a server
# that did not answer to the login.
_LOGIN_REFUSED = re.compile(
    r"(?!\w+: Authentication (?:timeout|failed: transport shut down))"
    r"(?:\w*(?:Authentication|Logon|Login|PasswordRequired)|\w+: (?:530 |No authentication methods|Server .* not found in))"
)
# UTC, and perhaps fractions of a second (https://www.rfc-editor.org/rfc/rfc3659#section-2.3). Servers that do not know MLSD
# show the local time, without its zone and mostly without a year.
_TIME_OF_FTP = re.compile(r"[0-9]{14}(?=\.|$)")
_SFTP_FAILURE = "OSError: Failure"
# libhdfs gives the first number, its EINTERNAL, to all of Java's exceptions but eleven, so also to a lost connection and to a
# NameNode that is not the active one
# (https://github.com/apache/hadoop/blob/trunk/hadoop-hdfs-project/hadoop-hdfs-native-client/src/main/native/libhdfs/exception.c).
_OF_HDFS: dict[int | None, str] = {255: "", errno.EROFS: " (a NameNode in safe mode says so, as for minutes after its start)"}


class FsspecStorage:
    """Objects as files of an fsspec filesystem.

    A put is atomic if the filesystem renames a file over another, which is tried once: the file is written under a temporary
    name and renamed when its size is right. Elsewhere a put replaces in place, and may leave a short file when interrupted: a
    manifest proves itself by its digest, and data counts only when a manifest names it. The server decides how durable a file
    is, and where a link leads; listings show no links. Connects when first used.

    Args:
        url: The location, as `scheme://…`.
        options: Arguments of the filesystem's constructor; they override those in the url.

    Raises:
        ValueError: If fsspec does not know the scheme, its implementation is not installed, or it needs more than is given.

    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/") if url.partition("://")[2] else url
        self._options = options
        scheme = url.partition("://")[0]
        try:
            self._kind: FileSystem = fsspec.get_filesystem_class(scheme)
        except (ValueError, ImportError) as exc:
            raise ValueError(
                f"{scheme}:// cannot be a storage: {exc}. Give a local path, s3://, gs://, az://, memory://, "
                "or the URL of another filesystem that fsspec knows"
            ) from exc
        if scheme in _WRAPPERS:  # their own errors name no URL, or are retried as a connection's
            raise ValueError(f"{scheme}:// is fsspec's wrapper of another filesystem: give that one's URL, or a local path")
        self._root: str = self._kind._strip_protocol(url).rstrip("/")  # noqa: SLF001 - as fsspec's open()
        given = apply_config(self._kind, {**self._kind._get_kwargs_from_urls(url), **options})  # noqa: SLF001 - as fsspec's open()
        try:
            inspect.signature(self._kind.__init__).bind(self._kind, **given)
        except TypeError as exc:
            raise ValueError(
                f"{url} cannot be a storage: {exc}. Give it in the URL, as in {scheme}://host/path, or in the settings of a "
                "RemoteFileSystem block"
            ) from exc
        own = {**given, "skip_instance_cache": True}  # fsspec's own, which a filesystem's constructor need not know
        self._connections: Connections[FileSystem] = Connections(lambda: with_limited_waits(self._kind(**own)))
        self._can_replace: bool | None = None
        self._rmdir_spares_files: bool | None = None

    @property
    def url(self) -> str:
        """The storage's location, without secrets."""
        return self._url

    def put_file(self, key: str, path: Path) -> Transfer:
        """Store the file at `path`."""

        def store(fs: FileSystem, target: str) -> Transfer:
            with path.open("rb", buffering=0) as source, create(fs, target) as file:
                return copy_and_digest(source, file)

        path.stat()  # raises if it is missing, before anything is created
        return self._put(key, store)

    def put_files(self, files: Mapping[str, str | Path], *, owned: bool = False) -> dict[str, Transfer]:
        """Store several files, as many concurrently as there are connections; their local copies stay."""
        del owned
        return dict(zip(files, for_each(files.items(), lambda file: self.put_file(file[0], Path(file[1]))), strict=True))

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Store `parts` as one object; the filesystem may buffer them in addition."""

        def store(fs: FileSystem, target: str) -> Transfer:
            digest = RunningDigest()
            with create(fs, target) as file:
                for part in digest.passed(parts):
                    write_all(file, part)
            return digest.transfer()

        return self._put(key, store)

    def digest(self, key: str) -> Transfer:
        """Return the size and digest of the object."""
        with self._reading(key) as fs, open_whole(fs, self._path(key)) as source:
            return digest_stream(source)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object.

        Raises:
            OSError: EFBIG for one of more than 1 GiB, which `get_bytes` would refuse.

        """
        if len(data) > MOST_RECORD_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), f"{self._url}/{key}")

        def store(fs: FileSystem, target: str) -> Transfer:
            if self._can_replace:
                with create(fs, target) as file:
                    write_all(file, data)
            else:  # in one call, which some filesystems make atomic
                make_folder(fs, target.rpartition("/")[0])
                fs.pipe_file(target, data)
            return Transfer(len(data), "")

        self._put(key, store)

    def get_file(self, key: str, path: Path, expected: int | None = None) -> Transfer:
        """Write the object to `path`, unless it has another size than `expected`, which costs a request."""
        if expected is not None and (size := self.size(key)) != expected:
            return Transfer(size, "")
        with self._reading(key) as fs, open_whole(fs, self._path(key)) as source, path.open("wb", buffering=0) as target:
            return copy_and_digest(source, target)

    def get_bytes(self, key: str) -> bytes:
        """Return a small object.

        Raises:
            MalformedRecordError: If it has more than 1 GiB: it is not small, and would fill the memory.

        """
        with self._reading(key) as fs:
            return read_whole(fs, self._path(key), MOST_RECORD_BYTES)

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        """Copy the object's bytes from `start` on into `into`, and return their number."""
        with self._reading(key) as fs:
            data = read_range(fs, self._path(key), start, len(into))
        into[: len(data)] = data
        return len(data)

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        """Yield the files below `prefix`; reads the whole listing first, for which splits are no help."""
        del splits
        for key, info in sorted(self._find(prefix).items()):
            if (after is None or key > after) and not is_unlisted(key.rpartition("/")[2]):
                yield ObjectInfo(key, info["size"], _modified_s(info))

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the directories directly below `prefix`, by one listing of it."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        try:
            with self._connected(prefix) as fs:
                found: list[dict[str, Any]] = fs.ls(f"{self._root}/{prefix}".rstrip("/") or "/", detail=True)
        except FileNotFoundError:
            return
        for info in found:
            if info["type"] == "directory":
                yield info["name"].rstrip("/").rpartition("/")[2]

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        with self._reading(key) as fs:
            info = look_up(fs, self._path(key))
            if info.get("type", "file") != "file":
                raise FileNotFoundError(key)
        size: int = info["size"]
        return size

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, and the directories that become empty if `rmdir` refuses one that is not, which is tried once.

        Costs a request for each object, as many concurrently as there are connections.
        """
        paths_in: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            path = self._path(key)
            paths_in[path.rpartition("/")[0]].append(path)
        for folder, paths in paths_in.items():
            for_each(paths, self._remove)
            with self._connected(folder) as fs:
                remove_empty(fs, folder, self._root, self._may_remove)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError), self._reading(path.removeprefix(f"{self._root}/")) as fs:
            _remove(fs, path)

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Remove the temporary files of interrupted puts, and the directories that become empty.

        A short file under its own name is deleted with its checkpoint's data.
        """
        newest_s = time.time() - older_than_s
        found = self._find(prefix).items()
        left = [key for key, info in found if is_temporary(key.rpartition("/")[2]) and 0 < _modified_s(info) <= newest_s]
        self.delete(left)

    def reopened(self) -> "FsspecStorage":
        """Return this storage with a new connection."""
        return FsspecStorage(self._url, self._options)

    def local_path(self, key: str) -> Path | None:
        """Return None: files behind fsspec are read through it."""
        del key
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _put(self, key: str, store: Callable[[FileSystem, str], Transfer]) -> Transfer:
        target = self._path(key)
        folder = target.rpartition("/")[0]
        with self._connected(key) as fs:
            if self._can_replace is None:
                make_folder(fs, folder)
                self._can_replace = can_replace(fs, folder)
            path = f"{folder}/{temporary_name()}" if self._can_replace else target
            try:
                stored = store(fs, path)
                require_whole(fs, path, stored.bytes)
                if path != target:
                    fs.mv(path, target)
            except BaseException:
                if path != target:
                    with suppress(Exception):  # the first error counts; the file is removed once it is old
                        fs.rm_file(path)
                raise
        return stored

    def _may_remove(self, fs: FileSystem, folder: str) -> bool:
        if self._rmdir_spares_files is None:
            self._rmdir_spares_files = rmdir_spares_files(fs, folder)
        return self._rmdir_spares_files

    def _find(self, prefix: str) -> dict[str, dict[str, Any]]:
        if prefix:
            check_key(prefix.removesuffix("/"))
        with self._connected(prefix) as fs:
            found = find_files(fs, f"{self._root}/{prefix}".rstrip("/"))
        infos = {path[len(self._root) :].lstrip("/"): info for path, info in found.items()}
        return {key: info for key, info in infos.items() if key.startswith(prefix)}

    @contextmanager
    def _reading(self, key: str) -> Iterator[FileSystem]:
        """Yield a connection, and report a directory as missing, as an object store does."""
        with self._connected(key) as fs:
            try:
                yield fs
            except OSError as exc:
                if exc.errno is None and fs.isdir(self._path(key)):  # SFTP reports only "Failure" for it
                    raise FileNotFoundError(key) from exc
                raise

    @contextmanager
    def _connected(self, key: str) -> Iterator[FileSystem]:
        """Yield a connection, and translate a filesystem's errors into those of the Storage protocol.

        Those that quote a filesystem's text have no cause: a traceback would show the token in the URL of a request (WebHDFS).
        """
        where = f"{self._url}/{key}"
        try:
            with self._connections.lent() as fs:
                fs.invalidate_cache()  # FTP's cache would show files that another client has replaced or removed
                yield fs
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:  # a directory is no object
            raise FileNotFoundError(f"{where} does not exist") from exc
        except PermissionError as exc:
            raise _refused(where, without_secrets(str(exc))) from None
        except (ValueError, TypeError, NotImplementedError, CheckpointError):
            raise
        except ImportError as exc:
            raise ValueError(f"{self._url} cannot be a storage: {exc}; install what its filesystem needs") from exc
        except Exception as exc:
            if _has_clear_number(exc):
                raise
            # A protocol library's own exceptions, and errors without a clear number: usually a lost connection.
            text = without_secrets(f"{type(exc).__name__}: {exc}") + _OF_HDFS.get(getattr(exc, "errno", None), "")
            # The status of WebDAV's HTTPError, and of HTTP clients' own errors.
            status = getattr(getattr(exc, "response", exc), "status_code", None)
            if status == HTTPStatus.INSUFFICIENT_STORAGE:
                raise full_storage(text, where) from None
            if _LOGIN_REFUSED.match(text) or status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise _refused(where, text) from None
            if text == _SFTP_FAILURE:
                text += " (SFTP servers give no other reason on a full or read-only disk)"
            raise StorageError(f"{where}: {text}") from None


def _has_clear_number(error: Exception) -> bool:
    """Return whether an error has a number that tells what to do, as those of this machine's system, which name a file, do."""
    if not isinstance(error, OSError) or error.errno is None or isinstance(error, socket.gaierror):
        return False
    return error.errno not in _OF_HDFS or error.filename is not None


def _refused(where: str, text: str) -> PermissionError:
    return PermissionError(f"access to {where} is refused: check the credentials and their rights ({text})")


def _remove(fs: FileSystem, path: str) -> None:
    """Remove a file.

    Raises:
        FileNotFoundError: If it does not exist, for which FTP has an error of its own, that of a missing permission, too, and
            libhdfs EIO.

    """
    try:
        fs.rm_file(path)
    except Exception as exc:
        if not isinstance(exc, OSError) or exc.errno == errno.EIO:
            look_up(fs, path)
        raise


def _modified_s(info: dict[str, Any]) -> float:
    """Return the time of the last change; filesystems name it differently, and some do not report it."""
    for name in ("mtime", "modified", "LastModified", "last_modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    if (ms := info.get("modificationTime")) is not None:  # WebHDFS
        return float(ms) / 1000
    if (found := _TIME_OF_FTP.match(str(info.get("modify")))) is not None:
        return datetime.strptime(f"{found[0]}+0000", "%Y%m%d%H%M%S%z").timestamp()
    return 0.0
