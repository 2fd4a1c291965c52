"""The identity of this machine, and which filesystems only it sees."""

import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
# Other filesystems may be served by another machine, to which a lock of this one may be unknown (nolock, localflock, FUSE).
_OF_ONE_KERNEL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


def kernel_id() -> str:
    """Return an id of the running kernel that differs from every other boot's; outside of Linux the machine's name.

    Containers of one machine share it, and its file locks.
    """
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def is_local(folder: Path) -> bool:
    """Return whether `folder` is on a filesystem of this kernel alone, which no other machine sees; False if unknown."""
    if not _MOUNTS.exists():
        return False
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text().splitlines():  # proc_pid_mountinfo(5): the third field, and the first after " - "
        place, _, mounted = line.partition(" - ")
        if place.split()[2] == number:
            return mounted.split()[0] in _OF_ONE_KERNEL
    return False
