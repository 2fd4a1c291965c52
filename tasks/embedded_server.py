"""Ends Prefect's embedded server together with the process that started it, even when that is killed."""

import subprocess
import sys

from prefect.server.api.server import SubprocessASGIServer

# Waits for the end of its stdin, which the kernel closes however the other end died; a normal exit has ended the server
# before, and then there is nobody to signal.
_WATCHER = """
import contextlib, os, signal, sys
os.read(0, 1)
with contextlib.suppress(ProcessLookupError):
    os.kill(int(sys.argv[1]), signal.SIGTERM)
"""
_watchers: dict[int, "subprocess.Popen[bytes]"] = {}


def tie_embedded_server() -> None:
    """Make sure that an embedded server which this process started does not outlive it; costs nothing with a real one.

    Prefect stops it at a normal exit only, so that a killed flow's server would run on and keep its database locked.
    """
    for server in tuple(SubprocessASGIServer._instances.values()):  # noqa: SLF001 - Prefect offers no other way to it
        process = server.server_process
        if process is None or process.pid in _watchers:
            continue
        _watchers[process.pid] = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _WATCHER, str(process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
