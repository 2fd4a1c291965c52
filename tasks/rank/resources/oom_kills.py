"""How many processes the kernel has killed for lack of memory; the count distinguishes such a kill from any other SIGKILL."""

from collections.abc import Iterator
from pathlib import Path

from .cgroups import cgroup_folders

_PROC = Path("/proc")


class OomKills:
    """The kills for lack of memory since this object was made."""

    def __init__(self) -> None:
        self._before = count_oom_kills()

    def happened(self) -> bool | None:
        """Return whether there was one; None if that is unknown."""
        now = count_oom_kills()
        return None if now is None else now > (self._before or 0)


def count_oom_kills(proc: Path = _PROC) -> int | None:
    """Return how many processes of this one's memory cgroup the kernel has killed for lack of memory.

    Without a cgroup that counts, return those of the whole machine; None if no count is available, as outside of Linux. The
    kernel counts before it kills, so the count has grown by the time the exit is seen.

    Args:
        proc: The directory in which the kernel describes processes.

    """
    for counter in _counters(proc):
        try:
            lines = counter.read_text().splitlines()
        except OSError:
            continue
        for name, _, value in (line.partition(" ") for line in lines):
            if name == "oom_kill":
                return int(value)
    return None


def _counters(proc: Path) -> Iterator[Path]:
    for version, folder in cgroup_folders("memory", proc):
        yield folder / ("memory.events" if version == 2 else "memory.oom_control")  # noqa: PLR2004 - of cgroups
    yield proc / "vmstat"
