"""Submits an agent to each worker of a Dask cluster, and waits for them.

    python -m prefect_torch.tasks.gang.engines.dask_agents JSON

The key of the agents is the first line of stdin.
"""

import sys
from typing import Any

from .agent_process import run_agent
from .client_process import import_client, read_order, say, say_room
from .cluster import MachineRequest

_CONNECT_S = 20.0


def main() -> None:
    """Run the agents; exit with 1 if there is room for too few ranks."""
    order, key = read_order()
    distributed = import_client("distributed", "Dask", "dask")
    try:
        client = distributed.Client(order["address"], timeout=_CONNECT_S)
    except OSError as exc:
        sys.exit(f"no Dask scheduler answers at {order['address']}: {exc}")
    workers = _workers(client, order)
    wanted = MachineRequest(order["fewest"], order["most"], order["use_gpu"], frozenset(order["avoid"]))
    slots = wanted.slots_of_each(len(workers), order["ranks_per_worker"])
    if slots is not None:
        say_room(slots * len(workers), f"on {len(workers)} workers")
        if slots * len(workers) < order["fewest"]:
            sys.exit(1)
    agents = [
        client.submit(
            run_agent,
            [*order["arguments"], "--name", name, *([] if slots is None else ["--slots", str(slots)])],
            key,
            {},
            pure=False,
            retries=0,  # the leader starts new attempts
            workers=[address],
            allow_other_workers=False,
        )
        for address, name in workers.items()
    ]
    for agent in distributed.as_completed(agents):
        say(agent.status if agent.status != "finished" else agent.result())


def _workers(client: Any, order: dict[str, Any]) -> dict[str, str]:
    """Return the names of the workers that may be used, by their addresses."""
    found = client.scheduler_info(n_workers=-1)["workers"]
    names = {address: str(worker["name"]) for address, worker in found.items() if _has(worker["resources"], order["resources"])}
    return {address: name for address, name in names.items() if name not in order["avoid"]}


def _has(theirs: dict[str, float], wanted: dict[str, float]) -> bool:
    return all(theirs.get(name, 0.0) >= amount for name, amount in wanted.items())


if __name__ == "__main__":
    main()
