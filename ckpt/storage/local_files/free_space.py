"""The space of a filesystem, asked for before a copy is begun: one that does not fit fills the disk for all others."""

import errno
import os
from pathlib import Path


class FreeSpace:
    """The bytes that the filesystem of a directory had free at one moment, and those that were taken of them since.

    Args:
        root: The directory; one that does not exist, and will be created, has any space.

    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._free: int | None = None
        self._taken = 0
        if root.exists():
            filesystem = os.statvfs(root)
            self._free = filesystem.f_bavail * filesystem.f_frsize

    def take(self, count: int) -> None:
        """Count `count` bytes more as taken.

        Raises:
            OSError: ENOSPC if there is no space for all that is taken.

        """
        self._taken += count
        if self._free is not None and self._taken > self._free:
            told = f"{os.strerror(errno.ENOSPC)} ({self._taken} bytes needed, {self._free} free)"
            raise OSError(errno.ENOSPC, told, str(self._root))
