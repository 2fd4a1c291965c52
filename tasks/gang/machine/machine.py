"""A machine of the training, as the leader sees it through the link to its agent."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import cloudpickle
from prefect.settings import get_current_settings
from prefect_torch.ckpt import StorageSpec
from prefect_torch.tasks.gang.engines.cluster import AgentEnd
from prefect_torch.tasks.gang.processes.fork_servers import RANK_PROGRAM
from prefect_torch.tasks.options.settings import TorchSettings
from prefect_torch.tasks.rank.spec import RankResult, RankSpec

from .link import LINK_HEARTBEAT_S, Link, LinkError
from .remote_rank import RemoteRank

SILENT_S = 10.0
_ASLEEP_S = 2 * LINK_HEARTBEAT_S
# Prefixes of the variables that the libraries of storages read.
_OF_STORAGES = ("AWS_", "AZURE_", "GOOGLE_", "GCS_", "FSSPEC_")


class RemoteMachine:
    """A machine whose agent has connected; ranks are started on it, and it may be lost at any time.

    Args:
        link: The link to its agent.
        hello: Its description by the agent: its name, its address, the ranks for which it has room.
        environment: Variables of its ranks in addition to those of the machine.
        not_for_ranks: Variables of the agent that its ranks do not inherit.
        explain: Asked with its name why its agent has ended; None if its cluster does not know.

    Attributes:
        name: Its name.
        address: Its address, by which the leader and the other machines reach it.
        port: A port at which its agent lets the other machines connect; None if there is none.
        slots: For how many ranks it has room.
        place: Its number in the order of its cluster, if that has one; else 0.
        unreached: The names of other machines that it no longer reaches.
        unmet: The names of other machines that its agent has never reached; its ranks may, over another network.
        lost: Why it is lost; None while it is not.
        is_out_of_memory: Whether it is lost since its processes used too much memory; known once a rank has finished.
        is_terminated: Whether its agent was sent SIGTERM: the machine is going to be taken away.

    """

    def __init__(
        self,
        link: Link,
        hello: Mapping[str, Any],
        environment: Mapping[str, str],
        not_for_ranks: Sequence[str],
        explain: Callable[[str], AgentEnd | None] | None = None,
    ) -> None:
        self.name = str(hello["name"])
        self.address = str(hello["address"])
        self.port: int | None = hello.get("port")  # agents of other versions, which are refused, have none
        self.slots = int(hello["slots"])
        self.place = int(hello.get("place", 0))
        self.unreached: frozenset[str] = frozenset()
        self.unmet: frozenset[str] = frozenset()
        self.lost: str | None = None
        self.is_out_of_memory = False
        self.is_terminated = False
        self._explain = explain  # None once it was asked
        self._has_closed = False  # whether its agent has closed the link, which the cluster may explain
        self._explaining = threading.Lock()
        self._link = link
        self._environment = dict(environment)
        self._not_for_ranks = list(not_for_ranks)
        self._ranks: dict[int, RemoteRank] = {}
        self._losing = threading.Lock()
        self._starting = threading.Lock()
        threading.Thread(target=self._receive, name=f"machine-{self.name}", daemon=True).start()

    def prepare(self, most_ranks: int) -> None:
        """Let the agent do the imports of its ranks while other machines are awaited.

        Args:
            most_ranks: How many ranks the machine will have at most.

        """
        environment = {**_of_storages(), **self._environment}
        self._send({"type": "prepare", **self._orders(environment, min(most_ranks, self.slots))})

    def watch(self, others: "Sequence[RemoteMachine]") -> None:
        """Have the agent check from now on whether its machine reaches `others`, and report when it no longer does."""
        machines = [(other.name, other.address, other.port) for other in others if other.port is not None]
        self._send({"type": "watch", "machines": machines})

    def start(self, spec: RankSpec) -> RemoteRank:
        """Start a rank; if the machine is lost, the rank is lost as well."""
        rank = self._add(spec.rank, records_collectives=spec.records_collectives)
        environment = {**_carried(*spec.storages), **self._environment, **spec.environment()}
        which = {"rank": spec.rank, "local_rank": spec.local_rank, "records_collectives": spec.records_collectives}
        self._start(RANK_PROGRAM, spec, which | self._orders(environment, spec.local_world_size))
        return rank

    def run(self, program: str, order: object, storage: StorageSpec | None) -> RemoteRank:
        """Start a program other than that of a rank, on a machine without ranks.

        Args:
            program: Its module, which reads a pickled order from stdin and leaves a result as a rank does.
            order: The order.
            storage: The storage that it needs to reach; None if it needs none.

        """
        started = self._add(0, records_collectives=False)
        carried = {} if storage is None else _carried(storage)
        which = {"rank": 0, "local_rank": 0, "records_collectives": False}
        self._start(program, order, which | self._orders({**carried, **self._environment}, 1))
        return started

    def _start(self, program: str, order: object, fields: Mapping[str, Any]) -> None:
        with self._starting:  # the link has one message at a time, and the restored checkpoint's manifest may be large
            self._send({"type": "start", "program": program, **fields}, cloudpickle.dumps(order))

    def refuse(self, reason: str) -> None:
        """Notify the agent why its machine is not used, and close the link."""
        self._send({"type": "refused", "reason": reason})
        self.release()

    def release(self, reason: str = "the attempt is over") -> None:
        """Close the link: the agent kills what is left of its ranks, and ends; ranks that still run are lost for `reason`."""
        self._lose(reason)

    def look(self, slept_s: float) -> None:
        """Send a heartbeat, and record the machine as lost if it has sent nothing for ten seconds.

        Args:
            slept_s: How long this process itself was stopped since the last call.

        """
        self._link.heard_s += slept_s
        if time.monotonic() - self._link.heard_s > SILENT_S:
            self._lose(f"it has sent nothing for {SILENT_S:g} s, so it, or the network to it, is gone")
        elif self.lost is None:
            try:
                self._link.send_heartbeat()
            except LinkError as exc:
                self._lose(str(exc), has_closed=True)

    def _orders(self, environment: Mapping[str, str], local_world_size: int) -> dict[str, Any]:
        """Return the fields of an order from which the agent makes the environment of a process."""
        return {
            "environment": dict(environment),
            "not_for_ranks": self._not_for_ranks,
            "local_world_size": local_world_size,
            "forks_ranks": TorchSettings().fork_ranks,
        }

    def _add(self, number: int, *, records_collectives: bool) -> RemoteRank:
        rank = RemoteRank(partial(self._order, number), self.name, self._loss, records_collectives=records_collectives)
        with self._losing:
            self._ranks[number] = rank
            if self.lost is not None:
                rank.record({"type": "lost"})
        return rank

    def _loss(self) -> RankResult:
        """Return how the ranks have ended that were lost with it; the first call asks the cluster, and adds its reason."""
        with self._explaining:
            explain, self._explain = self._explain, None
            if explain is not None and self._has_closed and (end := explain(self.name)) is not None:
                self.lost, self.is_out_of_memory = f"{self.lost}: {end.reason}", end.is_out_of_memory
        error = f"its machine {self.name} is lost: {self.lost}"
        return RankResult(kind="out_of_memory" if self.is_out_of_memory else "infrastructure", error=error)

    def _order(self, rank: int, order: str) -> None:
        self._send({"type": order, "rank": rank})

    def _send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        with suppress(LinkError):  # the thread that receives sees it, too, and notifies all ranks
            self._link.send(header, body)

    def _receive(self) -> None:
        try:
            while True:
                message, body = self._link.receive()
                if message["type"] == "terminated":
                    self.is_terminated = True
                elif message["type"] == "unreached":
                    self.unreached, self.unmet = frozenset(message["machines"]), frozenset(message["unmet"])
                else:
                    self._ranks[message["rank"]].record(message, body)
        except LinkError as exc:
            self._lose(f"its agent is gone: {exc}", has_closed=True)

    def _lose(self, reason: str, *, has_closed: bool = False) -> None:
        with self._losing:
            if self.lost is None:
                self.lost, self._has_closed = reason, has_closed and not self.is_terminated
                for rank in self._ranks.values():
                    rank.record({"type": "lost"})
        self._link.close()


class Pulse:
    """Sends a heartbeat to each machine of an attempt, once a second, from `start` to `stop`."""

    def __init__(self) -> None:
        self.machines: list[RemoteMachine] = []
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start to send heartbeats."""
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._stopped.set()

    def _run(self) -> None:
        looked_s = time.monotonic()
        while not self._stopped.wait(LINK_HEARTBEAT_S):
            passed_s, looked_s = time.monotonic() - looked_s, time.monotonic()
            for machine in tuple(self.machines):
                machine.look(passed_s if passed_s > _ASLEEP_S else 0.0)


def _of_storages() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_OF_STORAGES)}


def _carried(*storages: StorageSpec) -> dict[str, str]:
    """Return the variables that storages need on another machine: to renew a login, Prefect's settings as well."""
    if all(storage.credential_source is None for storage in storages):
        return _of_storages()
    # Prefect's API may be set in a profile, which the other machine does not have.
    own = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_") and name != "PREFECT_PROFILE"}
    return {**_of_storages(), **own, **get_current_settings().to_environment_variables(exclude_unset=True)}
