"""Files stored together: several small ones for the price of one sync, and the caller's own that may be linked."""

import errno
import io
import os
import stat
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from prefect_torch.ckpt.storage.digest import digest_file
from prefect_torch.ckpt.storage.machine.mounts import filesystem_of
from prefect_torch.ckpt.storage.protocol import Transfer

from .copies import copy_file, naming_if_full, read_small, require_whole, write_small
from .free_space import FreeSpace
from .root_folder import RootFolder, Way
from .syncing import GroupSync, check_written, version_of

if TYPE_CHECKING:
    from typing_extensions import Self

_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}


def store_group(root: RootFolder, files: Mapping[str, str | Path], *, owned: bool) -> dict[str, Transfer]:
    """Store files by key, all durable when this returns, and return their sizes and digests.

    They are written under their final names, which saves a rename for each: a killed process may leave any part of them.
    After an error none of them is left.

    Args:
        root: The storage's directory.
        files: The path of each file, by its key.
        owned: Whether a file may get a second name (a hard link) instead of being copied: the caller removes the first one
            before anybody writes to it again.

    """
    by_folder: dict[str, dict[str, str | Path]] = defaultdict(dict)
    for key, path in files.items():
        folder, _, name = key.rpartition("/")
        by_folder[folder][name] = path
    with _Group(root, len(files)) as group:
        for folder, named in by_folder.items():
            group.store(folder, named, owned=owned)
        group.finish()
    return {key: group.stored[key] for key in files}


@dataclass(frozen=True, slots=True)
class _Folder:
    """A directory to store files in.

    Attributes:
        key: Its key; "" for the storage itself.
        way: The open directory.
        is_covered: Whether a sync of the filesystem will make its files durable.

    """

    key: str
    way: Way
    is_covered: bool

    def create(self, name: str) -> int:
        """Create the file `name`, and return a descriptor for writing it."""
        try:
            return self.way.create(name)
        except FileExistsError:  # of an earlier try; a process may read it, so it is not overwritten
            self.way.unlink(name)
            return self.way.create(name)

    def link(self, name: str, path: Path) -> bool:
        """Give the file at `path` the second name `name`; return whether it can have one, which it cannot across two mounts."""
        link = partial(os.link, path, name, dst_dir_fd=self.way.folder, follow_symlinks=False)
        try:
            try:
                link()
            except FileExistsError:  # of an earlier try
                self.way.unlink(name)
                link()
        except OSError as exc:
            if exc.errno not in _CANNOT_LINK and not self._is_refused_by_fuse(exc):
                raise
            return False
        return True

    def _is_refused_by_fuse(self, error: OSError) -> bool:
        """Return whether `error` is EIO on FUSE: rclone's mounts, which do not support links, return it for each."""
        return error.errno == errno.EIO and (filesystem_of(self.way.folder) or "").startswith("fuse")


