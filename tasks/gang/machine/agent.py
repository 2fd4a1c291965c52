"""The node agent: starts the ranks of one machine, under a guard each, as the leader of a training orders over one connection.

    python -m prefect_torch.tasks.gang.machine.agent HOST:PORT [--name NAME] [--slots N] [--gpus]

The key is in PREFECT_TORCH_AGENT_KEY, or is the first line of stdin. The agent imports neither torch nor prefect, and unpickles
nothing; its fork server imports torch while other machines are awaited. It ends, and its ranks with it, when the leader closes
the connection, or is silent for 30 seconds. On SIGTERM it notifies the leader, which lets the ranks of the attempt checkpoint.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from prefect_torch.tasks.gang.processes.flight_recorder import FlightRecorder
from prefect_torch.tasks.gang.processes.fork_servers import FORK_SERVERS, RANK_PROGRAM, ForkServer, python_command
from prefect_torch.tasks.gang.processes.process import RankProcess
from prefect_torch.tasks.gang.processes.secret_variables import SECRETS_OF_PREFECT
from prefect_torch.tasks.rank.resources.cpus import default_threads
from prefect_torch.tasks.rank.resources.interfaces import interface_variables
from prefect_torch.tasks.rank.resources.oom_kills import OomKills

from .interface import interface_of
from .link import LINK_HEARTBEAT_S, Link, LinkError, greet_leader
from .neighbours import Neighbours
from .versions import versions

if TYPE_CHECKING:
    from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation

KEY_VARIABLE = "PREFECT_TORCH_AGENT_KEY"
_PLACE_VARIABLE = "SLURM_NODEID"  # it follows the topology of the network: rings of NCCL cross fewest switches in that order
_CONNECT_S = 20.0
_AGAIN_S = 0.5  # between two tries to connect
_SILENT_S = 30.0
_ASLEEP_S = 10.0  # a longer time between two heartbeats means that this process was stopped itself
_POLL_S = 1.0
_END_S = 10.0
_MOST_UNREAD = 4  # batches of a rank's lines, of 64 KiB each, that the leader has not read yet: a rank that writes more waits
_PORTS = range(1, 1 << 16)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one leader until it is gone; return 0, 1 without a leader or if it refuses this machine, 2 for a wrong address."""
    parser = argparse.ArgumentParser(prog="prefect-torch agent", description="Start ranks of a training on this machine.")
    parser.add_argument("leader", metavar="HOST:PORT", help="where the leader of the training waits")
    parser.add_argument("--name", default=_own_name(), help="this machine's name in messages")
    parser.add_argument("--slots", type=_at_least_one, help="the most ranks that this machine takes")
    parser.add_argument("--gpus", action="store_true", help="take a free GPU for each rank; accept no more ranks than GPUs")
    options = parser.parse_args(arguments)
    try:
        leader = _address_of(options.leader)
        key = os.environ.pop(KEY_VARIABLE, None) or sys.stdin.readline().strip()
        if not key:
            print(f"give the key in {KEY_VARIABLE}, or as a line on stdin", file=sys.stderr)  # noqa: T201 - a program
            return 1
        connection, link = _connect(leader, key)
    except ValueError as exc:
        print(exc, file=sys.stderr)  # noqa: T201 - a program
        return 2
    except OSError as exc:
        is_reached = isinstance(exc, LinkError)
        hint = "" if is_reached else "; set the cluster's leader_address to one by which this machine reaches the flow's"
        print(f"no connection to the leader at {options.leader}: {exc}{hint}", file=sys.stderr)  # noqa: T201 - a program
        return 1
    address = connection.getsockname()[0]
    agent = Agent(link, address)
    gpus = _take_gpus(options.slots, options.leader) if options.gpus else None
    slots = options.slots or 1 if gpus is None else len(gpus.locks)
    place = int(os.environ.get(_PLACE_VARIABLE, "0"))
    machine = {"name": options.name, "slots": slots, "asked": options.slots, "place": place, "address": address}
    return agent.run({**machine, "versions": versions()}, gpus)


