"""The agents that a cluster has started for an attempt: those that came, and why others will not."""

import errno
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

from prefect_torch.tasks.gang.engines.cluster import AgentEnd, Cluster, MachineRequest
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError

from .agent_listener import AgentListener
from .launcher import AgentLauncher
from .link import Link
from .machine import Pulse, RemoteMachine
from .versions import explain_mixture

_START_S = 60.0  # until an agent has come; longer than the slowest start of an interpreter from a cold network disk
_MORE_S = 10.0  # how long to wait for more machines than are needed, of which it is not known whether they come
_END_S = 2.0
_POLL_S = 0.05
_OF_ADDRESS = (socket.EAI_NONAME, errno.EADDRNOTAVAIL)
_NO_GPU = "torch finds no GPU there, or others use all of them: `prefect-torch doctor` there says which it finds"
_TAKEN_AWAY = "it is about to be taken away (SIGTERM to its agent)"
_ANYWHERE = ("192.0.2.1", 9)  # RFC 5737; connecting a datagram socket sends nothing


class Gathering:
    """The leader's side of one request to a cluster for machines: an implementation of `Agents`, and the agents that came.

    Args:
        cluster: The cluster.
        wanted: The ranks that need machines.
        prepares: Whether ranks will be started on the machines; if so, each machine prepares itself as soon as it connects.

    Attributes:
        address: "HOST:PORT", where the leader waits for agents.
        host: The host of `address`.
        key: The secret of the agents.
        is_over: Whether no agent is awaited any longer.

    """

    def __init__(self, cluster: Cluster, wanted: MachineRequest, *, prepares: bool) -> None:
        self.key = secrets.token_hex(32)
        self._cluster, self._wanted, self._prepares = cluster, wanted, prepares
        self._expected: list[str] = []
        self._came: dict[str, RemoteMachine] = {}
        self._failed: dict[str, str] = {}
        self._delays: Mapping[str, str] = {}
        self._announced: frozenset[str] = frozenset()
        self._asked = 0  # how many ranks the agents that said hello were to take, with or without room for them
        self._returned: set[str] = set()  # kinds of delays
        self._explain: Callable[[str], AgentEnd | None] | None = None
        self._launchers: list[tuple[AgentLauncher, list[str]]] = []
        self.is_over = False
        self._changing = threading.Lock()
        self._pulse = Pulse()
        self._listener = self._listen()
        try:
            self._pulse.start()
        except RuntimeError:  # no thread is left for the moment
            self._listener.close()
            raise
        self.host = self._listener.host
        self.address = f"{f'[{self.host}]' if ':' in self.host else self.host}:{self._listener.port}"

    def arguments(self, name: str | None = None, slots: int | None = None) -> list[str]:
        """Return the arguments of an agent's command."""
        named = [] if name is None else ["--name", name]
        if slots is None and self._wanted.use_gpu:
            slots = self._wanted.most  # an agent takes its GPUs at once: others are to have those that no rank will
        gpus = ["--gpus"] if self._wanted.use_gpu else []
        return [self.address, *named, *([] if slots is None else ["--slots", str(slots)]), *gpus]

    def run(self, command: str, names: list[str]) -> None:
        """Run a shell command that starts one agent for each of `names`."""
        for name in names:
            self.expect(name)
        try:
            self._launchers.append((AgentLauncher(command, self.key, partial(self._fail_all, names)), names))
        except (OSError, RuntimeError) as exc:  # no descriptor, process or thread is left for the moment
            self._fail_all(names, f"its command cannot be started: {exc}")

    def expect(self, name: str) -> None:
        """Expect an agent."""
        self._expected.append(name)

    def fail(self, name: str, reason: str) -> None:
        """Stop expecting an agent on `name`."""
        self._failed.setdefault(name, reason)

    def delay(self, reasons: Mapping[str, str]) -> None:
        """Say why some agents have not come yet, by their names, in place of what was said before."""
        self._delays = dict(reasons)

    def late(self) -> set[str]:
        """Return the names of the agents that were expected and have not come."""
        return set(self._expected) - self._came_as()

    def announce(self, names: Collection[str]) -> None:
        """Say which agents are on their way, by their names, in place of what was said before."""
        self._announced = frozenset(names)

    def explain_ends(self, explain: Callable[[str], AgentEnd | None]) -> None:
        """Ask `explain` why an agent that came has ended."""
        self._explain = explain

    def new_delays(self) -> list[str]:
        """Return why agents have not come yet, without kinds of reasons that an earlier call returned."""
        delays = []
        for name, reason in self._delays.items():
            kind, _, _ = reason.partition(":")
            if kind not in self._returned:
                self._returned.add(kind)
                delays.append(f"{name} has not come yet: {reason}")
        return delays

    def wait(self, raise_if_requested: Callable[[], None], *, everyone: bool = False) -> tuple[RemoteMachine, ...]:
        """Return the machines whose agents came, once they suffice for all ranks or no more will come.

        They are in the expected order, and those of one expected name in the order of Slurm's nodes, else of their names.

        If they suffice for the fewest ranks, others are awaited while it is known that they come, and ten seconds longer.

        Args:
            raise_if_requested: Called repeatedly while this waits.
            everyone: Wait for all machines that are expected by their names, also for those that the ranks do not need.

        """
        awaits_names = everyone and len(self._expected) > 1
        begun_s, enough_s = time.monotonic(), None
        longest_s = max(_START_S, min(self._cluster.longest_wait_s, self._wanted.avoids_for_s))
        while (now_s := time.monotonic()) - begun_s < longest_s:
            raise_if_requested()
            room = sum(machine.slots for machine in self._alive())
            came_as = self._came_as()
            has_all = all(name in came_as or name in self._failed for name in self._expected)
            if has_all or (room >= self._most() and not awaits_names):
                break
            enough_s = (enough_s or now_s) if room >= self._wanted.fewest and not self._more_are_coming() else None
            if enough_s is not None and not awaits_names and now_s - enough_s > _MORE_S:
                break
            time.sleep(_POLL_S)
        else:
            late = f"its agent did not come within {round(longest_s, 2):g} s"
            for launcher, names in self._launchers:
                self._fail_all(names, late + launcher.said)
            for name in self._expected:
                self.fail(name, ": ".join(filter(None, [late, self._delays.get(name)])))
        self._listener.close()
        with self._changing:
            self.is_over = True
        return self._alive()

    @property
    def counted(self) -> tuple[str, int] | None:
        """The line in which a command reports its cluster's room, and the number of ranks in it; None without such a line."""
        return next((launcher.room for launcher, _ in self._launchers if launcher.room is not None), None)

    def missing(self) -> list[str]:
        """Return the machines that did not come, and why."""
        return [f"{name}: {reason}" for name, reason in self.reasons().items()]

    def reasons(self) -> dict[str, str]:
        """Return why machines did not come, by their names."""
        taken_away = {name: _TAKEN_AWAY for name, machine in self._came.items() if machine.is_terminated}
        lost = {name: machine.lost for name, machine in self._came.items() if machine.lost is not None}
        reasons = {**taken_away, **lost}
        came_as = self._came_as()
        reasons.update({name: reason for name, reason in dict(self._failed).items() if name not in came_as})
        return reasons

    def release(self) -> None:
        """Release all machines."""
        self._listener.close()
        with self._changing:
            self.is_over = True  # also where `wait` has raised: nobody would release an agent that comes now
            for machine in self._came.values():
                machine.release()

    def close(self) -> None:
        """Accept no more agents, and return when all commands have ended."""
        self._listener.close()
        self._pulse.stop()
        deadline_s = time.monotonic() + _END_S
        for launcher, _ in self._launchers:
            launcher.end(max(0.0, deadline_s - time.monotonic()))

    def _listen(self) -> AgentListener:
        cluster = self._cluster
        try:
            return AgentListener(_address(cluster.leader_address), cluster.leader_port, self.key, self._enter)
        except OSError as exc:
            if exc.errno in _OF_ADDRESS and cluster.leader_address is not None:  # asking again would not help
                raise ValueError(
                    f"leader_address={cluster.leader_address!r} is no address of this machine ({exc.strerror}): give the name "
                    "or address by which the machines of the cluster reach it, or none"
                ) from exc
            if exc.errno == errno.EADDRINUSE:
                message = f"agents cannot come to port {cluster.leader_port} (leader_port): it is in use"
            else:  # no answer of a name server, no descriptor left: it may pass, and must not end a training
                message = f"agents cannot come to {cluster.leader_address or 'this machine'}: {exc}"
            raise NotEnoughMachinesError(message) from exc

    def _alive(self) -> tuple[RemoteMachine, ...]:
        order = {name: number for number, name in enumerate(self._expected)}
        with self._changing:
            alive = [machine for machine in self._came.values() if not (machine.lost or machine.is_terminated)]

        def place(machine: RemoteMachine) -> tuple[int, int, list[str | int]]:
            expected = order.get(self._cluster.expected_name(machine.name), len(order))
            return expected, machine.place, _in_numerical_order(machine.name)

        return tuple(sorted(alive, key=place))

    def _came_as(self) -> set[str]:
        """Return the names by which the agents that came were expected."""
        with self._changing:
            return set(map(self._cluster.expected_name, self._came))

    def _most(self) -> int:
        return self._wanted.most if self.counted is None else min(self._wanted.most, self.counted[1])

    def _more_are_coming(self) -> bool:
        """Return whether some agent has yet to come: it lists its GPUs, or the cluster has announced or counted it."""
        came_as = self._came_as()
        is_announced = any(name not in came_as and name not in self._failed for name in self._announced)
        is_counted = self.counted is not None and self._asked < self._most()
        return self._listener.num_coming > 0 or is_announced or is_counted

    def _fail_all(self, names: list[str], reason: str) -> None:
        for name in names:
            self.fail(name, reason)

    def _enter(self, link: Link, hello: Mapping[str, Any]) -> None:
        try:
            machine = RemoteMachine(link, hello, self._cluster.environment, self._cluster.not_for_ranks, self._explain)
        except RuntimeError as exc:  # no thread is left for the moment
            self.fail(self._cluster.expected_name(str(hello["name"])), f"its messages cannot be received: {exc}")
            link.close()
            return
        refusal = _NO_GPU if machine.slots < 1 else explain_mixture(hello["versions"])
        with self._changing:
            self._asked += hello.get("asked") or machine.slots
            if refusal is not None:
                self.fail(self._cluster.expected_name(machine.name), refusal)
            elif self.is_over:
                refusal = "the attempt has begun without it"
            elif machine.name in self._came:
                refusal = f"there is an agent called {machine.name} already"
            else:
                self._pulse.machines.append(machine)
                self._came[machine.name] = machine
        if refusal is not None:
            machine.refuse(refusal)
        elif self._prepares:
            machine.prepare(self._wanted.most)