class _Group:
    """The state of one group: the stored files, and those still to be linked."""

    def __init__(self, root: RootFolder, num_files: int) -> None:
        self.stored: dict[str, Transfer] = {}
        self._root = root
        self._sync = GroupSync(num_files)
        self._space = FreeSpace()
        self._written: dict[str, list[str]] = defaultdict(list)
        self._links: dict[str, dict[str, Path]] = defaultdict(dict)
        self._uncovered: list[str] = []

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._sync.close()
        if kind is not None:
            self._discard()

    def store(self, key: str, named: Mapping[str, str | Path], *, owned: bool) -> None:
        """Write the files of one directory, or find out which may be linked into it."""
        with self._root.make(key) as way:
            folder = _Folder(key, way, self._sync.covers(way))
            if not folder.is_covered:
                self._uncovered.append(key)
            left = {name: path for name, path in named.items() if not (owned and self._take(folder, name, Path(path)))}
            self._write(folder, left)

    def _take(self, folder: _Folder, name: str, path: Path) -> bool:
        """Digest a file to link, and return whether it may be linked; else it is to be copied."""
        check_written(path)
        if not _is_the_callers_alone(folder.way, path.lstat()) or not _has_access_of(folder.way, path):
            return False
        try:
            os.utime(path)  # garbage collection goes by an object's time, which must be that of its put
            _let_read(folder.way, path)
        except OSError:  # some mounts refuse it; a copy has the right time and mode
            return False
        before = path.lstat()
        if not folder.is_covered:
            self._sync.begin(path)
        taken = digest_file(path)
        if version_of(path.lstat()) != version_of(before):  # somebody still writes to it: a copy will match its digest
            return False
        self._links[folder.key][name] = path
        self._keep(folder, name, taken)
        return True

    def _write(self, folder: _Folder, named: Mapping[str, str | Path]) -> None:
        """Write copies of files into one directory; what a file costs counts ten thousand times."""
        name, written, space = "", self._written[folder.key], self._space.of(folder.way)

        def target_path() -> Path:
            return folder.way.path(name)

        with naming_if_full(target_path):
            for name, path in named.items():
                written.append(name)
                if (data := read_small(path)) is not None:
                    space.take(len(data))
                    stored = write_small(data, folder.create(name), target_path)
                else:
                    with io.FileIO(path) as source:
                        space.take(os.fstat(source.fileno()).st_size)
                        with io.FileIO(folder.create(name), "w") as target:
                            stored = copy_file(source, target)
                            require_whole(target.fileno(), stored, target_path)
                if not folder.is_covered:
                    self._sync.begin(target_path())
                self._keep(folder, name, stored)

    def _keep(self, folder: _Folder, name: str, stored: Transfer) -> None:
        self.stored[f"{folder.key}/{name}" if folder.key else name] = stored

    def finish(self) -> None:
        """Make the files durable, then link those that may be linked, then make the names durable."""
        try:
            self._sync.wait()
        except OSError:  # of whatever file of this filesystem
            for path in chain.from_iterable(named.values() for named in self._links.values()):
                self._sync.begin(path)
            raise
        for key, named in self._links.items():
            with self._root.make(key) as way:
                folder = _Folder(key, way, key not in self._uncovered)
                for name, path in named.items():
                    if folder.link(name, path):
                        self._written[key].append(name)
                    else:
                        self._write(folder, {name: path})
        for key in self._uncovered:
            with self._root.make(key) as way:
                way.sync()
        if self._links:
            self._sync.wait()

    def _discard(self) -> None:
        """Remove the written files."""
        for key, names in self._written.items():
            with suppress(OSError), self._root.make(key) as way:  # the first error counts
                for name in names:
                    with suppress(OSError):
                        way.unlink(name)
                way.remove_if_empty()


def _is_the_callers_alone(way: Way, status: os.stat_result) -> bool:
    """Return whether a file is the caller's alone, on the same filesystem; a link or a file with a second name is not."""
    is_alone = stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid()
    return is_alone and status.st_dev == os.fstat(way.folder).st_dev


def _has_access_of(way: Way, path: Path) -> bool:
    """Return whether a file has the group, and its directory the default access list, that a copy of it would get."""
    folder = os.fstat(way.folder)
    is_of_group = not folder.st_mode & stat.S_ISGID or path.lstat().st_gid == folder.st_gid
    return is_of_group and _default_access(f"/proc/self/fd/{way.folder}") == _default_access(path.parent)


def _let_read(way: Way, path: Path) -> None:
    """Let those read a file who may read its directory, and hence a copy: safetensors and tempfile make it with mode 0600."""
    mode = path.stat().st_mode
    if lacking := os.fstat(way.folder).st_mode & (stat.S_IRGRP | stat.S_IROTH) & ~mode:
        path.chmod(stat.S_IMODE(mode) | lacking)


def _default_access(folder: "str | Path") -> bytes | None:
    """Return the access list of new files in a directory (acl(5)); None without one, and outside of Linux."""
    if sys.platform == "linux":
        with suppress(OSError):
            return os.getxattr(folder, "system.posix_acl_default")
    return None
