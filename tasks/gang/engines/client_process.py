"""The connection to an engine that has a client of its own, in a process beside the flow's.

No thread of the client is in the flow's process, and the end of this process, or of the flow, releases the machines.
"""

import json
import shlex
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .cluster import Agents


def run_client_process(agents: Agents, module: str, cluster: str, order: Mapping[str, Any]) -> None:
    """Run the program of an engine, which reads `order` by `read_order` and starts the agents.

    Args:
        agents: The leader's side of the agents.
        module: The program, a module beside this one.
        cluster: The name of the cluster in messages.
        order: What the program needs to know, as JSON; the agents' arguments are added.

    """
    package = __name__.rpartition(".")[0]
    order = {**order, "arguments": agents.arguments()}
    agents.run(shlex.join([sys.executable, "-m", f"{package}.{module}", json.dumps(order)]), [cluster])


def read_order() -> tuple[dict[str, Any], str]:
    """Return the order of this program, and the key of the agents, which is the first line of stdin."""
    return json.loads(sys.argv[1]), sys.stdin.readline().strip()


def import_client(module: str, name: str, extra: str) -> Any:
    """Return a client's module, whose types are incomplete; exit with what to install where it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        sys.exit(_missing(name, extra))


def check_client(module: str, name: str, extra: str) -> None:
    """Refuse a training whose flow lacks a client: to ask the cluster again would not bring it.

    Raises:
        ImportError: If the module is not installed.

    """
    if find_spec(module) is None:
        raise ImportError(_missing(name, extra))


def _missing(name: str, extra: str) -> str:
    """Return what to install where a client is missing."""
    return f"{name} is not installed: pip install 'prefect-torch[{extra}]'"


def say(*words: object) -> None:
    """Write a line, which the leader shows if the agents do not come."""
    print(*words, flush=True)  # noqa: T201 - the leader reads it


def say_room(num_ranks: int, why: str) -> None:
    """Write for how many ranks the cluster has room, so that the leader waits for no more."""
    say(f"room for {num_ranks}: {why}")
