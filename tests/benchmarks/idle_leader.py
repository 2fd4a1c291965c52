"""What a thousand ranks that do nothing cost their leader: CPU time, threads, task runs.

    python tests/benchmarks/idle_leader.py [--ranks 1000] [--per-node 8] [--seconds 20]

A real training flow with a Prefect server of its own leads ranks on simulated machines: one process holds a real link for each
machine, says that it has room, sends a heartbeat each second, and starts no rank; it says that all ranks have returned when
the time is up.
So everything of the leader is real: links, task runs, supervision, the store.

    CPU         of the flow's process while all ranks run, in percent of one core
    task runs   of ranks, from Prefect's API, with their states at the end

Writes results/idle_leader.txt.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import psutil
from prefect_torch.tasks.gang.engines.cluster import Agents, Cluster, MachineRequest
from prefect_torch.tasks.gang.machine.link import LINK_HEARTBEAT_S, LinkError, greet_leader
from prefect_torch.tasks.gang.machine.versions import versions
from prefect_torch.tasks.rank.plain_result import encode_result
from prefect_torch.tasks.rank.spec import RankResult
from result_file import write_results

_SETTLE_S = 10.0  # from the last start of a rank until the ranks count as idle


class SimulatedMachines(Cluster):
    """Machines that a process of their own plays."""

    kind: Literal["simulated"] = "simulated"
    machines: int
    per_node: int
    seconds: float

    @contextmanager
    def lend(self, wanted: MachineRequest, agents: Agents) -> Iterator[None]:
        """Start the process."""
        for number in range(self.machines):
            agents.expect(f"machine-{number}")
        plan = {"address": agents.address, "key": agents.key, **self.model_dump()}
        with subprocess.Popen([sys.executable, __file__, "--play"], stdin=subprocess.PIPE) as played:
            played.stdin.write(json.dumps(plan, default=str).encode())
            played.stdin.close()
            try:
                yield
            finally:
                played.kill()


class Played:
    """One machine."""

    started = 0
    counting = threading.Lock()

    def __init__(self, plan, number):
        host, _, port = plan["address"].rpartition(":")
        self.link = greet_leader(socket.create_connection((host, int(port))), plan["key"], 60, 600)
        name = {"name": f"machine-{number}", "slots": plan["per_node"], "address": "127.0.0.1", "versions": versions()}
        self.link.send({"type": "hello", **name})
        self.ranks = []
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self):
        try:
            while True:
                order, _ = self.link.receive()
                if order["type"] == "start":
                    self.ranks.append(order["rank"])
                    with Played.counting:
                        Played.started += 1
        except LinkError:
            os._exit(0)

    def end(self):
        for rank in self.ranks:
            fields = {"type": "exit", "rank": rank, "returncode": 0, "oom_killed": False, "record": None}
            self.link.send(fields, encode_result(RankResult()))


def play():
    plan = json.load(sys.stdin)
    machines = [Played(plan, number) for number in range(plan["machines"])]
    ends_s = None
    while ends_s is None or time.monotonic() < ends_s:
        for machine in machines:
            machine.link.send_heartbeat()
        if ends_s is None and Played.started == plan["machines"] * plan["per_node"]:
            ends_s = time.monotonic() + plan["seconds"] + 2 * _SETTLE_S
            print("all started", flush=True)
        time.sleep(LINK_HEARTBEAT_S)
    for machine in machines:
        machine.end()
    time.sleep(600)  # the leader closes the links


def watch(seconds, found):
    """Measure this process once its number of threads has settled."""
    process, before = psutil.Process(), 0
    while before < found["at least"] or process.num_threads() != before:
        before = process.num_threads()
        time.sleep(_SETTLE_S / 2)
    begun = process.cpu_times()
    time.sleep(seconds)
    ended = process.cpu_times()
    found["cpu"] = (ended.user + ended.system - begun.user - begun.system) / seconds
    found["threads"] = process.num_threads()
    found["memory"] = process.memory_info().rss / 1e6


def train_simulated(options):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, temporary_settings
    from prefect.testing.utilities import prefect_test_harness
    from prefect_torch.flows import RunConfig, ScalingConfig, train

    num_machines = options.ranks // options.per_node
    fields = {"machines": num_machines, "per_node": options.per_node, "seconds": options.seconds}
    cluster = SimulatedMachines(leader_address="127.0.0.1", **fields)
    found = {"at least": options.ranks}
    with (
        temporary_settings({PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS: 120}),
        prefect_test_harness(server_startup_timeout=120),
        tempfile.TemporaryDirectory() as folder,
    ):
        watching = threading.Thread(target=watch, args=(options.seconds, found))
        watching.start()
        scaling = ScalingConfig(num_workers=options.ranks, cluster=cluster)
        state = train(nothing, {}, scaling, RunConfig(name="idle", storage=folder), return_state=True)
        watching.join()
        with get_client(sync_client=True) as client:
            ours = FlowRunFilter(id={"any_": [state.state_details.flow_run_id]})
            deadline_s = time.monotonic() + 60
            while True:
                task_runs = [it for it in client.read_task_runs(flow_run_filter=ours, limit=200) if "rank" in it.name]
                if all(it.state is not None and it.state.is_final() for it in task_runs) or time.monotonic() > deadline_s:
                    break
                time.sleep(1)
    found["task runs"] = len(task_runs)
    found["states"] = dict(Counter(it.state_name for it in task_runs))
    found["ended"] = state.name
    return found


def nothing():
    """Run nowhere: no rank is started."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play()
        return
    found = train_simulated(options)
    write_results(
        "idle_leader.txt",
        1,
        [
            f"{options.ranks} ranks on {options.ranks // options.per_node} machines, over {options.seconds:g} s",
            f"CPU        {found['cpu']:.1%} of a core",
            f"threads    {found['threads']}, {found['memory']:.0f} MB",
            f"task runs  {found['task runs']}: {found['states']}; the flow run ended as {found['ended']}",
        ],
    )


if __name__ == "__main__":
    main()
