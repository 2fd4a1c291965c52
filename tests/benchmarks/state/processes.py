"""CPU time and memory of processes and of all that they started; read from /proc, by whichever of them asks."""

import contextlib
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


_TOUCH = """\
import mmap, sys
pages = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pages.madvise(mmap.MADV_HUGEPAGE)
for start in range(0, len(pages), 4096):
    pages[start] = 1
"""


def back_free_memory(count):
    """Have that many bytes of the memory that nobody uses be there at once when somebody asks for them.

    A virtual machine's host takes back what is free, within seconds, and gives it again at a fifth of the speed.
    """
    subprocess.run([sys.executable, "-c", _TOUCH, str(count)], check=True)


def cpu_s(roots):
    """Return the CPU time that `roots` and their living descendants have taken, to the nanosecond."""
    total = 0.0
    for pid in with_descendants(roots):
        with contextlib.suppress(OSError):
            total += time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3) of any process
    return total


class PeakMemory:
    """How much more memory `roots` and their descendants take at their peaks than now.

    What two processes share counts in each; the page cache does not count.
    """

    def __init__(self, roots):
        self._roots = roots
        self._before = {}
        for pid in with_descendants(roots):
            with contextlib.suppress(*_GONE):
                self._before[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets the peak so far

    def extra_bytes(self):
        total = 0
        for pid in with_descendants(self._roots):
            with contextlib.suppress(*_GONE):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
                total += max(0, peak - self._before.get(pid, 0))
        return total


def with_descendants(roots):
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(*_GONE):
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, waiting = [], list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found
