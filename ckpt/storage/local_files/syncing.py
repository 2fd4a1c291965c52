"""Many files made durable together, by one request to their filesystem where it can be trusted."""

import ctypes
import os
import platform
import re
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from prefect_torch.ckpt.errors import full_storage, is_of_full_disk
from prefect_torch.ckpt.storage.machine.mounts import filesystem_of

from .copies import naming_if_full
from .root_folder import Way

# syncfs() waits for the disk and reports failed writes on these alone: FUSE does not pass it on, network filesystems and
# overlays each do something else (https://man7.org/linux/man-pages/man2/sync.2.html).
_SYNCED_WHOLE = {"btrfs", "ext4", "f2fs", "xfs"}
_SINCE_LINUX = (5, 8)  # before, it did not report a failed write
_AT_ONCE = 8
_LEAST_FILES = 64  # fewer are synced one by one, without waiting for the writes of other programs
_unwritten: dict[tuple[int, int, int], bool] = {}  # whether a full disk was why, by the version of a file whose sync has failed


def version_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return what changes when a file is written or replaced."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_written(path: Path) -> None:
    """Raise if a sync of this file has failed in this process: the next one would succeed, though its data may be lost.

    Linux tells of a failed write once, and does not write again (https://lwn.net/Articles/752063/).

    Raises:
        OSError: If it did; that of a full disk if that was the reason.

    """
    was_full = _unwritten.get(version_of(path.lstat()))
    if was_full is not None:
        lost = f"the system could not write {path} to the disk, and may have lost its data: write the file anew"
        raise full_storage(lost, str(path)) if was_full else OSError(lost)


class GroupSync:
    """Makes the files of a group durable that are written from now on; to be closed.

    Args:
        num_files: The number of files in the group.

    """

    def __init__(self, num_files: int) -> None:
        self._is_large = num_files >= _LEAST_FILES
        self._filesystems: dict[int, int | None] = {}  # the descriptor of each that is synced as a whole, by its device
        self._syncing: list[Future[None]] = []
        self._open = ExitStack()
        self._pool = self._open.enter_context(ThreadPoolExecutor(_AT_ONCE, "prefect-torch-sync"))

    def close(self) -> None:
        """Release its descriptors and threads, once no sync is under way."""
        self._open.close()

    def covers(self, way: Way) -> bool:
        """Return whether `way`'s filesystem will be synced as a whole; call it before anything is written there.

        The sync reports the writes that failed since its descriptor was opened, which happens here.
        """
        device = os.fstat(way.folder).st_dev
        if device not in self._filesystems:
            is_whole = self._is_large and _has_syncfs() and filesystem_of(way.folder) in _SYNCED_WHOLE
            self._filesystems[device] = descriptor = way.listed() if is_whole else None
            if descriptor is not None:
                self._open.callback(os.close, descriptor)
        return self._filesystems[device] is not None

    def begin(self, path: Path) -> None:
        """Begin to sync a written file that no sync of a whole filesystem covers."""
        self._syncing.append(self._pool.submit(_sync_file, path))

    def wait(self) -> None:
        """Sync the filesystems that are synced as a whole, and wait for the syncs of single files."""
        for descriptor in self._filesystems.values():
            if descriptor is not None:
                _sync_filesystem(descriptor)
        for syncing in self._syncing:
            syncing.result()
        self._syncing.clear()


@cache
def _has_syncfs() -> bool:
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    is_recent = platform.system() == "Linux" and version is not None and (int(version[1]), int(version[2])) >= _SINCE_LINUX
    return is_recent and hasattr(ctypes.CDLL(None), "syncfs")


def _sync_filesystem(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming_if_full(lambda: path):  # a file server may report a full disk only now
            os.fsync(descriptor)
    except OSError as exc:
        _unwritten[version_of(os.fstat(descriptor))] = is_of_full_disk(exc)
        raise
    finally:
        os.close(descriptor)
