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
        self._free: dict[int, int | None] = {}  # by device
        self._taken: dict[int, int] = {}
        self._last: tuple[Way, int, int] | None = None  # with its descriptor and device: small files share a directory

    def take(self, way: Way, count: int) -> None:
        """Count `count` more bytes as taken on the filesystem of `way`'s last directory.

        Raises:
            OSError: ENOSPC, with the directory, if more bytes are taken than were free.

        """
        device = self._device_of(way)
        free = self._free[device]
        self._taken[device] = taken = self._taken.get(device, 0) + count
        if free is not None and taken > free:
            told = f"{os.strerror(errno.ENOSPC)} ({taken} bytes needed, {free} free)"
            raise OSError(errno.ENOSPC, told, str(way.path("")))

    def _device_of(self, way: Way) -> int:
        if self._last is not None and self._last[:2] == (way, way.folder):
            return self._last[2]
        device = os.fstat(way.folder).st_dev
        if device not in self._free:
            filesystem = os.statvfs(way.folder)
            self._free[device] = filesystem.f_bavail * filesystem.f_frsize if filesystem.f_blocks else None
        self._last = way, way.folder, device
        return device
