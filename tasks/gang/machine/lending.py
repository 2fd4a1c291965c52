"""The machines of a training: all that are needed or none, kept while ranks fail on them; bad ones are avoided for a while."""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate

from prefect_torch.tasks.gang.engines.cluster import Cluster, MachineRequest
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError, RankFailedError
from prefect_torch.tasks.run_logs import get_run_logger

from .gathering import gather
from .machine import RemoteMachine
from .partition import parted_from_others, watch_each_other
from .regrowth import Regrowth

_AVOID_S = 300.0
_AGAIN_S = 5.0  # between two requests to a cluster
_POLL_S = 0.05
_MOST_FAULTS = 2
_MOST_FAULTS_OF_ONE = 3  # more: of two good machines, one has the same two consecutive failures half of the time
_OF_THE_FUNCTION = {"user", "out_of_memory"}  # kinds of failures, which happen on any machine


@dataclass(frozen=True, slots=True)
class Lease:
    """The machines of one attempt.

    Attributes:
        host: The leader's address by which they reach it.
        machines: The machines.
        num_ranks: The number of ranks of each machine.

    """

    host: str
    machines: tuple[RemoteMachine, ...]
    num_ranks: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the machines."""
        return tuple(machine.name for machine in self.machines)

    def name_of(self, rank: int) -> str:
        """Return the name of the machine of a rank: neighbouring ranks share one."""
        return self.names[bisect_right(list(accumulate(self.num_ranks)), rank)]


class Machines:
    """The machines that a cluster lends to a training, from one attempt to the next; `close` releases those that are kept.

    Args:
        cluster: The cluster.
        fewest: The smallest number of ranks with which an attempt can start.
        most: The number of ranks that it has if the machines suffice.
        use_gpu: Whether each rank needs a GPU.
        regrow_after_s: How often an attempt with fewer ranks than the most asks for more machines; None for never.

    """

    def __init__(self, cluster: Cluster, fewest: int, most: int, *, use_gpu: bool, regrow_after_s: float | None = None) -> None:
        self._cluster = cluster
        self._regrow_after_s = regrow_after_s
        self._fewest, self._most, self._use_gpu = fewest, most, use_gpu
        self._lost: dict[str, float] = {}
        self._kept: tuple[ExitStack, Lease] | None = None  # between two attempts
        self._more: tuple[ExitStack, tuple[RemoteMachine, ...]] | None = None  # lent while an attempt ran, for the next one
        self._num_faults = 0  # consecutive failures of the infrastructure on the current machines
        self._suspect: tuple[str, int] | None = None  # a machine, and how many consecutive attempts its ranks alone have ended

    @contextmanager
    def lend(self, raise_if_requested: Callable[[], None]) -> Iterator[Lease]:
        """Lend machines with room for the ranks.

        They are released at the end of the context, unless a rank has failed while no machine is lost and the number of ranks
        is the largest possible. Then the next context gets the same machines, whose agents need neither be started again nor
        import anything. After two consecutive failures of the infrastructure, a machine may be the cause, so the machines are
        released as well. If three were failures of ranks of one and the same machine, and of no other, it is avoided like one
        that was lost. If the attempt has ended to go on with more ranks, the next context gets its machines and the new ones.

        Args:
            raise_if_requested: Called repeatedly while this waits.

        Raises:
            NotEnoughMachinesError: If there is room for too few ranks, and still is after the cluster's `wait_s`.

        """
        with ExitStack() as lent:
            lease = self._lend_kept(lent)
            if lease is None:
                lease = self._wait_for(lent, raise_if_requested)
                self._num_faults = 0
            try:
                yield lease
                self._keep_with_more(lent, lease)
            except RankFailedError as exc:
                is_bad = self._record_fault(lease, exc)
                if self._is_to_keep(lease, exc) and not is_bad:
                    self._kept = (lent.pop_all(), lease)
                raise
            finally:
                self._record_losses(lease)
                self._release_more()

    def close(self) -> None:
        """Release the machines that are kept between two attempts; no effect if there are none."""
        if self._kept is not None:
            held, _ = self._kept
            self._kept = None
            held.close()

    @contextmanager
    def look_for_more(self, lease: Lease) -> Iterator[Regrowth | None]:
        """Ask the cluster, within the context, for room for the ranks that `lease` lacks; yield None if it is not asked.

        The machines that it lends are released at the end, unless `Regrowth.is_used`.
        """
        missing = self._most - sum(lease.num_ranks)
        if self._regrow_after_s is None or not missing:
            yield None
            return
        in_use = frozenset(machine.name for machine in lease.machines)
        regrowth = Regrowth(
            self._cluster,
            lambda: self._request(1, missing, self._lost_lately(), in_use),
            self._regrow_after_s,
        )
        try:
            yield regrowth
            if regrowth.is_used:
                self._more = regrowth.hand_over(), regrowth.machines
        finally:
            regrowth.stop()

    def _lend_kept(self, lent: ExitStack) -> Lease | None:
        """Return the machines that were kept, if all of them are still there."""
        if self._kept is None:
            return None
        held, lease = self._kept
        if self._record_losses(lease):
            self.close()
            return None
        self._kept = None
        lent.push(held.pop_all())
        return lease

    def _keep_with_more(self, lent: ExitStack, lease: Lease) -> None:
        """Keep the machines of an attempt together with those that were lent meanwhile; in a queue, others would get both."""
        if self._more is None:
            return
        held, more = self._more
        machines = (*lease.machines, *(machine for machine in more if machine.lost is None))
        has_twice = len({machine.name for machine in machines}) < len(machines)  # two agents, which nothing tells apart
        if has_twice or self._record_losses(lease):
            return
        self._more = None
        lent.push(held)
        self._kept = lent.pop_all(), _lease(lease.host, machines, self._most)

    def _release_more(self) -> None:
        if self._more is not None:
            held, _ = self._more
            self._more = None
            held.close()

    def _is_to_keep(self, lease: Lease, failure: RankFailedError) -> bool:
        if failure.kind in _OF_THE_FUNCTION:
            self._num_faults = 0
        elif failure.kind == "infrastructure":
            self._num_faults += 1
        else:  # no attempt follows, or the loss of a machine may not be noticed yet
            return False
        is_whole = sum(lease.num_ranks) == self._most and not self._record_losses(lease)
        return is_whole and self._num_faults < _MOST_FAULTS

    def _record_fault(self, lease: Lease, failure: RankFailedError) -> bool:
        """Avoid a machine whose ranks alone fail again, such as one with a bad GPU; return whether there is one."""
        if failure.kind in _OF_THE_FUNCTION:
            self._suspect = None
        ranks = {it.rank for it in (failure, *failure.others)}
        if failure.kind != "infrastructure" or None in ranks or len(lease.machines) == 1:
            return False
        name, *others = {lease.name_of(rank) for rank in ranks if rank is not None}
        if others:
            self._suspect = None
            return False
        number = 1 + (self._suspect[1] if self._suspect is not None and self._suspect[0] == name else 0)
        self._suspect = name, number
        if number < _MOST_FAULTS_OF_ONE:
            return False
        self._lost[name] = time.monotonic()
        get_run_logger().warning(
            "machine %s is avoided for %.0f minutes: only its ranks failed first in %d consecutive attempts; look at its GPUs, "
            "memory and disk", name, _AVOID_S / 60, number,
        )  # fmt: skip
        return True

    def _record_losses(self, lease: Lease) -> bool:
        """Record machines that are lost, cut off from others or terminated, to avoid them; return whether there are any."""
        lost = {machine.name for machine in lease.machines if machine.lost or machine.is_terminated}
        lost |= parted_from_others([machine for machine in lease.machines if machine.name not in lost])
        self._lost.update(dict.fromkeys(lost, time.monotonic()))
        return bool(lost)

    def _lost_lately(self) -> frozenset[str]:
        return frozenset(name for name, lost_s in self._lost.items() if time.monotonic() - lost_s < _AVOID_S)

    def _request(self, fewest: int, most: int, lost: frozenset[str], in_use: frozenset[str] = frozenset()) -> MachineRequest:
        """Return a request without the machines that were lost; it ends when these may be used again."""
        ends_s = max((self._lost[name] + _AVOID_S for name in lost), default=math.inf)
        avoids_for_s = max(0.0, ends_s - time.monotonic())
        return MachineRequest(fewest, most, self._use_gpu, lost | in_use, in_use, avoids_for_s)

    def _wait_for(self, lent: ExitStack, raise_if_requested: Callable[[], None]) -> Lease:
        avoid = self._lost_lately()
        wait_s = self._cluster.asks_for_s
        deadline_s = time.monotonic() + wait_s if self._cluster.waits_itself else None
        while True:
            wanted = self._request(self._fewest, self._most, avoid)
            try:
                with ExitStack() as tried:
                    lease = self._try(wanted, tried, raise_if_requested)
                    lent.push(tried.pop_all())
                    return lease
            except NotEnoughMachinesError as exc:
                now_s = time.monotonic()
                if deadline_s is None:  # that there are too few is known only now: an agent may take a minute to come
                    deadline_s = now_s + wait_s
                if not avoid and now_s >= deadline_s:
                    raise
                again = f", and may lend {', '.join(sorted(avoid))} again" if avoid else ""
                get_run_logger().warning("%s; the cluster is asked again%s", exc, again)
            if avoid:
                avoid = frozenset()  # a machine that was lost is better than none
            else:
                _sleep(_AGAIN_S, raise_if_requested)
                avoid = frozenset(self._lost)  # a request for all machines may have failed because one is still gone

    def _try(self, wanted: MachineRequest, tried: ExitStack, raise_if_requested: Callable[[], None]) -> Lease:
        gathering = tried.enter_context(gather(self._cluster, wanted, prepares=True))

        def look() -> None:
            raise_if_requested()
            for delay in gathering.new_delays():
                get_run_logger().info("%s", delay)

        machines = gathering.wait(look)
        if sum(machine.slots for machine in machines) < wanted.fewest:
            if gathering.counted is not None and gathering.counted[1] < wanted.fewest:
                raise NotEnoughMachinesError(
                    f"{_ranks(wanted)} wanted, the cluster has {gathering.counted[0]}; {_remedy(wanted)}"
                )
            raise NotEnoughMachinesError(_shortage(wanted, machines, gathering.missing()))
        return _lease(gathering.host, machines, wanted.most)


def _lease(host: str, machines: tuple[RemoteMachine, ...], most: int) -> Lease:
    """Return a lease of the first machines that suffice for `most` ranks, and release the others."""
    num_ranks = _fill(machines, most)
    used = sum(number > 0 for number in num_ranks)
    for machine in machines[used:]:
        machine.release()
    watch_each_other(machines[:used])
    return Lease(host, machines[:used], tuple(num_ranks[:used]))


def _fill(machines: Sequence[RemoteMachine], most: int) -> list[int]:
    """Return the number of ranks of each machine; the machines are filled in order."""
    num_ranks: list[int] = []
    for machine in machines:
        num_ranks.append(min(machine.slots, most - sum(num_ranks)))
    return num_ranks


def _shortage(wanted: MachineRequest, machines: Sequence[RemoteMachine], missing: list[str]) -> str:
    there = [f"{machine.name}: {machine.slots}" for machine in machines]
    avoided = [f"{name}: avoided, since it was lost or its ranks failed some minutes ago" for name in sorted(wanted.avoid)]
    room = sum(machine.slots for machine in machines)
    reasons = "; ".join([*there, *missing, *avoided]) or "no machine"
    return f"{_ranks(wanted)} wanted, the cluster has room for {room}: {reasons}; {_remedy(wanted)}"


def _remedy(wanted: MachineRequest) -> str:
    fewer = "give num_workers=(fewest, most)" if wanted.fewest == wanted.most else "lower the minimum of num_workers"
    return f"{fewer}, or give the cluster a longer wait_s"


def _ranks(wanted: MachineRequest) -> str:
    return f"{wanted.fewest} ranks" if wanted.fewest == wanted.most else f"at least {wanted.fewest} ranks"


def _sleep(seconds: float, raise_if_requested: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        raise_if_requested()
        time.sleep(_POLL_S)
