"""Any filesystem that fsspec knows as a storage: memory, SFTP, HDFS, WebDAV and more."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec
import fsspec.core
import xxhash

from .digest import copy_and_digest
from .errors import StorageError
from .keys import check_key
from .storage import ObjectInfo, Transfer


class FsspecStorage:
    """Objects as files of an fsspec filesystem.

    A put replaces a file in place, and may leave a short one behind when it is interrupted: a manifest proves itself by its
    digest, and data counts only when a manifest names it.

    Args:
        url: Where, as `scheme://…`.
        options: What the filesystem's constructor takes.

    Raises:
        ValueError: If fsspec does not know the scheme, or what implements it is not installed.

    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/") if url.partition("://")[2] else url
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
        except (ValueError, ImportError) as exc:
            raise ValueError(
                f"{url.partition('://')[0]}:// cannot be a storage: {exc}. Give a local path, s3://, gs://, az://, memory://, "
                "or the URL of another filesystem that fsspec knows"
            ) from exc
        self._root: str = root.rstrip("/")

    @property
    def url(self) -> str:
        """Where this is, without secrets."""
        return self._url

    def put_file(self, key: str, path: Path) -> Transfer:
        """Store the file at `path`."""
        target = self._path(key)
        with path.open("rb", buffering=0) as source, self._translated(key):
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            with self._fs.open(target, "wb") as file:
                return copy_and_digest(source, file)

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Store `parts` as one object; the filesystem may buffer them once more."""
        target = self._path(key)
        with self._translated(key):
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            with self._fs.open(target, "wb") as file:
                digest = xxhash.xxh3_128()
                for part in parts:
                    digest.update(part)
                    file.write(part)
        return Transfer(sum(len(part) for part in parts), digest.hexdigest())

    def get_file(self, key: str, path: Path) -> Transfer:
        """Write the object to `path`."""
        with self._translated(key):
            source = self._fs.open(self._path(key), "rb")
        with source, path.open("wb", buffering=0) as target, self._translated(key):
            return copy_and_digest(source, target)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object."""
        target = self._path(key)
        with self._translated(key):
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(target, data)

    def get_bytes(self, key: str) -> bytes:
        """Return a small object."""
        with self._translated(key):
            data: bytes = self._fs.cat_file(self._path(key))
        return data

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        """Copy the object's bytes from `start` on into `into`; returns how many there were."""
        with self._translated(key):
            data: bytes = self._fs.cat_file(self._path(key), start=start, end=start + len(into))
        into[: len(data)] = data
        return len(data)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the files below `prefix`, ordered by their whole key; reads the whole listing first."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        with self._translated(prefix):
            self._fs.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._fs.find(f"{self._root}/{prefix}".rstrip("/"), detail=True)
        for path in sorted(found):
            key = path[len(self._root) :].lstrip("/")
            if key.startswith(prefix) and (after is None or key > after):
                yield ObjectInfo(key, found[path]["size"], _modified_s(found[path]))

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        with self._translated(key):
            info = self._fs.info(self._path(key))
            if info.get("type", "file") != "file":
                raise FileNotFoundError(key)
        size: int = info["size"]
        return size

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        for key in keys:
            try:
                with self._translated(key):
                    self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                continue

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Do nothing: a short file lies under its own name and goes with its checkpoint's data."""

    def local_path(self, key: str) -> Path | None:
        """Return None: what fsspec reaches is read through it."""
        del key
        return None

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Raise what the Storage protocol promises for what a filesystem raises."""
        where = f"{self._url}/{key}"
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:  # a folder is no object
            raise FileNotFoundError(f"{where} does not exist") from exc
        except PermissionError as exc:
            raise PermissionError(f"access to {where} is refused: check the credentials and their rights ({exc})") from exc
        except (OSError, ValueError, TypeError, NotImplementedError):
            raise
        except Exception as exc:  # a protocol library's own classes: a lost connection more often than not
            raise StorageError(f"{where}: {type(exc).__name__}: {exc}") from exc


def _modified_s(info: dict[str, Any]) -> float:
    """Return the time of the last change; filesystems name it as they like, and some do not tell."""
    for name in ("mtime", "modified", "LastModified", "last_modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
