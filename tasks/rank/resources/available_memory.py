"""How much memory this process can take before its machine, or the cgroup that it is in, has none left."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .cgroups import cgroup_folders

_PROC = Path("/proc")
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


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
    for version, folder in cgroup_folders("memory", proc):
        limit, usage = (folder / name for name in _FILES[version])
        with suppress(OSError, ValueError):  # a cgroup at the root has no such files; "max" is no limit
            yield int(limit.read_text()) - int(usage.read_text())
