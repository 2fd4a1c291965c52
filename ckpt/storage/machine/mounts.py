"""The filesystem that a directory is on."""

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
# Other filesystems may be served by another machine, to which a lock of this one may be unknown (nolock, localflock, FUSE).
_OF_ONE_KERNEL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


def filesystem_of(device: int) -> str | None:
    """Return the kernel's name of the filesystem with the number `device` (`st_dev`), such as "ext4"; None if unknown."""
    mount = _mount_of(device)
    return None if mount is None else mount[0]


def is_local(folder: Path) -> bool:
    """Return whether `folder` is on a filesystem of this kernel alone, which no other machine sees; False if unknown."""
    return filesystem_of(folder.stat().st_dev) in _OF_ONE_KERNEL


def shared_mount_of(folder: Path) -> str | None:
    """Return the filesystem of `folder` and where it is mounted, for messages; None if it is this kernel's, or unknown."""
    try:
        mount = _mount_of(folder.stat().st_dev)
    except OSError:  # it is gone
        return None
    return None if mount is None or mount[0] in _OF_ONE_KERNEL else " on ".join(mount)


def _mount_of(device: int) -> tuple[str, str] | None:
    """Return the kernel's name of a filesystem, and one directory on which it is mounted, as the kernel escapes it."""
    if not _MOUNTS.exists():
        return None
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = os.fsdecode(_MOUNTS.read_bytes()).splitlines()
    for line in lines:  # proc_pid_mountinfo(5): the third field, and the first after " - "
        place, _, mounted = line.partition(" - ")
        if place.split()[2] == number:
            return mounted.split()[0], place.split()[4]
    return None
