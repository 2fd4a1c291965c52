"""A folder of the local filesystem as a storage that survives a power cut."""

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from .digest import copy_and_digest
from .keys import check_key
from .storage import ObjectInfo, Transfer

_TEMPORARY = ".tmp-"


class LocalStorage:
    """Objects as files below `root`.

    What was put is on the disk when the call returns: written under a temporary name, synced, renamed, and its folder
    synced (https://lwn.net/Articles/457667/). Works on any filesystem that all ranks mount, NFS among them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        """The folder."""
        return str(self._root)

    def put_file(self, key: str, path: Path) -> Transfer:
        """Copy the file at `path`; durable when this returns."""
        with path.open("rb", buffering=0) as source:
            return self._write(key, lambda target: copy_and_digest(source, target))

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object; a reader sees the old one or the new one, whole."""

        def write(target: BinaryIO) -> Transfer:
            target.write(data)
            return Transfer(len(data), "")

        self._write(key, write)

    def get_file(self, key: str, path: Path) -> Transfer:
        """Copy the object to `path`."""
        with self._path(key).open("rb", buffering=0) as source, path.open("wb", buffering=0) as target:
            return copy_and_digest(source, target)

    def get_bytes(self, key: str) -> bytes:
        """Return a small object."""
        return self._path(key).read_bytes()

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the files below `prefix`, ordered by their whole key."""
        folder = self._root / prefix if prefix else self._root
        yield from _walk(folder, prefix, after)

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        return self._path(key).stat().st_size

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, and the folders that this empties."""
        folders = set()
        for key in keys:
            path = self._path(key)
            path.unlink(missing_ok=True)
            folders.add(path.parent)
        for folder in folders:
            self._remove_empty(folder)

    def local_path(self, key: str) -> Path | None:
        """Return where `key` is."""
        return self._path(key.rstrip("/"))

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _write(self, key: str, write: Callable[[BinaryIO], Transfer]) -> Transfer:
        target = self._path(key)
        temporary = target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            with self._create(temporary) as file:
                written = write(file)
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)
        return written

    def _create(self, path: Path) -> BinaryIO:
        """Create a file for writing, and the folders above it: a concurrent delete may remove an empty one meanwhile."""
        while True:
            self._make_folder(path.parent)
            try:
                return path.open("xb", buffering=0)
            except FileNotFoundError:
                continue

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        if folder != self._root:
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        _sync_folder(folder.parent)

    def _remove_empty(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError as exc:
                if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    return
                raise
            folder = folder.parent


def _walk(folder: Path, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    # A folder sorts as its name with the "/" that its keys continue with: "a-b" comes before "a/b".
    named = sorted((f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name, entry) for entry in entries)
    for name, entry in named:
        key = f"{prefix}{name}"
        if name.endswith("/"):
            if after is None or key > after or after.startswith(key):
                yield from _walk(Path(entry.path), key, after)
        elif (after is None or key > after) and not name.startswith(_TEMPORARY) and entry.is_file(follow_symlinks=False):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted since the scan
                continue
            yield ObjectInfo(key, status.st_size, status.st_mtime)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # some network filesystems cannot sync a folder and need not
            raise
    finally:
        os.close(descriptor)
