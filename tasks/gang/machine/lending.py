"""The machines of a training: lent for each attempt, all that are needed or none; lost ones are avoided for a while."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from prefect import get_run_logger
from prefect_torch.tasks.gang.engines.cluster import Cluster, MachineRequest
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError

from .gathering import gather
from .machine import RemoteMachine
from .regrowth import Regrowth

_AVOID_S = 300.0
_AGAIN_S = 5.0  # between two times that a cluster is asked
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Lease:
    """The machines of one attempt.

    Attributes:
        host: The address of the leader that they reach.
        machines: The machines.
        num_ranks: How many ranks each of them has.

    """

    host: str
    machines: tuple[RemoteMachine, ...]
    num_ranks: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the machines."""
        return tuple(machine.name for machine in self.machines)


class Machines:
    """The machines that a cluster lends to a training, from one attempt to the next.

    Args:
        cluster: The cluster.
        fewest: With how many ranks an attempt can start.
        most: How many ranks it has if there is room.
        use_gpu: Whether each rank needs a GPU.
        regrow_after_s: How often an attempt with fewer ranks than the most asks for more machines; None for never.

    """

    def __init__(self, cluster: Cluster, fewest: int, most: int, *, use_gpu: bool, regrow_after_s: float | None = None) -> None:
        self._cluster = cluster
        self._regrow_after_s = regrow_after_s
        self._fewest, self._most, self._use_gpu = fewest, most, use_gpu
        self._lost: dict[str, float] = {}

    @contextmanager
    def lend(self, raise_if_requested: Callable[[], None]) -> Iterator[Lease]:
        """Lend machines with room for the ranks, which are released at the end of the context.

        Args:
            raise_if_requested: Called again and again while this waits.

        Raises:
            NotEnoughMachinesError: If there is room for too few ranks, and still is after the cluster's `wait_s`.

        """
        with ExitStack() as lent:
            lease = self._wait_for(lent, raise_if_requested)
            try:
                yield lease
            finally:
                now_s = time.monotonic()
                self._lost.update({each.name: now_s for each in lease.machines if each.lost or each.is_terminated})

    @contextmanager
    def look_for_more(self, lease: Lease) -> Iterator[Regrowth | None]:
        """Ask the cluster for what `lease` lacks of the most ranks, within the context; None if it is not to be asked."""
        missing = self._most - sum(lease.num_ranks)
        if self._regrow_after_s is None or not missing:
            yield None
            return
        in_use = frozenset(machine.name for machine in lease.machines)
        regrowth = Regrowth(
            self._cluster,
            lambda: MachineRequest(1, missing, self._use_gpu, self._lost_lately() | in_use, in_use),
            self._regrow_after_s,
        )
        try:
            yield regrowth
        finally:
            regrowth.stop()

    def _lost_lately(self) -> frozenset[str]:
        return frozenset(name for name, lost_s in self._lost.items() if time.monotonic() - lost_s < _AVOID_S)

    def _wait_for(self, lent: ExitStack, raise_if_requested: Callable[[], None]) -> Lease:
        avoid = self._lost_lately()
        deadline_s = time.monotonic() + self._cluster.wait_s
        while True:
            wanted = MachineRequest(self._fewest, self._most, self._use_gpu, avoid)
            try:
                with ExitStack() as tried:
                    lease = self._try(wanted, tried, raise_if_requested)
                    lent.push(tried.pop_all())
                    return lease
            except NotEnoughMachinesError as exc:
                if not avoid and time.monotonic() >= deadline_s:
                    raise
                get_run_logger().warning("%s; the cluster is asked again", exc)
            if avoid:
                avoid = frozenset()  # a machine that was lost is better than none
            else:
                _sleep(_AGAIN_S, raise_if_requested)

    def _try(self, wanted: MachineRequest, tried: ExitStack, raise_if_requested: Callable[[], None]) -> Lease:
        gathering = tried.enter_context(gather(self._cluster, wanted))
        machines = gathering.wait(raise_if_requested)
        num_ranks = _fill(machines, wanted.most)
        if sum(num_ranks) < wanted.fewest:
            if gathering.counted is not None and gathering.counted[1] < wanted.fewest:
                raise NotEnoughMachinesError(f"{_ranks(wanted)} wanted, the cluster has {gathering.counted[0]}")
            raise NotEnoughMachinesError(_shortage(wanted, machines, gathering.missing()))
        used = sum(number > 0 for number in num_ranks)
        for machine in machines[used:]:
            machine.release()
        return Lease(gathering.host, machines[:used], tuple(num_ranks[:used]))


def _fill(machines: Sequence[RemoteMachine], most: int) -> list[int]:
    """Return how many ranks each machine gets, the first ones as many as they have room for."""
    num_ranks: list[int] = []
    for machine in machines:
        num_ranks.append(min(machine.slots, most - sum(num_ranks)))
    return num_ranks


def _shortage(wanted: MachineRequest, machines: Sequence[RemoteMachine], missing: list[str]) -> str:
    there = [f"{machine.name}: {machine.slots}" for machine in machines]
    avoided = [f"{name}: lost some minutes ago" for name in sorted(wanted.avoid)]
    room = sum(machine.slots for machine in machines)
    reasons = "; ".join([*there, *missing, *avoided]) or "no machine"
    return f"{_ranks(wanted)} wanted, the cluster has room for {room}: {reasons}"


def _ranks(wanted: MachineRequest) -> str:
    return f"{wanted.fewest} ranks" if wanted.fewest == wanted.most else f"at least {wanted.fewest} ranks"


def _sleep(seconds: float, raise_if_requested: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        raise_if_requested()
        time.sleep(_POLL_S)