@contextmanager
def gather(cluster: Cluster, wanted: MachineRequest, *, prepares: bool = False) -> Iterator[Gathering]:
    """Ask a cluster for machines, and release them at the end of the context.

    Args:
        cluster: The cluster.
        wanted: The ranks that need machines.
        prepares: Whether ranks will be started on the machines; if so, each machine prepares itself as soon as it connects.

    """
    gathering = Gathering(cluster, wanted, prepares=prepares)
    try:
        with cluster.lend(wanted, gathering):
            try:
                yield gathering
            finally:
                gathering.release()
    finally:
        gathering.close()


def _in_numerical_order(name: str) -> list[str | int]:
    """Return what sorts "n2" before "n10"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def _address(given: str | None) -> str:
    """Return the address of this machine that `given` names, or that of the default route.

    On Debian, the machine's own name is 127.0.1.1 in /etc/hosts, where no other machine reaches it. The address of the
    default route is returned then, too.

    Raises:
        ValueError: If there is no default route in this case.

    """
    if given is None:
        return _routed_address()
    addresses = [str(found[4][0]) for found in socket.getaddrinfo(given, None, type=socket.SOCK_STREAM)]
    is_meant = given in {*addresses, "localhost"}
    address = next((it for it in addresses if is_meant or not _is_loopback(it)), _routed_address())
    if _is_loopback(address) and not is_meant:
        raise ValueError(
            f"leader_address={given!r} is {addresses[0]} on this machine, where no other machine reaches it, and there is no "
            "default route: give the address by which the machines of the cluster reach it"
        )
    return address


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def _routed_address() -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as routed:
        routed.connect(_ANYWHERE)
        return str(routed.getsockname()[0])
    return "127.0.0.1"
