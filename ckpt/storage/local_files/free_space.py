"""The space of a filesystem, checked before a copy: one that does not fit would fill the disk for all others."""

import errno
import os

from .root_folder import Way


class FreeSpace:
    """The bytes that each filesystem had free when it was first used, and those taken since.

    Directories below one root may be on several filesystems. One that does not report its size, such as a tmpfs without a limit
    or some of FUSE's, counts as unlimited: all its numbers are 0 (https://man7.org/linux/man-pages/man3/statvfs.3.html).
    """

    def __init__(self) -> None:
        self._by_device: dict[int, FilesystemSpace] = {}

    def of(self, way: Way) -> "FilesystemSpace":
        """Return the space of the filesystem that `way`'s last directory is on."""
        device = os.fstat(way.folder).st_dev
        if device not in self._by_device:
            filesystem = os.statvfs(way.folder)
            free = filesystem.f_bavail * filesystem.f_frsize if filesystem.f_blocks else None
            self._by_device[device] = FilesystemSpace(free, str(way.path("")))
        return self._by_device[device]


class FilesystemSpace:
    """The space of one filesystem.

    Args:
        free: The bytes that were free when it was first used; None if it is unlimited.
        folder: A directory on it, for errors.

    """

    def __init__(self, free: int | None, folder: str) -> None:
        self._free = free
        self._taken = 0
        self._folder = folder

    def take(self, count: int) -> None:
        """Count `count` more bytes as taken.

        Raises:
            OSError: ENOSPC, with the directory, if more bytes are taken than were free.

        """
        self._taken += count
        if self._free is not None and self._taken > self._free:
            reason = f"{os.strerror(errno.ENOSPC)} ({self._taken} bytes needed, {self._free} free)"
            raise OSError(errno.ENOSPC, reason, self._folder)
