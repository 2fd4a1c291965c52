"""Lets Prefect's embedded server live as long as the process that started it: through a Ctrl-C, and not after a kill."""

import atexit
import signal
import subprocess
import sys
from typing import Any

from prefect.server.api.server import SubprocessASGIServer

# The end of its stdin, which the kernel closes however the other end died, means that nobody is left to stop the server.
_WATCHER = """
import contextlib, os, signal, sys
if not os.read(0, 1):
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(sys.argv[1]), signal.SIGTERM)
"""
_watched: set[int] = set()
_run_server = SubprocessASGIServer._run_uvicorn_command  # noqa: SLF001 - Prefect offers no other way, here and below


def _run_server_through_interrupts(server: SubprocessASGIServer) -> "subprocess.Popen[Any]":
    """Start the server with SIGINT blocked, which a process inherits.

    A terminal sends Ctrl-C to both. Without its server, this process would wait minutes to tell how it was ended.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return _run_server(server)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


SubprocessASGIServer._run_uvicorn_command = _run_server_through_interrupts  # type: ignore[assignment,method-assign]  # noqa: SLF001 - the stubs see two selves


def tie_embedded_server() -> None:
    """Make sure that an embedded server which this process started does not outlive it; costs nothing with a real one.

    Prefect stops it at a normal exit only, so that a killed flow's server would run on and keep its database locked.
    """
    for server in tuple(SubprocessASGIServer._instances.values()):  # noqa: SLF001
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
