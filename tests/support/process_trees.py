"""Killing a process together with everything below it."""

import signal
from contextlib import suppress

import psutil


def kill_tree(pid: int) -> None:
    """Kill a process with all its descendants at once, as a machine that vanishes does; pass over those that have ended."""
    tree = []
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        first.send_signal(signal.SIGSTOP)  # else it starts more while they are killed
        tree = [first, *first.children(recursive=True)]
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            process.kill()
