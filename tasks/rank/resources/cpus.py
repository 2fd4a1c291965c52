"""The CPUs of a rank: how many it may use, and those beside its GPU."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from .cgroups import limiting_folders

_PROC, _SYS = Path("/proc"), Path("/sys")


def count_cpus(proc: Path = _PROC) -> int:
    """Return how many CPUs this process may use at a time, by its affinity and by the limits of its cgroups.

    Args:
        proc: The directory in which the kernel describes processes.

    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(math.ceil(limit) for limit in _limits(proc))]))


def default_threads(num_ranks: int) -> dict[str, str]:
    """Return the variable that gives each of the ranks on this machine its share of the CPUs.

    By default every rank computes with as many threads as there are cores, all ranks together with far more.

    Args:
        num_ranks: How many ranks compute at a time.

    """
    return {"OMP_NUM_THREADS": str(max(1, count_cpus() // num_ranks))}


def stay_near(devices: Sequence[str], own: int, sys: Path = _SYS) -> str | None:
    """Let this process run only on the CPUs of the NUMA node of its device, where its memory is then allocated, too.

    Does nothing if the CPUs of this process are restricted already, or if the CPUs beside the training's devices are not all
    CPUs of the machine: none is to stay idle.

    Args:
        devices: The PCI addresses of the training's devices on this machine, such as "0000:17:00.0".
        own: The place of this process's device among them.
        sys: The directory in which the kernel describes devices.

    Returns:
        The CPUs as the kernel writes them, such as "0-15,32-47"; None if nothing was changed.

    """
    try:
        online = _numbers((sys / "devices/system/cpu/online").read_text())
        listed = [_cpus_beside(device, sys) for device in devices]
    except OSError:  # not Linux, or node -1: the machine has one node, or does not report which
        return None
    near = _numbers(listed[own])
    if not near < online or set().union(*map(_numbers, listed)) != online or os.sched_getaffinity(0) != online:
        return None
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - the threads that libraries have started by now
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), near)
    return listed[own]


def _cpus_beside(device: str, sys: Path) -> str:
    node = int((sys / "bus/pci/devices" / device / "numa_node").read_text())
    return (sys / f"devices/system/node/node{node}/cpulist").read_text().strip()


def _limits(proc: Path) -> Iterator[float]:
    """Yield how many CPUs each cgroup of this process and each of its parents allows, if it has a limit."""
    for version, folder in limiting_folders("cpu", proc):
        try:
            if version == 2:  # noqa: PLR2004 - of cgroups
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:  # the root and directories above the mount have none
            continue
        if quota not in {"max", "-1"}:
            yield int(quota) / int(period)


def _numbers(ranges: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8" (cpuset(7))."""
    numbers: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
