"""A folder of the local filesystem as a storage that survives a power cut."""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .digest import copy_and_digest, write_and_digest
from .keys import check_key, is_temporary, temporary_name
from .storage import ObjectInfo, Transfer

_MANY_DELETES = 100  # more do not hit one put; where no folder can ever be made, as in /proc, it must end


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
        """Copy the file at `path`; durable when this returns.

        Raises:
            OSError: ENOSPC before anything is written, if there is no space for it.

        """
        with path.open("rb", buffering=0) as source:
            self._require_space(os.fstat(source.fileno()).st_size)
            return self._write(key, lambda target: copy_and_digest(source, target))

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Write `parts` from memory; durable when this returns."""
        self._require_space(sum(part.nbytes for part in parts))
        return self._write(key, lambda target: write_and_digest(parts, target))

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object; a reader sees the old one or the new one, whole."""

        def write(target: BinaryIO) -> Transfer:
            target.write(data)
            return Transfer(len(data), "")

        self._write(key, write)

    def get_file(self, key: str, path: Path) -> Transfer:
        """Copy the object to `path`."""
        with _objects_only():
            source = self._path(key).open("rb", buffering=0)
        with source, path.open("wb", buffering=0) as target:
            return copy_and_digest(source, target)

    def get_bytes(self, key: str) -> bytes:
        """Return a small object."""
        with _objects_only():
            return self._path(key).read_bytes()

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        """Read into `into` from `start` on; returns how many bytes there were."""
        with _objects_only(), self._path(key).open("rb", buffering=0) as source:
            source.seek(start)
            done = 0
            while done < len(into) and (count := source.readinto(into[done:])):
                done += count
        return done

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the files below `prefix`, ordered by their whole key; a link to a folder is not followed.

        Raises:
            PermissionError: If `prefix` itself leads out of the storage through a link; an empty listing would look like a
                run without checkpoints.

        """
        folder = self._path(prefix.removesuffix("/")) if prefix else self._root
        place = folder.resolve()
        if not place.is_relative_to(self._root.resolve()):
            raise PermissionError(f"{folder} leads out of the storage {self._root} to {place}: give that as the storage")
        yield from _walk(folder, prefix, after)

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        path = self._path(key)
        with _objects_only():
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(f"{path} is no file")
        return status.st_size

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, and the folders that this empties."""
        folders = set()
        for key in keys:
            path = self._path(key)
            with suppress(FileNotFoundError), _objects_only():
                path.unlink()
            folders.add(path.parent)
        for folder in folders:
            self._remove_empty(folder)

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Remove the temporary files of killed writers, and the folders that this empties."""
        newest_s = time.time() - older_than_s
        for folder, _, names in os.walk(self._path(prefix.removesuffix("/"))):
            for name in filter(is_temporary, names):
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # its writer lives and has finished
                    if path.stat().st_mtime <= newest_s:
                        path.unlink()
                        self._remove_empty(path.parent)

    def local_path(self, key: str) -> Path | None:
        """Return where `key` is."""
        return self._path(key.rstrip("/"))

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _write(self, key: str, write: Callable[[BinaryIO], Transfer]) -> Transfer:
        target = self._path(key)
        temporary = target.with_name(temporary_name())
        try:
            with self._create(temporary) as file:
                written = write(file)
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            with suppress(OSError):  # what went wrong first counts
                self._remove_empty(temporary.parent)
            raise
        with suppress(FileNotFoundError):  # the object was deleted at once, and its folder with it
            _sync_folder(target.parent)
        return written

    def _create(self, path: Path) -> BinaryIO:
        """Create a file for writing, and the folders above it: a concurrent delete may remove an empty one meanwhile."""
        for _ in range(_MANY_DELETES):
            with suppress(FileNotFoundError, FileExistsError):  # mkdir says the latter of a folder that has just gone
                _make_folder(path.parent)
                return path.open("xb", buffering=0)
        _make_folder(path.parent)
        return path.open("xb", buffering=0)

    def _require_space(self, needed_bytes: int) -> None:
        if not self._root.exists():  # the first put makes it
            return
        filesystem = os.statvfs(self._root)
        free_bytes = filesystem.f_bavail * filesystem.f_frsize
        if needed_bytes > free_bytes:
            raise OSError(
                errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({needed_bytes} bytes needed, {free_bytes} free)", str(self._root)
            )

    def _remove_empty(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError as exc:
                if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                    return
                raise
            folder = folder.parent


@contextmanager
def _objects_only() -> Iterator[None]:
    """Call a folder, and what would lie below a file, missing, as an object store does."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError) as exc:
        raise FileNotFoundError(f"{exc.filename} is no file") from exc


def _make_folder(folder: Path) -> None:
    """Make `folder` and those above it, each synced into its parent: a lost one would take all that is below along."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


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
        elif (after is None or key > after) and not is_temporary(name) and entry.is_file(follow_symlinks=False):
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
