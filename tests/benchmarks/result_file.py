"""A file of results that its program wrote: with the commit, the command, the machine, the repeats and the load."""

import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[2]


def write_results(name, repeats, lines):
    """Write `lines` below what is needed to measure them again, print them, and return the path."""
    program = os.path.relpath(Path(sys.argv[0]).resolve(), ROOT)
    header = [
        f"$ {shlex.join(['python', program, *sys.argv[1:]])}",
        f"commit {_commit()}",
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        f"{repeats} repeats in turns, load average {os.getloadavg()[0]:.1f} at the end",
        "",
    ]
    text = "\n".join([*header, *lines]) + "\n"
    path = RESULTS / name
    path.write_text(text)
    print(text)
    return path


def spread(values):
    """Return the smallest, the middle and the largest of `values`."""
    return min(values), statistics.median(values), max(values)


def _commit():
    """Return the commit that was measured; with a "+" where files of it were changed, other than results."""
    if shutil.which("git") is None:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)tests/benchmarks/results")
    return (_git("rev-parse", "--short=10", "HEAD") or "unknown") + ("+" if changed else "")


def _git(*arguments):
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False, text=True)
    return done.stdout.strip()
