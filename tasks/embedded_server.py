"""Ends Prefect's embedded server together with the process that started it, even when that is killed."""

import atexit
import subprocess
import sys

from prefect.server.api.server import SubprocessASGIServer

# The end of its stdin, which the kernel closes however the other end died, means that nobody is left to stop the server.
_WATCHER = """
import contextlib, os, signal, sys
if not os.read(0, 1):
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(sys.argv[1]), signal.SIGTERM)
"""
_watched: set[int] = set()


def tie_embedded_server() -> None:
    """Make sure that an embedded server which this process started does not outlive it; costs nothing with a real one.

    Prefect stops it at a normal exit only, so that a killed flow's server would run on and keep its database locked.
    """
    for server in tuple(SubprocessASGIServer._instances.values()):  # noqa: SLF001 - Prefect offers no other way to it
        process = server.server_process
        if process is None or process.pid in _watched:
            continue
        _watched.add(process.pid)
        watcher = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _WATCHER, str(process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(_release, watcher)  # runs before Prefect's own, which then stops the server


def _release(watcher: "subprocess.Popen[bytes]") -> None:
    watcher.communicate(b".")
