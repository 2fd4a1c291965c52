"""Files stored together: several small ones for the price of one sync, and those of the caller's that may be linked."""

import errno
import io
import os
import stat
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_torch.ckpt.storage.digest import digest_file
from prefect_torch.ckpt.storage.protocol import Transfer

from .copies import copy_file, read_small, require_whole, write_small
from .free_space import FreeSpace
from .root_folder import RootFolder, Way
from .syncing import GroupSync

if TYPE_CHECKING:
    from typing_extensions import Self

_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


def store_group(root: RootFolder, files: Mapping[str, Path], *, owned: bool) -> dict[str, Transfer]:
    """Store files by key, all durable when this returns, and return their sizes and digests.

    They are written under their own names, and a rename for each is saved: a killed process leaves any part of them. After
    an error nothing of them is left.

    Args:
        root: The storage's directory.
        files: The path of each file, by its key.
        owned: Whether a file may get a second name (a hard link) instead of being copied: the caller removes the first one
            before anybody writes to it again.

    """
    by_folder: dict[str, dict[str, Path]] = defaultdict(dict)
    for key, path in files.items():
        folder, _, name = key.rpartition("/")
        by_folder[folder][name] = path
    with _Group(root, len(files)) as group:
        for folder, named in by_folder.items():
            group.store(folder, named, owned=owned)
        group.finish()
    return {key: group.stored[key] for key in files}


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of one file to store.

    Attributes:
        way: Its directory.
        name: Its name there.
        is_covered: Whether a sync of the filesystem will make it durable.

    """

    way: Way
    name: str
    is_covered: bool

    def path(self) -> Path:
        return self.way.path(self.name)


class _Group:
    """The state of one group: what is stored, and what is still to be linked."""

    def __init__(self, root: RootFolder, num_files: int) -> None:
        self.stored: dict[str, Transfer] = {}
        self._root = root
        self._sync = GroupSync(num_files)
        self._space = FreeSpace(root.path)
        self._written: dict[str, list[str]] = defaultdict(list)
        self._links: dict[str, dict[str, Path]] = defaultdict(dict)
        self._uncovered: list[str] = []

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._sync.close()
        if kind is not None:
            self._discard()

    def store(self, folder: str, named: Mapping[str, Path], *, owned: bool) -> None:
        """Write the files of one directory, or find out which may be linked into it."""
        with self._root.make(folder) as way:
            is_covered = self._sync.covers(way)
            if not is_covered:
                self._uncovered.append(folder)
            prefix = f"{folder}/" if folder else ""
            for name, path in named.items():
                place = _Place(way, name, is_covered)
                taken = self._take(folder, place, path) if owned else None
                self.stored[f"{prefix}{name}"] = taken or self._write(folder, place, path)

    def _take(self, folder: str, place: _Place, path: Path) -> Transfer | None:
        """Return the digest of a file to link; None for one to copy."""
        if not _is_the_callers_alone(place.way, path.lstat()):
            return None
        os.utime(path)  # an object's time is that of its put, which is what garbage collection goes by
        before = path.lstat()
        self._begin_sync(place, path)
        taken = digest_file(path)
        if _version(path.lstat()) != _version(before):  # somebody still writes: a copy holds what its digest says
            return None
        self._links[folder][place.name] = path
        return taken

    def _write(self, folder: str, place: _Place, path: Path) -> Transfer:
        self._written[folder].append(place.name)
        if (data := read_small(path)) is not None:
            self._space.take(len(data))
            written = write_small(data, _create(place), place.path)
        else:
            with io.FileIO(path) as source:
                self._space.take(os.fstat(source.fileno()).st_size)
                with io.FileIO(_create(place), "w") as target:
                    written = copy_file(source, target)
                    require_whole(target.fileno(), written, place.path)
        self._begin_sync(place)
        return written

    def _begin_sync(self, place: _Place, source: Path | None = None) -> None:
        """Begin to make the bytes at `place`, or at `source`, durable, unless a sync of the filesystem will."""
        if not place.is_covered:
            self._sync.begin(source or place.path())

    def finish(self) -> None:
        """Make the files durable, then link those that may be linked, then make the names durable."""
        self._sync.wait()
        for folder, named in self._links.items():
            prefix = f"{folder}/" if folder else ""
            with self._root.make(folder) as way:
                for name, path in named.items():
                    place = _Place(way, name, folder not in self._uncovered)
                    if _link(place, path):
                        self._written[folder].append(name)
                    else:
                        self.stored[f"{prefix}{name}"] = self._write(folder, place, path)
        for folder in self._uncovered:
            with self._root.make(folder) as way:
                way.sync()
        if self._links:
            self._sync.wait()

    def _discard(self) -> None:
        """Remove what was written."""
        for folder, names in self._written.items():
            with suppress(OSError), self._root.make(folder) as way:  # the first error counts
                for name in names:
                    with suppress(OSError):
                        way.unlink(name)
                way.remove_if_empty()


def _create(place: _Place) -> int:
    try:
        return place.way.create(place.name)
    except FileExistsError:  # of an earlier try; it may be read, so it is not written over
        place.way.unlink(place.name)
        return place.way.create(place.name)


def _link(place: _Place, path: Path) -> bool:
    """Give the file at `path` a second name, and return whether that is possible: two mounts may be of one filesystem."""
    link = partial(os.link, path, place.name, dst_dir_fd=place.way.folder, follow_symlinks=False)
    try:
        try:
            link()
        except FileExistsError:  # of an earlier try
            place.way.unlink(place.name)
            link()
    except OSError as exc:
        if exc.errno not in _CANNOT_LINK:
            raise
        return False
    return True


def _is_the_callers_alone(way: Way, status: os.stat_result) -> bool:
    """Return whether a file is the caller's alone, on the same filesystem: a link's target and a second name are not ours."""
    is_alone = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()
    return is_alone and status.st_dev == os.fstat(way.folder).st_dev


def _version(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns
