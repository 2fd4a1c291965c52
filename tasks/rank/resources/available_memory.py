"""How much memory this process can take before its machine, or a cgroup that it is in, has none left."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .cgroups import limiting_folders

_PROC = Path("/proc")
# The limit, the usage, and the entry of memory.stat for what the kernel frees first of the usage: files in the page cache.
_LIMITS = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(proc: Path = _PROC) -> int:
    """Return the available memory in bytes; 0 where it is unknown, as outside of Linux.

    Args:
        proc: The directory in which the kernel describes processes and the machine.

    """
    return max(0, min(_available(proc), default=0))


def _available(proc: Path) -> Iterator[int]:
    with suppress(OSError):
        for name, _, value in (line.partition(":") for line in (proc / "meminfo").read_text().splitlines()):
            if name == "MemAvailable":
                yield int(value.split()[0]) * 1024
    for version, folder in limiting_folders("memory", proc):
        limit, usage, cached = _LIMITS[version]
        with suppress(OSError, ValueError):  # a cgroup at the root has no such files; "max" is no limit
            limit_bytes, used_bytes = (int((folder / name).read_text()) for name in (limit, usage))
            yield limit_bytes - max(0, used_bytes - _stat(folder, cached))


def _stat(folder: Path, entry: str) -> int:
    """Return an entry of a cgroup's memory.stat; 0 without one."""
    with suppress(OSError):
        for name, _, value in (line.partition(" ") for line in (folder / "memory.stat").read_text().splitlines()):
            if name == entry:
                return int(value)
    return 0
