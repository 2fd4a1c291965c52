"""The control groups of this process, in which the kernel counts and limits its resources."""

import os
from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, proc: Path) -> Iterator[tuple[int, Path]]:
    """Yield the version and the directory of each cgroup of this process that may have `controller`; none outside of Linux.

    Args:
        controller: The controller, such as "memory".
        proc: The directory in which the kernel describes processes.

    """
    try:
        memberships, mounts = (os.fsdecode((proc / "self" / it).read_bytes()).splitlines() for it in ("cgroup", "mountinfo"))
    except OSError:
        return
    for membership in memberships:  # https://man7.org/linux/man-pages/man7/cgroups.7.html
        hierarchy, controllers, path = membership.split(":", 2)
        if hierarchy == "0":
            yield from ((2, folder) for folder in _mounted(mounts, "cgroup2", None, path))
        elif controller in controllers.split(","):
            yield from ((1, folder) for folder in _mounted(mounts, "cgroup", controller, path))


def limiting_folders(controller: str, proc: Path) -> Iterator[tuple[int, Path]]:
    """Yield what `cgroup_folders` yields, and the parents, whose limits hold as well: a Slurm job's is on a parent of its task.

    The root, and the directories above its mount, have no files of limits.

    Args:
        controller: The controller, such as "memory".
        proc: The directory in which the kernel describes processes.

    """
    for version, folder in cgroup_folders(controller, proc):
        yield from ((version, place) for place in (folder, *folder.parents))


def _mounted(mounts: list[str], filesystem: str, option: str | None, path: str) -> Iterator[Path]:
    """Yield the directories of a cgroup; a container may see only its own, mounted at the root (proc_pid_mountinfo(5))."""
    for mount in mounts:
        place, _, source = mount.partition(" - ")
        found, _, options = source.split(" ", 2)
        if found == filesystem and (option is None or option in options.split(",")):
            root, mount_point = place.split(" ")[3:5]
            below = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
            yield Path(mount_point) / below
