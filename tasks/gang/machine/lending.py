"""The machines of a training: all that are needed or none, kept while ranks fail on them; bad ones are avoided for a while."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate

from prefect_torch.ckpt.text import show_count
from prefect_torch.tasks.gang.engines.cluster import Cluster, MachineRequest
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError, RankFailedError, RankFailureKind
from prefect_torch.tasks.rank.resources.open_files import allow_open_files
from prefect_torch.tasks.run_logs import get_run_logger

from .avoided import AvoidedMachines
from .gathering import gather
from .machine import RemoteMachine
from .partition import watch_each_other
from .regrowth import Regrowth

_AGAIN_S = 5.0  # between two requests to a cluster
_POLL_S = 0.05
_MOST_FAULTS = 2
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

    def faulty(self, failure: RankFailedError, kind: RankFailureKind = "infrastructure") -> set[str]:
        """Return the names of the machines whose ranks failed by themselves; none if the failure is of another kind."""
        ranks = [it.rank for it in (failure, *failure.others) if it.kind == kind]
        if failure.kind != kind or None in ranks:
            return set()
        ends = list(accumulate(self.num_ranks))  # neighbouring ranks share a machine
        return {self.names[bisect_right(ends, rank)] for rank in ranks if rank is not None}


class Machines:
    """The machines that a cluster lends to a training, from one attempt to the next; `close` releases them.

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
        self._avoided = AvoidedMachines(cluster.machine_of)
        self._held = ExitStack()  # releases the machines of an attempt, or those that are kept after it
        self._kept: Lease | None = None  # what the next attempt gets
        self._num_faults = 0  # consecutive failures of the infrastructure on the current machines

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
            OSError: If this process may have too few files and sockets open for the ranks.

        """
        lease = self._take_kept()
        if lease is None:
            lease = self._wait_for(raise_if_requested)
            self._num_faults = 0
        try:
            yield lease
            self._avoided.record_faults(lease.machines, ())
        except RankFailedError as exc:
            if self._record_failure(lease, exc):
                self._kept = lease
            raise
        finally:
            self._avoided.record_losses(lease.machines)
            if self._kept is None:
                self.close()

    def close(self) -> None:
        """Release the machines; no effect if there are none."""
        self._kept = None
        self._held.close()

    @contextmanager
    def look_for_more(self, lease: Lease) -> Iterator[Regrowth | None]:
        """Ask the cluster, within the context, for room for the ranks that `lease` lacks; yield None if it is not asked.

        The machines that it lends are released at the end, unless `Regrowth.is_used`.
        """
        missing = self._most - sum(lease.num_ranks)
        if self._regrow_after_s is None or not missing:
            yield None
            return

        def wanted(gone: Sequence[RemoteMachine]) -> MachineRequest:
            self._avoided.record_losses(gone)
            return self._request(1, missing, self._avoided.now, in_use=frozenset(lease.names))

        regrowth = Regrowth(self._cluster, wanted, self._regrow_after_s)
        try:
            yield regrowth
            if regrowth.is_used:
                self._kept = self._with_more(lease, regrowth)
        finally:
            regrowth.stop()

    def _take_kept(self) -> Lease | None:
        """Return the machines that were kept, if all of them are still there."""
        lease, self._kept = self._kept, None
        if lease is not None and self._avoided.record_losses(lease.machines):
            self.close()
            return None
        return lease

    def _with_more(self, lease: Lease, regrowth: Regrowth) -> Lease | None:
        """Return the machines of an attempt and those that were lent meanwhile; None if they cannot be used together."""
        with regrowth.hand_over() as held:
            lost = self._avoided.record_losses(regrowth.machines)
            machines = (*lease.machines, *(machine for machine in regrowth.machines if machine.name not in lost))
            has_twice = len({machine.name for machine in machines}) < len(machines)  # two agents, which nothing tells apart
            if has_twice or self._avoided.record_losses(lease.machines):
                return None
            self._held.push(held.pop_all())
        return _lease(lease.host, machines, self._most)

    def _record_failure(self, lease: Lease, failure: RankFailedError) -> bool:
        """Record which machines were at fault, and return whether the next attempt may have those of this one."""
        is_bad = self._avoided.record_faults(lease.machines, lease.faulty(failure))
        if failure.kind == "unprepared":
            self._record_unprepared(lease, failure)
        if failure.kind in _OF_THE_FUNCTION:
            self._num_faults = 0
        elif failure.kind == "infrastructure":
            self._num_faults += 1
        else:  # no attempt follows, or the loss of a machine may not be noticed yet
            return False
        is_whole = sum(lease.num_ranks) == self._most and not self._avoided.record_losses(lease.machines)
        return is_whole and not is_bad and self._num_faults < _MOST_FAULTS

    def _record_unprepared(self, lease: Lease, failure: RankFailedError) -> None:
        """Avoid machines that lack what earlier attempts had; the failure is final if all of several do."""
        unprepared = lease.faulty(failure, "unprepared")
        if len(unprepared) == len(lease.machines) > 1:
            failure.kind = "final"
        else:
            self._avoided.record_unprepared(unprepared)

    def _request(self, fewest: int, most: int, avoid: frozenset[str], in_use: frozenset[str] = frozenset()) -> MachineRequest:
        return MachineRequest(fewest, most, self._use_gpu, avoid | in_use, in_use, self._avoided.left_s(avoid))

    def _wait_for(self, raise_if_requested: Callable[[], None]) -> Lease:
        allow_open_files(self._fewest, self._most)
        avoid = self._avoided.now
        wait_s = self._cluster.asks_for_s
        deadline_s = time.monotonic() + wait_s if self._cluster.waits_itself else None
        while True:
            wanted = self._request(self._fewest, self._most, avoid)
            try:
                with ExitStack() as tried:
                    lease = self._try(wanted, tried, raise_if_requested)
                    self._held.push(tried.pop_all())
                    return lease
            except NotEnoughMachinesError as exc:
                now_s = time.monotonic()
                if deadline_s is None:  # that there are too few is known only now: an agent may take a minute to come
                    deadline_s = now_s + wait_s
                if not avoid and now_s >= deadline_s:
                    raise
                still = self._avoided.now
                still = still if still < avoid else frozenset()  # a machine that was lost is better than none
                again = f", and may lend {', '.join(sorted(avoid - still))} again" if avoid else ""
                get_run_logger().warning("%s; the cluster is asked again%s", exc, again)
            if avoid:
                avoid = still
            else:
                _sleep(_AGAIN_S, raise_if_requested)
                avoid = self._avoided.ever  # a request for all machines may have failed because one is still gone

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
    at_least = "" if wanted.fewest == wanted.most else "at least "
    return at_least + show_count(wanted.fewest, "rank")


def _sleep(seconds: float, raise_if_requested: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        raise_if_requested()
        time.sleep(_POLL_S)
