"""The machines that a training avoids for some minutes: they were lost, lack something, or fail again and again."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from prefect_torch.ckpt.text import show_some
from prefect_torch.tasks.run_logs import get_run_logger

from .machine import RemoteMachine
from .partition import parted_from_others

_AVOID_S = 300.0
_MOST_FAULTS = 3  # of two good machines, one has the same two consecutive failures half of the time


class AvoidedMachines:
    """The machines to avoid, by the names of their agents.

    Args:
        machine_of: Returns the name of the machine on which the agent of a name runs.

    """

    def __init__(self, machine_of: Callable[[str], str]) -> None:
        self._machine_of = machine_of
        self._since_s: dict[str, float] = {}  # of all that ever were avoided
        self._faulty: str | None = None  # the machine whose ranks alone have ended the latest attempt
        self._num_faults = 0  # how many consecutive attempts they have ended

    @property
    def now(self) -> frozenset[str]:
        """The machines to avoid now."""
        now_s = time.monotonic()
        return frozenset(name for name, since_s in self._since_s.items() if now_s - since_s < _AVOID_S)

    @property
    def ever(self) -> frozenset[str]:
        """The machines to avoid, and those that were to be avoided earlier."""
        return frozenset(self._since_s)

    def left_s(self, names: Iterable[str]) -> float:
        """Return in how many seconds the first of these machines need not be avoided any longer; infinite without machines."""
        first_s = min((self._since_s[name] for name in names), default=math.inf)
        return max(0.0, first_s + _AVOID_S - time.monotonic())

    def record_losses(self, machines: Sequence[RemoteMachine]) -> set[str]:
        """Avoid those that are lost, cut off from others or terminated, and return their names.

        One whose processes used too much memory is not avoided: they would do so on any other.
        """
        lost = {machine.name for machine in machines if machine.lost or machine.is_terminated}
        lost |= parted_from_others([machine for machine in machines if machine.name not in lost])
        self._avoid(lost - {machine.name for machine in machines if machine.is_out_of_memory})
        return lost

    def record_faults(self, machines: Sequence[RemoteMachine], faulty: Collection[str]) -> bool:
        """Avoid a machine whose ranks alone have ended three attempts in a row, as by a bad GPU; return whether there is one.

        Args:
            machines: The machines of an attempt that has ended.
            faulty: The names of those whose ranks failed by themselves and ended it; none if it ended in another way.

        """
        of_all = {self._machine_of(machine.name) for machine in machines}
        of_faulty = {self._machine_of(name) for name in faulty}
        is_one = len(of_faulty) == 1 < len(of_all) and not self.record_losses(machines)
        at_fault = of_faulty.pop() if is_one else None
        self._num_faults = self._num_faults + 1 if at_fault == self._faulty else 1
        self._faulty = at_fault
        if at_fault is None or self._num_faults < _MOST_FAULTS:
            return False
        self._avoid(machine.name for machine in machines if self._machine_of(machine.name) == at_fault)
        get_run_logger().warning(
            "machine %s is avoided for %.0f minutes: only its ranks failed first in %d consecutive attempts; look at its GPUs, "
            "memory and disk",
            at_fault,
            _AVOID_S / 60,
            self._num_faults,
        )
        return True

    def record_unprepared(self, names: Collection[str]) -> None:
        """Avoid machines that lack what earlier attempts of a training had, such as its storage or a package."""
        self._avoid(names)
        get_run_logger().warning(
            "machine %s is avoided for %.0f minutes: it lacks what earlier attempts had, as the error of its rank says",
            show_some(sorted(names)),
            _AVOID_S / 60,
        )

    def _avoid(self, names: Iterable[str]) -> None:
        self._since_s.update(dict.fromkeys(names, time.monotonic()))
