"""The space of a filesystem, asked for before a copy is begun: one that does not fit fills the disk for all others."""

import errno
import os

from .root_folder import Way


class FreeSpace:
    """The bytes that filesystems had free when each was first asked for, and those that were taken of them since.

    Directories below one root may be on several filesystems. One that does not tell its size, as a tmpfs without a limit or
    some of FUSE's, has any space: all its numbers are 0 (https://man7.org/linux/man-pages/man3/statvfs.3.html).
    """

    def __init__(self) -> None:
        self._free: dict[int, int | None] = {}  # by device
        self._taken: dict[int, int] = {}
        self._last: tuple[Way, int, int] | None = None  # with its descriptor and device: small files share a directory

    def take(self, way: Way, count: int) -> None:
        """Count `count` bytes more as taken in the last directory of `way`.

        Raises:
            OSError: ENOSPC if there is no space for all that is taken, with the directory.

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
