"""The filesystem that a directory is on."""

import os
import re
from contextlib import suppress
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_MOUNT_ID = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)  # proc_pid_fdinfo(5)
# Other filesystems may be served by another machine, to which a lock of this one may be unknown (nolock, localflock, FUSE).
_OF_ONE_KERNEL = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


def filesystem_of(folder: Path | int) -> str | None:
    """Return the kernel's name of the filesystem of a directory or descriptor, such as "ext4"; None if unknown."""
    mount = _mount_of(folder)
    return None if mount is None else mount[0]


def may_be_fuse(descriptor: int) -> bool:
    """Return whether an open file is on FUSE, also if that is unknown; costs a stat for one that is on a disk, also by FUSE."""
    is_on_disk = os.major(os.fstat(descriptor).st_dev) != 0
    return not is_on_disk and (filesystem_of(descriptor) or "fuse").startswith("fuse")


def is_local(folder: Path) -> bool:
    """Return whether `folder` is on a filesystem of this kernel alone, which no other machine sees; False if unknown."""
    return filesystem_of(folder) in _OF_ONE_KERNEL


def shared_mount_of(folder: Path) -> str | None:
    """Return the filesystem of `folder` and where it is mounted, for messages; None if it is this kernel's, or unknown."""
    try:
        mount = _mount_of(folder)
    except OSError:  # it is gone
        return None
    return None if mount is None or mount[0] in _OF_ONE_KERNEL else " on ".join(mount)


def _mount_of(folder: Path | int) -> tuple[str, str] | None:
    """Return the kernel's name of a filesystem, and a directory on which it is mounted, as the kernel escapes it."""
    if not _MOUNTS.exists():
        return None
    descriptor = os.open(folder, os.O_PATH) if isinstance(folder, Path) else os.dup(folder)
    try:
        numbers = _numbers_of(descriptor)
    finally:
        os.close(descriptor)
    # proc_pid_mountinfo(5): the numbers of the mount and of its filesystem, the directory, and the name after " - "
    lines = [line.partition(" - ") for line in os.fsdecode(_MOUNTS.read_bytes()).splitlines()]
    mounts = [(place.split(), mounted.split()[0]) for place, _, mounted in lines]
    for field, number in numbers.items():
        for place, name in mounts:
            if place[field] == number:
                return name, place[4]
    return None


def _numbers_of(descriptor: int) -> dict[int, str]:
    """Return the numbers by which the line of a directory's mount is found, by their fields there; the surest first.

    On btrfs, a directory's own number (`st_dev`) is that of its subvolume, which no line has. Some kernels do not tell the
    number of the mount (gVisor).
    """
    device = os.fstat(descriptor).st_dev
    numbers = {2: f"{os.major(device)}:{os.minor(device)}"}
    with suppress(OSError):
        if (found := _MOUNT_ID.search(Path(f"/proc/self/fdinfo/{descriptor}").read_text())) is not None:
            return {0: found[1], **numbers}
    return numbers