def _own_name() -> str:
    """Return the name that Slurm has for this machine, since srun's --exclude takes no other; else that of the host."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give 1 or more")
    return int(text)


def _take_gpus(most: int | None, leader: str) -> "GpuAllocation":
    from prefect_torch.tasks.gang.gpus.allocation import take_free  # noqa: PLC0415 - most agents need none of it

    return take_free(most, f"a training led from {leader}")


def _address_of(leader: str) -> tuple[str, int]:
    host, _, port = leader.rpartition(":")
    if not (host and port.isdecimal() and int(port) in _PORTS):
        raise ValueError(f"{leader!r} is no address of a leader: give HOST:PORT, with a port of 1 to {_PORTS[-1]}")
    return host.strip("[]"), int(port)


def _connect(leader: tuple[str, int], key: str) -> tuple[socket.socket, Link]:
    connection = _dial(leader)
    return connection, greet_leader(connection, key, _CONNECT_S, _SILENT_S)


def _dial(leader: tuple[str, int]) -> socket.socket:
    """Return a connection to the leader, which may be refused at first: a pod starts before its network is complete."""
    ends_s = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection(leader, timeout=max(_AGAIN_S, ends_s - time.monotonic()))
        except OSError:
            if time.monotonic() + _AGAIN_S > ends_s:
                raise
        time.sleep(_AGAIN_S)


class Agent:
    """Executes the leader's orders.

    Args:
        link: The connection to the leader.
        address: The address of this machine on which the leader reaches it.

    """

    def __init__(self, link: Link, address: str) -> None:
        self._link = link
        self._interface = interface_of(address)
        self._neighbours = Neighbours(address, self._report_unreached)
        self._ranks: dict[int, _Rank] = {}
        self._gpus: GpuAllocation | None = None
        self._terminated = threading.Event()
        self._has_ended = threading.Event()

    def run(self, machine: Mapping[str, Any], gpus: "GpuAllocation | None") -> int:
        """Obey the leader until it is gone, end the ranks that are left, and return the exit code.

        Args:
            machine: The description of this machine for the leader.
            gpus: The GPUs for the ranks; None if they need none.

        """
        self._gpus = gpus
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._terminated.set())
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a terminal; the connection shows when the leader is gone
        hello = {"type": "hello", **machine, "port": self._neighbours.port}
        self._link.heard_s = time.monotonic()  # heartbeats come from the hello on, and listing GPUs may have taken minutes
        self._link.send(hello)  # after the handlers: from now on, SIGTERM is reported as a termination, not seen as a loss
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        returncode = 0
        try:
            while True:
                header, body = self._link.receive()
                if header["type"] == "refused":
                    print(header["reason"], file=sys.stderr)  # noqa: T201 - a program
                    returncode = 1
                else:
                    self._obey(header, body)
        except LinkError:  # the leader has closed the connection, or is silent
            pass
        self._has_ended.set()
        for rank in self._ranks.values():
            rank.obey("kill")
        for rank in self._ranks.values():
            rank.thread.join(_END_S)
        return returncode

    def _obey(self, header: Mapping[str, Any], body: bytes) -> None:
        if header["type"] == "prepare":
            with suppress(OSError):  # the start of a rank meets and reports the same error
                self._fork_server(header, self._environment(header))
        elif header["type"] == "start":
            self._start(header, body)
        elif header["type"] == "watch":
            self._neighbours.watch(header["machines"])
        else:
            self._order(header["rank"], header["type"])

    def _report_unreached(self, machines: list[str], unmet: list[str]) -> None:
        with suppress(LinkError):  # the leader is gone: the agent ends
            self._link.send({"type": "unreached", "machines": machines, "unmet": unmet})

    def _order(self, rank: int, order: str) -> None:
        if rank in self._ranks:  # else it could not be started
            self._ranks[rank].obey(order)

    def _start(self, header: Mapping[str, Any], spec: bytes) -> None:
        try:
            self._ranks[header["rank"]] = self._started(header, spec)
        except (OSError, RuntimeError) as exc:  # no descriptor, process or thread is left for the moment, or no disk
            result = {"kind": "infrastructure", "error": f"its process cannot be started: {exc}", "traceback": ""}
            ended = {"type": "exit", "rank": header["rank"], "returncode": None, "oom_killed": False, "record": None}
            self._link.send(ended, json.dumps(result).encode())

    def _started(self, header: Mapping[str, Any], spec: bytes) -> "_Rank":
        held: tuple[int, ...] = ()
        if self._gpus is not None:
            self._gpus.keep(header["local_world_size"])
            held = self._gpus.locks[header["local_rank"] : header["local_rank"] + 1]
        environment = self._environment(header)
        server = self._fork_server(header, environment) if header["program"] == RANK_PROGRAM else None
        return _Rank(self._link, header, environment, spec, held, server)

    def _environment(self, header: Mapping[str, Any]) -> dict[str, str]:
        """Return the whole environment of a rank."""
        left_out = SECRETS_OF_PREFECT.union(header["not_for_ranks"])
        kept = {name: value for name, value in os.environ.items() if name not in left_out}
        if self._interface is not None:
            kept = {**interface_variables(self._interface), **kept}
        chosen = {} if self._gpus is None else self._gpus.environment  # last: others may use all others
        return {**default_threads(header["local_world_size"]), **kept, **header["environment"], **chosen}

    def _fork_server(self, header: Mapping[str, Any], environment: Mapping[str, str]) -> ForkServer | None:
        """Return the server that forks ranks with `environment`, without waiting for it; None if they are not forked."""
        return FORK_SERVERS.find(environment) if header["forks_ranks"] else None

    def _send_heartbeats(self) -> None:
        """Send heartbeats, and close the connection when those of the leader stop.

        Time for which this process itself was stopped, perhaps together with its leader, does not count as silence.
        """
        is_reported = False
        with suppress(LinkError):
            while not self._has_ended.is_set():
                if self._terminated.is_set() and not is_reported:
                    self._link.send({"type": "terminated"})
                    is_reported = True
                self._link.send_heartbeat()
                if time.monotonic() - self._link.heard_s > _SILENT_S:
                    break
                waits_s = time.monotonic()
                if is_reported:
                    self._has_ended.wait(LINK_HEARTBEAT_S)
                else:
                    self._terminated.wait(LINK_HEARTBEAT_S)
                if (now_s := time.monotonic()) - waits_s > _ASLEEP_S:
                    self._link.heard_s = now_s
        self._link.close()


class _Rank:
    """One rank's process, and the thread that passes on its output."""

    def __init__(
        self,
        link: Link,
        header: Mapping[str, Any],
        environment: dict[str, str],
        spec: bytes,
        held: Sequence[int],
        server: ForkServer | None,
    ) -> None:
        self._link = link
        self._number = header["rank"]
        self._recorder = FlightRecorder(self._number, environment) if header["records_collectives"] else None
        self._oom_kills = OomKills()
        self._may_send = threading.Semaphore(_MOST_UNREAD)
        recorded = {} if self._recorder is None else self._recorder.environment
        with ExitStack() as after_failure:
            if self._recorder is not None:
                after_failure.callback(self._recorder.close)
            self._process = RankProcess(python_command(header["program"]), {**environment, **recorded}, spec, held, server)
            after_failure.callback(self._process.reap)
            self.thread = threading.Thread(target=self._supervise, daemon=True)
            self.thread.start()
            after_failure.pop_all()

    def obey(self, order: str) -> None:
        if order == "terminate":
            self._process.terminate()
        elif order == "write_stack_traces":
            self._process.write_stack_traces()
            if self._recorder is not None:
                self._recorder.request()
        elif order == "read":
            self._may_send.release()
        elif order == "kill":
            self._process.kill()
            self._may_send.release(_MOST_UNREAD)  # what is left is little, and the leader may be gone

    def _supervise(self) -> None:
        try:
            with suppress(LinkError):  # the leader is gone: the agent ends, and kills the ranks
                for lines in self._process.lines(_POLL_S):
                    if lines:
                        self._may_send.acquire()
                        self._link.send({"type": "lines", "rank": self._number, "lines": lines})
        finally:  # whatever fails here, the leader waits for the exit
            self._send_exit()

    def _send_exit(self) -> None:
        """Kill what is left of the process, and send how it exited."""
        ended = self._process.reap()
        record = None if self._recorder is None else self._recorder.close()
        with suppress(LinkError):
            self._link.send(
                {
                    "type": "exit",
                    "rank": self._number,
                    "returncode": ended.returncode,
                    "oom_killed": self._oom_kills.happened(),
                    "record": None if record is None else str(record),
                },
                ended.message,
            )


if __name__ == "__main__":
    sys.exit(main())
