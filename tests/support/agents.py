"""The node agents that a test has started, and what spares them work."""

import math
import threading
from contextlib import suppress
from pathlib import Path

import psutil
from prefect_torch.tasks.gang.engines.agent_process import AGENT
from prefect_torch.tasks.gang.machine.link import LinkError

# Of a cluster: its fork servers import torch's compiler only where a rank makes an optimizer of torch's.
WITHOUT_COMPILER = {"PYTHONPATH": str(Path(__file__).parent / "without_compiler")}


def agents() -> dict[psutil.Process, list[str]]:
    """Return the node agents below this process, and the words of their commands.

    A child of an agent, which has the agent's words until it executes its own program, is none.
    """
    found = {}
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # a process that ends just now, or has ended and was not waited for
            words = child.cmdline()
            if "-m" in words and AGENT in words and child.ppid() not in {agent.pid for agent in found}:
                found[child] = words
    return found


class OpenLink:
    """The leader's side of a link whose agent says nothing after its hello."""

    def __init__(self):
        self._closed = threading.Event()
        self.heard_s = math.inf  # its silence is no loss

    def receive(self):
        self._closed.wait()
        raise LinkError("closed")

    def send(self, header, body=b""):
        pass

    def send_heartbeat(self):
        pass

    def close(self):
        self._closed.set()
