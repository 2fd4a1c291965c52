"""Machines of an attempt that do not reach each other while the leader reaches all of them."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from prefect_torch.tasks.rank.errors import RankFailedError

from .machine import RemoteMachine

_NUM_NEIGHBOURS = 8  # with as many after each machine, every two of up to 17 machines watch each other
_SETTLE_S = 10.0  # until all machines have reported which ones they lost, or reach them again
_JOINING_S = 60.0  # much longer than many ranks take to connect to each other
_ASLEEP_S = 5.0  # a longer time between two looks means that this process was stopped itself


def watch_each_other(machines: Sequence[RemoteMachine]) -> None:
    """Have each machine watch those that follow it, to which a ring of collectives is connected, and some farther away.

    The farther ones are 16, 32, 64, … places away: racks that lose each other are noticed whatever is between them.
    """
    for number, machine in enumerate(machines):
        following = [*machines[number + 1 :], *machines[:number]]
        near, far = following[:_NUM_NEIGHBOURS], range(_NUM_NEIGHBOURS + 1, len(machines) // 2 + 1)
        machine.watch([*near, *(following[place - 1] for place in far if place.bit_count() == 1)])


def parted_from_others(machines: Sequence[RemoteMachine]) -> set[str]:
    """Return few machines, chosen greedily, without which the others reach each other; of two, the later one."""
    pairs = _pairs({machine.name: machine.unreached for machine in machines})
    order = {machine.name: number for number, machine in enumerate(machines)}
    found: set[str] = set()
    while pairs:
        counts = Counter(name for pair in pairs for name in pair)
        worst = max(counts, key=lambda name: (counts[name], order[name]))
        found.add(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return found


class Partition:
    """Detects that machines do not reach each other, for which their ranks would wait until torch's own timeout.

    That is so when they have lost each other for good, or if they never did while ranks try to connect to each other.

    Args:
        machines: The machines of the attempt.
        are_joining: Returns whether all ranks are there, and some have yet to connect to each other.
        clock: Returns seconds of a monotonic clock.

    """

    def __init__(
        self,
        machines: Sequence[RemoteMachine],
        are_joining: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machines = machines
        self._are_joining = are_joining
        self._clock = clock
        self._looked_s = self._whole_s = self._joined_s = clock()

    def problem(self) -> RankFailedError | None:
        """Return the error of machines that do not reach each other; None if all is well. To be called repeatedly."""
        now_s = self._clock()
        if now_s - self._looked_s > _ASLEEP_S:
            self._whole_s = self._joined_s = now_s
        self._looked_s = now_s
        return self._lost(now_s) or self._never_reached(now_s)

    def _lost(self, now_s: float) -> RankFailedError | None:
        if not (pairs := _pairs({machine.name: machine.unreached for machine in self._machines})):
            self._whole_s = now_s
        if now_s - self._whole_s <= _SETTLE_S:
            return None
        return _error(
            "no longer", pairs, "Their ranks would wait for each other in a collective: look at the network between them"
        )

    def _never_reached(self, now_s: float) -> RankFailedError | None:
        pairs = _pairs({machine.name: machine.unmet for machine in self._machines})
        if not (pairs and self._are_joining()):  # or the ranks have found another network
            self._joined_s = now_s
        if now_s - self._joined_s <= _JOINING_S:
            return None
        for machine in self._machines:
            machine.unreached |= machine.unmet  # the next attempt avoids as few of them as after a loss
        return _error("do not", pairs, "They connect to each other on any port, which a firewall must let pass")


def _error(how: str, pairs: Collection[tuple[str, str]], why: str) -> RankFailedError:
    shown = "; ".join(" and ".join(pair) for pair in sorted(pairs))
    return RankFailedError(
        f"machines {how} reach each other, while all of them reach the flow's: {shown}. {why}", None, "infrastructure"
    )


def _pairs(missed: Mapping[str, Collection[str]]) -> set[tuple[str, str]]:
    found = {(name, other) for name, others in missed.items() for other in others if other in missed}
    return {(min(pair), max(pair)) for pair in found}
