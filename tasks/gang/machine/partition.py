"""Machines of an attempt that have lost each other while the leader reaches all of them."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from prefect_torch.tasks.rank.errors import RankFailedError

from .machine import RemoteMachine

_NUM_NEIGHBOURS = 8  # with as many after each machine, every two of up to 17 machines watch each other
_SETTLE_S = 10.0  # until all machines have reported which ones they lost, or reach them again
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
    pairs = _pairs(machines)
    order = {machine.name: number for number, machine in enumerate(machines)}
    found: set[str] = set()
    while pairs:
        counts = Counter(name for pair in pairs for name in pair)
        worst = max(counts, key=lambda name: (counts[name], order[name]))
        found.add(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return found


class Partition:
    """Detects that machines have lost each other for good: their ranks would wait in a collective until it times out.

    Args:
        machines: The machines of the attempt.
        clock: Returns seconds of a monotonic clock.

    """

    def __init__(self, machines: Sequence[RemoteMachine], clock: Callable[[], float] = time.monotonic) -> None:
        self._machines = machines
        self._clock = clock
        self._looked_s = self._whole_s = clock()

    def problem(self) -> RankFailedError | None:
        """Return the error of machines that no longer reach each other; None if all is well. To be called repeatedly."""
        now_s = self._clock()
        was_asleep = now_s - self._looked_s > _ASLEEP_S
        self._looked_s = now_s
        pairs = _pairs(self._machines)
        if not pairs or was_asleep:
            self._whole_s = now_s
        if now_s - self._whole_s <= _SETTLE_S:
            return None
        lost = "; ".join(" and ".join(pair) for pair in sorted(pairs))
        return RankFailedError(
            f"machines no longer reach each other, while all of them reach the flow's: {lost}. Their ranks would wait for each "
            "other in a collective: look at the network between them",
            None,
            "infrastructure",
        )


def _pairs(machines: Sequence[RemoteMachine]) -> set[tuple[str, str]]:
    names = {machine.name for machine in machines}
    found = {(machine.name, other) for machine in machines for other in machine.unreached if other in names}
    return {(min(pair), max(pair)) for pair in found}
