"""Submits an agent to each worker of a Dask cluster, and waits for them.

    python -m prefect_torch.tasks.gang.engines.dask_agents JSON

The key of the agents is the first line of stdin. A process of its own, so that no thread of Dask's is in the flow's.
"""

import json
import math
import sys
from importlib import import_module
from typing import Any

from .starting import run_agent

_CONNECT_S = 20.0


def main() -> None:
    """Run the agents; exit with 1 if there is room for too few ranks."""
    order = json.loads(sys.argv[1])
    key = sys.stdin.readline().strip()
    try:
        distributed: Any = import_module("distributed")  # its types are incomplete, and it is an extra
    except ModuleNotFoundError:
        sys.exit("Dask is not installed: pip install 'prefect-torch[dask]'")
    try:
        client = distributed.Client(order["address"], timeout=_CONNECT_S)
    except OSError as exc:
        sys.exit(f"no Dask scheduler answers at {order['address']}: {exc}")
    workers = _workers(client, order)
    slots = _slots(order, len(workers))
    if slots is not None:
        print(f"room for {slots * len(workers)}: on {len(workers)} workers", flush=True)  # noqa: T201 - the leader reads it
        if slots * len(workers) < order["fewest"]:
            sys.exit(1)
    agents = [
        client.submit(
            run_agent,
            [*order["arguments"], "--name", name, *([] if slots is None else ["--slots", str(slots)])],
            key,
            {},
            pure=False,
            retries=0,  # a new attempt is for the leader to begin
            workers=[address],
            allow_other_workers=False,
        )
        for address, name in workers.items()
    ]
    for agent in distributed.as_completed(agents):
        print(agent.status if agent.status != "finished" else agent.result(), flush=True)  # noqa: T201 - shown by the leader


def _workers(client: Any, order: dict[str, Any]) -> dict[str, str]:
    """Return the names of the workers that may be used, by their addresses."""
    found = client.scheduler_info(n_workers=-1)["workers"]
    names = {address: str(worker["name"]) for address, worker in found.items() if _has(worker["resources"], order["resources"])}
    return {address: name for address, name in names.items() if name not in order["avoid"]}


def _has(theirs: dict[str, float], wanted: dict[str, float]) -> bool:
    return all(theirs.get(name, 0.0) >= amount for name, amount in wanted.items())


def _slots(order: dict[str, Any], num_workers: int) -> int | None:
    if order["ranks_per_worker"] is not None:
        return int(order["ranks_per_worker"])
    return None if order["use_gpu"] else math.ceil(order["most"] / max(1, num_workers))


if __name__ == "__main__":
    main()
