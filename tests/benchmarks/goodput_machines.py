"""How much of its time a training on two machines gets on with, while one of them is lost every 60 s; beside Ray Train.

    python tests/benchmarks/goodput_machines.py [--minutes 4] [--every 60] [--back 50] [--losses silent loud] [--seed 0]

Three machines, each a network namespace with a name of its own, and this one, where what leads the training runs and which is
never lost. The training is goodput_training.py's for both: two ranks, gloo, 50 ms a step, most of them asleep, and a checkpoint
of 50 MB every 40 steps in a directory that all machines see. Every 60 s from the first step on, the machine of a random rank is
lost; one whose turn comes while the training is still restarting waits for its first step. It is back after 50 s. A machine is
lost in one of two ways:

    silent    its cable is cut, then all its processes are killed: power or network is gone, and no connection is closed
    loud      all its processes are killed, and its kernel closes their connections

Ours trains through `prefect_torch.flows.train` on `Hosts`, with a Prefect server of its own, and reports a state; the machines
run an OpenSSH server. Ray trains through `TorchTrainer`, with ASYNC uploads, on a cluster of `ray start --block` on each
machine, with its defaults, which runs again once a lost machine is back. Both have failures without limit.

    goodput   steps of the final lineage x 50 ms / time since the first step
    lost      steps done since the checkpoint that the next attempt began from, for each loss
    restart   from the loss to the first step of the next attempt
    stall     of the slower rank's report of a checkpoint

Needs root, iproute2 and an OpenSSH server. Ray is installed by peers/install.py, which takes some minutes the first time.
Writes results/goodput_machines.txt.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from goodput import COLUMNS, measure, parser, scratch_folder, training

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "peers"), str(HERE.parent / "support")]
NAMES = ("a", "b", "c")
RAY_PORT = 6379
RAY_TEMP = "/tmp/ptray"  # short, since Ray's sockets are below it; each machine mounts a directory of its own there


class SshMachines:
    """The machines as `network` makes them; nothing has to be started on them."""

    def __init__(self, network, scratch, stack):
        self.network = network

    def command(self, scratch, seconds):
        hosts = {"hosts": list(NAMES), "command": self.network.command, "ranks_per_host": 1}
        return training("ours_state", scratch, seconds, {"hosts": {**hosts, "leader_address": self.network.address}})

    def start(self, name):
        pass


class RayMachines:
    """The same machines with a raylet on each, and the head on this one."""

    def __init__(self, network, scratch, stack):
        from install import install

        self.network, self._scratch, self._stack = network, scratch, stack
        self._python = install()
        os.environ["RAY_AUTH_MODE"] = "disabled"  # else a head asks for the token that an earlier ray.init() left in ~/.ray
        self._environment = {**os.environ, "PYTHONPATH": str(HERE), "RAY_USAGE_STATS_ENABLED": "0"}
        head = ["--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={RAY_TEMP}"]
        self._run("head", "", [f"--node-ip-address={network.address}", *head])
        self._wait_for_line("head", "Ray runtime started")
        for name in NAMES:
            self.start(name)
        for name in NAMES:
            self._wait_for_line(name, "Ray runtime started")

    def command(self, scratch, seconds):
        mount = f"mount --bind {self._scratch / 'ray-head'} {RAY_TEMP}"
        train = training("ray_async", scratch, seconds, {"ray": {"address": f"{self.network.address}:{RAY_PORT}"}})
        return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *train]

    def start(self, name):
        there = f"nsenter --net=/run/netns/{self.network.namespace(name)} "
        address = f"--address={self.network.address}:{RAY_PORT}"
        ip = f"--node-ip-address={self.network.addresses[name]}"
        self._run(name, there, [address, ip, "--num-cpus=1"], GLOO_SOCKET_IFNAME="lan0")

    def _run(self, name, there, arguments, **variables):
        folder = self._scratch / f"ray-{name}"
        folder.mkdir(exist_ok=True)
        begin = f"hostname {name} && mount --bind {folder} {RAY_TEMP}"
        ray = [str(self._python.parent / "ray"), "start", "--block", "--object-store-memory=80000000", *arguments]
        with self._log(name).open("ab") as log:
            started = subprocess.Popen(
                [*there.split(), "unshare", "--mount", "--uts", "sh", "-c", f'{begin} && exec "$@"', "sh", *ray],
                env={**self._environment, **variables},
                stdout=log,
                stderr=log,
            )
        self._stack.callback(kill_family, started)

    def _log(self, name):
        return self._scratch / f"log-{name}"

    def _wait_for_line(self, name, words):
        deadline_s = time.monotonic() + 90
        while words not in self._log(name).read_text():
            if time.monotonic() > deadline_s:
                raise RuntimeError(self._log(name).read_text())
            time.sleep(0.1)


class Losses:
    """Takes machines away, and brings them back."""

    def __init__(self, machines, kind, back_s, seed):
        self._machines, self._kind, self._back_s = machines, kind, back_s
        self._chance = random.Random(seed)
        self._due = {}

    def lose(self, ranks):
        host, network = self._chance.choice(ranks)["host"], self._machines.network
        self._due[host] = time.time() + self._back_s
        if self._kind == "silent":
            network.cut(host)
        kill_all(network.processes(host))

    def bring_back(self):
        for host in [host for host, due in self._due.items() if time.time() > due]:
            del self._due[host]
            if self._kind == "silent":
                self._machines.network.mend(host)
            self._machines.start(host)


def kill_all(processes):
    import psutil  # Ray's interpreter, which runs this file, too, has none

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def kill_family(first):
    from process_trees import kill_tree

    kill_tree(first.pid)
    first.wait(20)


def measure_losses(way, kind, options):
    from network_hosts import network

    with scratch_folder() as scratch, ExitStack() as stack:
        made = stack.enter_context(network(scratch, *NAMES))
        machines = {"ours": SshMachines, "ray": RayMachines}[way](made, scratch, stack)
        losses = Losses(machines, kind, options.back, options.seed)
        command = machines.command(scratch, options.minutes * 60)
        return measure(way, command, scratch, options, losses.lose, losses.bring_back)


def main():
    from result_file import write_results

    arguments = parser(["ours", "ray"], minutes=4.0, every_s=60.0)
    arguments.add_argument("--back", type=float, default=50.0)
    arguments.add_argument("--losses", nargs="+", choices=["silent", "loud"], default=["silent", "loud"])
    options = arguments.parse_args()
    Path(RAY_TEMP).mkdir(exist_ok=True)
    lines = []
    for kind in options.losses:
        lines += [f"machines are lost: {kind}", COLUMNS]
        goodputs = {}
        for way in options.ways:
            goodputs[way], row = measure_losses(way, kind, options)
            lines.append(row)
        if len(goodputs) > 1:
            lines += [f"ours / ray: {goodputs['ours'] / goodputs['ray']:.2f}", ""]
    write_results("goodput_machines.txt", 1, lines)


if __name__ == "__main__":
    main()
