"""A little space that a directory keeps, to be given up part by part once the disk or the quota is full."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prefect_torch.ckpt.storage.keys import temporary_name
from prefect_torch.ckpt.storage.machine.mounts import filesystem_of

# Files, not one file: an inode may be all that is missing. Each is named as an unfinished file is, which is no object, is not
# listed and not copied, also by older versions; those remove it after an hour.
_NAMES = tuple(f".tmp-{number:016x}" for number in range(8))
_PART_BYTES = 32 * 2**10
_LEFT_BYTES = 2**20  # for others: with less beside it, the reserve itself would fill the disk


def is_reserve(name: str) -> bool:
    """Return whether `name` is that of a part of a reserve."""
    return name in _NAMES


def keep_reserve(folder: Path) -> None:
    """Write the missing parts if a mebibyte is left beside them; costs eight looks if none is missing.

    Nothing is synced: a reserve that a power cut takes is written again. On FUSE there is none: it may be a bucket.
    """
    with suppress(OSError):
        missing = [path for path in _paths(folder) if not _is_whole(path)]
        if not missing or (filesystem_of(folder) or "fuse").startswith("fuse"):
            return
        probe = folder / temporary_name()
        try:
            for path in missing:
                _write(path, _PART_BYTES)
            _write(probe, _LEFT_BYTES)  # free space by statvfs would not show a quota
        except OSError:
            _remove(missing)
            raise
        finally:
            _remove([probe])


def give_up_part(folder: Path) -> bool:
    """Remove a part, and return whether there was one."""
    for path in _paths(folder):
        with suppress(OSError):  # another process was faster, or it belongs to another user
            path.unlink()
            return True
    return False


def remove_reserve(folder: Path) -> None:
    """Remove all parts."""
    _remove(_paths(folder))


def _paths(folder: Path) -> Iterator[Path]:
    return (folder / name for name in _NAMES)


def _is_whole(path: Path) -> bool:
    try:
        return path.lstat().st_size == _PART_BYTES
    except FileNotFoundError:
        return False


def _write(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        left = memoryview(os.urandom(size))  # a filesystem that compresses would keep no space for zeros
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)  # NFS reports a full disk only now


def _remove(paths: "Iterator[Path] | list[Path]") -> None:
    for path in paths:
        with suppress(OSError):
            path.unlink()
