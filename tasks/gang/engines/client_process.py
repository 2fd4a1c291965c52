"""The connection to an engine that needs a client library, in a process separate from the flow's.

The client's threads stay out of the flow's process, and the machines are released when this process or the flow ends.
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
        order: The input of the program, as JSON; the agents' arguments are added.

    """
    package = __name__.rpartition(".")[0]
    order = {**order, "arguments": agents.arguments()}
    agents.run(shlex.join([sys.executable, "-m", f"{package}.{module}", json.dumps(order)]), [cluster])


def read_order() -> tuple[dict[str, Any], str]:
    """Return the order of this program, and the key of the agents, which is the first line of stdin."""
    return json.loads(sys.argv[1]), sys.stdin.readline().strip()


def import_client(module: str, name: str, extra: str) -> Any:
    """Return a client's module, whose types are incomplete; exit with an install hint if it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        sys.exit(_missing(name, extra))


def check_client(module: str, name: str, extra: str) -> None:
    """Raise if the flow's environment lacks a client: asking the cluster again would not help.

    Raises:
        ImportError: If the module is not installed.

    """
    if find_spec(module) is None:
        raise ImportError(_missing(name, extra))


def _missing(name: str, extra: str) -> str:
    """Return the install hint for a missing client."""
    return f"{name} is not installed: pip install 'prefect-torch[{extra}]'"


def say(*words: object) -> None:
    """Write a line, which the leader shows if the agents do not connect."""
    print(*words, flush=True)  # noqa: T201 - the leader reads it


def say_room(num_ranks: int, why: str) -> None:
    """Write for how many ranks the cluster has room, so that the leader waits for no more."""
    say(f"room for {num_ranks}: {why}")
