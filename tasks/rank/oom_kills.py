"""How many processes the kernel has killed for lack of memory; the count tells such a kill from any other SIGKILL."""

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def count_oom_kills(proc: Path = _PROC) -> int | None:
    """Return how many processes of this one's memory cgroup the kernel has killed for lack of memory.

    Without a cgroup that counts, those of the whole machine; None without either, as outside of Linux. The kernel counts before
    it kills, so the count has grown by the time the exit is seen.

    Args:
        proc: The directory in which the kernel describes processes.

    """
    for counter in (*_cgroup_counters(proc), proc / "vmstat"):
        try:
            lines = counter.read_text().splitlines()
        except OSError:
            continue
        for name, _, value in (line.partition(" ") for line in lines):
            if name == "oom_kill":
                return int(value)
    return None


def _cgroup_counters(proc: Path) -> Iterator[Path]:
    """Yield the counters of the cgroup of this process: of version 2, and of the memory controller of version 1."""
    try:
        memberships = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:  # https://man7.org/linux/man-pages/man7/cgroups.7.html
        hierarchy, controllers, path = membership.split(":", 2)
        if hierarchy == "0":
            yield from (folder / "memory.events" for folder in _mounted(mounts, "cgroup2", None, path))
        elif "memory" in controllers.split(","):
            yield from (folder / "memory.oom_control" for folder in _mounted(mounts, "cgroup", "memory", path))


def _mounted(mounts: list[str], filesystem: str, option: str | None, path: str) -> Iterator[Path]:
    """Yield the directories of a cgroup; a container may see only its own, mounted at the root (proc_pid_mountinfo(5))."""
    for mount in mounts:
        place, _, source = mount.partition(" - ")
        found, _, options = source.split(" ", 2)
        if found == filesystem and (option is None or option in options.split(",")):
            root, mount_point = place.split(" ")[3:5]
            below = Path(path).relative_to(root) if Path(path).is_relative_to(root) else Path()
            yield Path(mount_point) / below
