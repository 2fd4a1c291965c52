"""Reserves a placement group of a Ray cluster, and runs an agent on each of its machines, as long as this process lives.

    python -m prefect_torch.tasks.gang.engines.ray_agents JSON

The key of the agents is the first line of stdin. Ray allows one connection per process, and takes the reservation back when the
process is gone; through ray://, only half a minute after it was killed.
"""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .agent_process import run_agent
from .client_process import import_client, read_order, say, say_room

_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")  # of NVIDIA, AMD and Intel
_SETTLE_S = 5.0  # how long a placement for which there is room may take


def main() -> None:
    """Run the agents; exit with 1 if there is room for too few ranks."""
    order, key = read_order()
    ray = _ray()
    ray.init(address=order["address"], log_to_driver=False, logging_level=logging.ERROR)
    group, num_ranks = _reserve(order)
    say_room(num_ranks, "reserved")
    bundles = [_start(order["resources"], group, number) for number in range(num_ranks)]
    places = ray.get([bundle.place.remote() for bundle in bundles])
    names = _names()
    agents = []
    for node in dict.fromkeys(node for node, _ in places):
        there = [number for number, place in enumerate(places) if place[0] == node]
        gpus = [gpu for number in there for gpu in places[number][1]]
        arguments = [*order["arguments"], "--name", names.get(node, node), "--slots", str(len(there))]
        agents.append(bundles[there[0]].run.remote(arguments, key, gpus))
    while agents:
        ended, agents = ray.wait(agents)
        try:
            say(*ray.get(ended))
        except ray.exceptions.RayError as exc:  # its machine is gone, which the leader has seen by then
            say(type(exc).__name__)
    ray.util.remove_placement_group(group)  # now: the next attempt counts free resources once this process is gone


def _ray() -> Any:
    return import_client("ray", "Ray", "ray")


class Bundle:
    """An actor that holds one bundle of the placement group."""

    def place(self) -> tuple[str, list[str]]:
        """Return the id of its machine, and its GPUs."""
        return _ray().get_runtime_context().get_node_id(), self._gpus()

    def run(self, arguments: Sequence[str], key: str, gpus: list[str]) -> str:
        """Run the agent of its machine, for all bundles there, which have these GPUs."""
        own = ",".join(self._gpus())
        of_ray = [variable for variable in _GPU_VARIABLES if os.environ.get(variable) == own]
        visible = dict.fromkeys(of_ray or _GPU_VARIABLES[:1], ",".join(gpus)) if gpus else {}
        return run_agent(arguments, key, visible, _is_draining)

    def _gpus(self) -> list[str]:
        return [str(gpu) for gpu in _ray().get_gpu_ids()]


def _is_draining() -> bool:
    """Return whether Ray is going to take this machine away, as before the end of a spot instance; Ray Train asks the same."""
    ray = _ray()
    try:
        draining = ray._private.state.state.get_draining_nodes()  # noqa: SLF001 - there is no public function
    except ray.exceptions.RayError:  # its head does not answer at the moment, and is asked again
        return False
    return ray.get_runtime_context().get_node_id() in draining


def _start(resources: dict[str, float], group: Any, bundle: int) -> Any:
    ray = _ray()
    others = {name: amount for name, amount in resources.items() if name not in {"CPU", "GPU", "memory"}}
    return (
        ray.remote(Bundle)
        .options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            memory=resources.get("memory"),
            resources=others,
            max_restarts=0,  # the leader starts new attempts
            max_task_retries=0,
            scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        )
        .remote()
    )


def _reserve(order: dict[str, Any]) -> tuple[Any, int]:
    """Reserve a placement group for as many ranks as fit now; return it with their number."""
    ray = _ray()
    avoided = [node for node, name in _names().items() if name in order["avoid"]]
    deadline_s = time.monotonic() + order["wait_s"]
    while True:
        fits, too_many = order["fewest"], min(order["most"], max(_room(order["resources"]), order["fewest"])) + 1
        tried = too_many - 1
        while too_many - fits > 1:  # halved: each step that does not fit costs seconds, of the minute that the leader waits
            group = _group(order, tried, avoided)
            if not group.wait(timeout_seconds=_SETTLE_S):
                too_many = tried
            elif tried == too_many - 1:
                return group, tried
            else:
                fits = tried
            ray.util.remove_placement_group(group)
            tried = (fits + too_many) // 2
        group = _group(order, fits, avoided)
        is_fewest = fits == order["fewest"]  # waits, so that an autoscaling cluster can grow
        if group.wait(timeout_seconds=max(_SETTLE_S, deadline_s - time.monotonic()) if is_fewest else _SETTLE_S):
            return group, fits
        ray.util.remove_placement_group(group)
        if is_fewest and time.monotonic() >= deadline_s:
            sys.exit(f"room for {min(_room(order['resources']), order['fewest'] - 1)}: with {order['resources']} for each rank")


def _group(order: dict[str, Any], num_ranks: int, avoided: list[str]) -> Any:
    elsewhere = {"bundle_label_selector": [{"ray.io/node-id": f"!in({','.join(avoided)})"}] * num_ranks} if avoided else {}
    return _ray().util.placement_group([order["resources"]] * num_ranks, strategy=order["strategy"], **elsewhere)


def _room(resources: dict[str, float]) -> int:
    """Return for how many ranks the whole cluster has resources left; fewer may fit on its machines."""
    ray = _ray()
    left = ray.available_resources()
    return int(min(left.get(name, 0.0) // amount for name, amount in resources.items() if amount > 0))


def _names() -> dict[str, str]:
    """Return the names of the living machines by their ids; a name that several machines share gets a part of the id."""
    ray = _ray()
    nodes = [(node["NodeID"], node.get("NodeName") or node["NodeManagerHostname"]) for node in ray.nodes() if node["Alive"]]
    counts = Counter(name for _, name in nodes)
    return {node: name if counts[name] == 1 else f"{name}-{node[:6]}" for node, name in nodes}


if __name__ == "__main__":
    main()
