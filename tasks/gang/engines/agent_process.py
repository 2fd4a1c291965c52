"""Starts a node agent from the worker process of another system; the agent dies with the worker."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

AGENT = "prefect_torch.tasks.gang.machine.agent"
_PR_SET_PDEATHSIG = 1
_LAST_BYTES = 2000
_LOOK_S = 5.0


def run_agent(
    arguments: Sequence[str], key: str, environment: Mapping[str, str], is_leaving: Callable[[], bool] | None = None
) -> str:
    """Run an agent until it exits, and return the last part of its output.

    The agent is killed when the calling thread ends for any reason, and its ranks end with it.

    Args:
        arguments: The arguments of the agent.
        key: The secret of the agent.
        environment: Variables in addition to those of this process.
        is_leaving: Returns whether this machine is going to be taken away, of which SIGTERM notifies the agent; asked every
            5 s. None where the system sends that itself, or knows nothing of it.

    """
    agent = subprocess.Popen(
        [sys.executable, "-m", AGENT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - it calls one function of libc
        start_new_session=True,  # Ctrl-C at the terminal of a worker that was started by hand must not reach it
    )
    if is_leaving is not None:  # a thread, since the answer may take as long as the system's head is away
        threading.Thread(target=_notify, args=(agent, is_leaving), daemon=True).start()
    written, _ = agent.communicate(f"{key}\n".encode())
    return written[-_LAST_BYTES:].decode(errors="replace").strip()


def _notify(agent: "subprocess.Popen[bytes]", is_leaving: Callable[[], bool]) -> None:
    """Send SIGTERM to the agent once its machine is going to be taken away."""
    while agent.poll() is None:
        if is_leaving():
            agent.terminate()
            return
        time.sleep(_LOOK_S)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
