"""A directory of the local filesystem as a storage that survives a power cut."""

import errno
import io
import os
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect_torch.ckpt.errors import MalformedRecordError, StorageError
from prefect_torch.ckpt.storage.digest import copy_and_digest, digest_stream, write_all
from prefect_torch.ckpt.storage.keys import check_key, is_temporary, temporary_name
from prefect_torch.ckpt.storage.protocol import MOST_RECORD_BYTES, ObjectInfo, Splits, Transfer

from .copies import copy_file, naming_if_full, require_whole, write_and_digest
from .free_space import FreeSpace
from .groups import store_group
from .reserve import is_reserve
from .root_folder import RootFolder, Way, despite_deletes
from .walk import MOST_LEVELS, walk


class LocalStorage:
    """Objects as files below `root`.

    A put is on the disk when the call returns: written under a temporary name, synced, renamed, and its directory synced
    (https://lwn.net/Articles/457667/). Works on any filesystem that all ranks mount, NFS among them.

    Nothing outside of `root` is read, written or deleted: if a link below it leads out, every verb raises PermissionError
    with the target; a listing leaves such links out. A link that stays inside is followed, by a put and a deletion only in the
    place of the first name, a run's. `root` itself may be a link.
    """

    def __init__(self, root: Path) -> None:
        self._root = RootFolder(root)
        self._rereads = False

    @property
    def url(self) -> str:
        """The directory."""
        return str(self._root.path)

    def put_file(self, key: str, path: Path) -> Transfer:
        """Copy the file at `path`; durable when this returns.

        Raises:
            OSError: ENOSPC before anything is written, if there is no space for it.

        """
        with path.open("rb", buffering=0) as source:
            return self._write(key, os.fstat(source.fileno()).st_size, lambda target: copy_file(source, target))

    def put_files(self, files: Mapping[str, str | Path], *, owned: bool = False) -> dict[str, Transfer]:
        """Copy files, or link them if they are `owned` and on this filesystem; all are durable when this returns.

        From 64 files on, they are made durable by one sync of the filesystem, which also waits for the writes of others.

        Raises:
            OSError: ENOSPC before a file is copied for which there is no space; the others are removed.

        """
        for key in files:
            check_key(key)
        return store_group(self._root, files, owned=owned)

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Write `parts` from memory; durable when this returns."""
        return self._write(key, sum(part.nbytes for part in parts), lambda target: write_and_digest(parts, target))

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object; a reader sees the old one or the new one, whole.

        Raises:
            OSError: EFBIG for one of more than 1 GiB, which `get_bytes` would refuse.

        """
        if len(data) > MOST_RECORD_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self._path(key)))

        def write(target: io.FileIO) -> Transfer:
            write_all(target, data)
            return Transfer(len(data), "")

        self._write(key, None, write)

    def get_file(self, key: str, path: Path, expected: int | None = None) -> Transfer:
        """Copy the object to `path`, unless it has another size than `expected`; what it grows meanwhile is left out."""
        with self._open(key) as source:
            size = os.fstat(source.fileno()).st_size
            if expected not in (None, size):
                return Transfer(size, "")
            with path.open("wb", buffering=0) as target:
                return copy_and_digest(source, target, size)

    def digest(self, key: str) -> Transfer:
        """Return the size and digest of the object."""
        with self._open(key) as source:
            return digest_stream(source)

    def get_bytes(self, key: str) -> bytes:
        """Return a small object.

        Raises:
            MalformedRecordError: If it has more than 1 GiB: it is not small, and would fill the memory.

        """
        with self._open(key) as source:
            size = os.fstat(source.fileno()).st_size
            if size > MOST_RECORD_BYTES:
                raise MalformedRecordError(f"{self._path(key)} has {size} bytes, and a record {MOST_RECORD_BYTES} at most")
            return source.readall()

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        """Read into `into` from `start` on, and return the number of bytes."""
        with self._open(key) as source:
            source.seek(start)
            done = 0
            while done < len(into) and (count := source.readinto(into[done:])):
                done += count
        return done

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        """Yield the files below `prefix`, sorted by their whole key; a link below it is not followed, and no split needed.

        What is nested more than 128 levels deep is left out, with a warning: no report has stored it.

        Raises:
            PermissionError: If `prefix` itself leads out of the storage through a link; an empty listing would look like a
                run without checkpoints.

        """
        del splits
        try:
            with self._root.open(_names(prefix)) as way:
                folder = way.listed()
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from walk(self._root.path, folder, prefix, after)

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the directories directly below `prefix`; reads none of them, and follows no link."""
        try:
            with self._root.open(_names(prefix)) as way:
                folder = way.listed()
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            with os.scandir(folder) as entries:
                yield from [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        finally:
            os.close(folder)

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        if self._rereads:  # clients of file servers request the size at an open; until then it may be some seconds old
            with self._open(key) as file:
                return os.fstat(file.fileno()).st_size
        with _objects_only(self._path(key)):
            way, name = self._root.reach(check_key(key))
            with way:
                status = way.status(name)
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(f"{self._path(key)} is no file")
        return status.st_size

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, and the directories that become empty; a link in an object's place is removed, not its target.

        Raises:
            PermissionError: If a directory on the way is a link that leads out, or lies below the first name; all other objects
                are removed first.

        """
        names_in: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            folder, _, name = check_key(key).rpartition("/")
            names_in[folder].append(name)
        self._unlink((_names(folder), names) for folder, names in names_in.items())

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Remove the temporary files of killed writers, and the directories that become empty.

        Raises:
            PermissionError: If one may not be removed; all others are removed first.

        """
        newest_s = time.time() - older_than_s
        left_in: dict[str, list[str]] = defaultdict(list)
        with suppress(FileNotFoundError), self._root.open(_names(prefix)) as top:
            for folder, below, names, descriptor in os.fwalk(".", dir_fd=top.folder):
                if folder.count("/") >= MOST_LEVELS - 1:  # as in a listing
                    below.clear()
                for name in (it for it in names if is_temporary(it) and not is_reserve(it)):
                    with suppress(FileNotFoundError):  # its writer is alive and has finished
                        if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mtime <= newest_s:
                            left_in[folder].append(name)
        self._unlink(([*_names(prefix), *Path(folder).parts], names) for folder, names in left_in.items())

    def _unlink(self, names_in: Iterable[tuple[Sequence[str], Sequence[str]]]) -> None:
        """Remove files from directories; the first refusal is raised once all others are removed."""
        refused: PermissionError | None = None
        for folder, names in names_in:
            try:
                with suppress(FileNotFoundError, NotADirectoryError), self._root.open_own(folder) as way:
                    _unlink(way, names)
            except PermissionError as exc:
                refused = refused or exc
        if refused is not None:
            raise refused

    def reopened(self) -> "LocalStorage":
        """Return this storage, which then reads each file from the disk or its server instead of from the page cache."""
        other = LocalStorage(self._root.path)
        other._rereads = True
        return other

    def local_path(self, key: str) -> Path | None:
        """Return the path of `key`.

        Raises:
            PermissionError: If a link leads out of the storage.

        """
        path = self._path(key.rstrip("/"))
        with suppress(FileNotFoundError, NotADirectoryError), self._root.reach(key.rstrip("/"))[0]:
            pass
        return path

    def _path(self, key: str) -> Path:
        return self._root.path / check_key(key)

    def _open(self, key: str) -> io.FileIO:
        with _objects_only(self._path(key)):
            way, name = self._root.reach(check_key(key))
            with way:
                file = way.open(name, "rb")
        if self._rereads and hasattr(os, "posix_fadvise"):  # wrong bytes of the first read are still in the cache
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file

    def _write(self, key: str, size: int | None, write: Callable[[io.FileIO], Transfer]) -> Transfer:
        """Store the bytes that `write` writes, if there is space for `size` bytes; None, for small objects, skips the check."""
        *folders, name = check_key(key).split("/")
        temporary = temporary_name()
        way, file = self._create(folders, temporary)
        with way:
            try:
                with naming_if_full(lambda: self._path(key)), file:
                    if size is not None:
                        FreeSpace().of(way).take(size)
                    written = write(file)
                    os.fsync(file.fileno())
                    require_whole(file.fileno(), written, lambda: self._path(key))
                self._rename(way, temporary, name)
            except BaseException:
                with suppress(OSError):  # the first error counts
                    _unlink(way, [temporary])
                raise
            with suppress(FileNotFoundError):  # the object was deleted immediately, and its directory with it
                way.sync()
        return written

    def _rename(self, way: Way, temporary: str, name: str) -> None:
        """Give a file that was just written its name.

        Raises:
            StorageError: If it is gone, so that another try must write it again. An NFS server whose answer was lost as it
                restarted finds no file when the request is repeated: it has renamed it.

        """
        try:
            way.replace(temporary, name)
        except FileNotFoundError as exc:
            raise StorageError(f"{way.path(name)}: what was written for it was gone before it had its name") from exc

    def _create(self, folders: Sequence[str], name: str) -> tuple[Way, io.FileIO]:
        """Create a file, and its directories."""

        def create() -> tuple[Way, io.FileIO]:
            way = self._root.open_own(folders, make=True)
            try:
                return way, way.open(name, "xb")
            except BaseException:
                with way, suppress(OSError):
                    way.remove_if_empty()
                raise

        return despite_deletes(create)


@contextmanager
def _objects_only(path: Path) -> Iterator[None]:
    """Report a directory, a path below a file, and a name that is too long for a file as missing, as an object store does."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError) as exc:
        raise FileNotFoundError(f"{path} is no file") from exc
    except OSError as exc:
        if exc.errno != errno.ENAMETOOLONG:
            raise
        raise FileNotFoundError(f"{path} is too long for a file's name") from exc


def _names(prefix: str) -> list[str]:
    return check_key(prefix.removesuffix("/")).split("/") if prefix else []


def _unlink(way: Way, names: Iterable[str]) -> None:
    for name in names:
        with suppress(FileNotFoundError, IsADirectoryError):
            way.unlink(name)
    way.remove_if_empty()
