"""Inspecting the machines of a cluster before a training: their devices, and what they can reach."""

import pickle
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.tasks.gang.engines.cluster import Cluster, MachineRequest
from prefect_torch.tasks.rank.machine_report import CLOCK, InspectionOrder
from prefect_torch.tasks.rank.rendezvous import Address

from .gathering import gather
from .machine import RemoteMachine

_PROGRAM = "prefect_torch.tasks.rank.machine_report"
_LONGEST_S = 180.0  # torch from a cold network disk takes a minute


@dataclass(frozen=True, slots=True)
class InspectedMachine:
    """The findings about one machine.

    Attributes:
        name: Its name.
        problem: Why it could not be inspected; None if it could.
        slots: For how many ranks it has room.
        clock_ahead_s: By how much its clock is ahead of the leader's, up to some hundredths of a second.
        report: Its own report: `gpus`, `nccl`, `shared_memory`, and why `leader`, `storage` and other `machines` are out of
            reach, if they are.

    """

    name: str
    problem: str | None = None
    slots: int = 0
    clock_ahead_s: float = 0.0
    report: Mapping[str, Any] = field(default_factory=dict)


def inspect_machines(cluster: Cluster, num_ranks: int, storage: StorageSpec | None) -> list[InspectedMachine]:
    """Return the machines that the cluster lends for `num_ranks` ranks, and those that do not come.

    Args:
        cluster: The cluster.
        num_ranks: The number of ranks, each without a GPU of its own: GPUs in use are not waited for.
        storage: The storage of trainings, in which an object is written, read by each machine, and removed; None to skip that.

    Raises:
        NotEnoughMachinesError: If the cluster can lend no machine; the message says why.
        StorageError, OSError: If this machine itself cannot write to the storage.

    """
    wanted = MachineRequest(1, num_ranks, use_gpu=False, avoid=frozenset())
    cluster = cluster.model_copy(update={"wait_s": cluster.asks_for_s})  # somebody is waiting, who may not want to for a day
    with _written(storage) as key, gather(cluster, wanted) as gathering, _listening(gathering.host) as leader:
        machines = gathering.wait(lambda: None, everyone=True)
        ports = {machine.name: Address(machine.address, machine.port) for machine in machines if machine.port is not None}
        orders = [InspectionOrder(leader, storage, key, _without(ports, machine.name)) for machine in machines]
        with ThreadPoolExecutor(max(1, len(machines)), "inspection") as threads:
            found = list(threads.map(_inspect, machines, orders))
        missing = [InspectedMachine(name, reason) for name, reason in gathering.reasons().items()]
    known = {machine.name for machine in found}
    return [*found, *(machine for machine in missing if machine.name not in known)]


@contextmanager
def _written(storage: StorageSpec | None) -> Iterator[str]:
    key = f"doctor-{token_hex(8)}"
    if storage is None:
        yield key
        return
    opened = open_storage(storage)
    opened.put_bytes(key, b"seen")
    try:
        yield key
    finally:
        with suppress(PermissionError):  # where nothing may be deleted, one byte more stays
            opened.delete([key])


def _without(ports: Mapping[str, Address], own: str) -> dict[str, Address]:
    return {name: address for name, address in ports.items() if name != own}


@contextmanager
def _listening(host: str) -> Iterator[Address]:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096) as server:
        yield Address(host, server.getsockname()[1])


def _inspect(machine: RemoteMachine, order: InspectionOrder) -> InspectedMachine:
    started = machine.run(_PROGRAM, order, order.storage)
    clock_ahead_s, deadline_s = 0.0, time.monotonic() + _LONGEST_S
    last_lines: list[str] = []
    for lines in started.lines(1.0):
        for line in lines:
            if line.startswith(CLOCK):
                clock_ahead_s = float(line.removeprefix(CLOCK)) - time.time()
            else:
                last_lines = [*last_lines, line][-3:]
        if time.monotonic() > deadline_s:  # its program may outlast a SIGKILL, as on a dead network filesystem
            machine.release(f"its inspection took longer than {_LONGEST_S:g} s")
    result = started.finish()
    if result.return_value is None:
        return InspectedMachine(machine.name, ": ".join([result.error, *last_lines]), machine.slots)
    report = pickle.loads(result.return_value)  # noqa: S301 - made by this process, from JSON
    return InspectedMachine(machine.name, None, machine.slots, clock_ahead_s, report)
