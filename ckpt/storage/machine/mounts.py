"""The filesystem that a directory is on."""

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")


def filesystem_of(device: int) -> str | None:
    """Return the kernel's name of the filesystem with the number `device` (`st_dev`), such as "ext4"; None if unknown."""
    if not _MOUNTS.exists():
        return None
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = os.fsdecode(_MOUNTS.read_bytes()).splitlines()
    for line in lines:  # proc_pid_mountinfo(5): the third field, and the first after " - "
        place, _, mounted = line.partition(" - ")
        if place.split()[2] == number:
            return mounted.split()[0]
    return None
