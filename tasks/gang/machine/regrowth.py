"""Whether a cluster has room for more ranks, asked while an attempt runs with fewer than the most."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from typing import TYPE_CHECKING

from prefect_torch.tasks.gang.engines.cluster import Cluster, MachineRequest
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from prefect_torch.tasks.run_logs import get_run_logger

from .gathering import gather

if TYPE_CHECKING:
    from .machine import RemoteMachine


class Regrowth:
    """Asks a cluster for the machines that an attempt lacks, until it lends some; these are held until `stop` or `hand_over`.

    If all of them are lost or taken away meanwhile, they are released, and the cluster is asked again.

    Only a request for machines gets a reliable answer from every engine: others may take resources that are counted as free.
    On the lent machines, agents are started but no ranks.

    Args:
        cluster: The cluster.
        wanted: Returns the ranks that are missing, and the machines that the attempt has or has lost by now; called with those
            that were lent before and are gone.
        every_s: The seconds before the first request to the cluster, and between two requests.

    Attributes:
        machines: The machines that the cluster has lent; some may be lost.
        is_used: Whether the attempt has ended for another one that uses these machines; to be set before its end.

    """

    def __init__(self, cluster: Cluster, wanted: Callable[[Sequence["RemoteMachine"]], MachineRequest], every_s: float) -> None:
        self.machines: tuple[RemoteMachine, ...] = ()
        self.is_used = False
        self._held = ExitStack()  # releases the machines
        self._cluster, self._wanted, self._every_s = cluster, wanted, every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._ask,), name="regrowth", daemon=True)
        self._thread.start()

    @property
    def room(self) -> int:
        """For how many more ranks there is room; 0 until the cluster lends machines, and once these are gone."""
        return sum(machine.slots for machine in self.machines if not (machine.lost or machine.is_terminated))

    def hand_over(self) -> ExitStack:
        """Stop asking, and return the context whose end releases the machines that were lent."""
        self._stopped.set()
        self._thread.join()
        return self._held.pop_all()

    def stop(self) -> None:
        """Stop asking, and return when the machines that were lent, and not handed over, are released."""
        self.hand_over().close()

    def _ask(self) -> None:
        while not self._stopped.wait(self._every_s):
            if self.room:
                continue
            try:
                self._hold_more()
            except (NotEnoughMachinesError, _StoppedError):
                continue
            except Exception as exc:  # noqa: BLE001 - the training goes on without more machines
                get_run_logger().warning("the cluster could not be asked for more machines: %s", exc)

    def _hold_more(self) -> None:
        """Hold the machines that the cluster lends, if any, in place of those that are gone."""
        gone, self.machines = self.machines, ()
        self._held.close()
        with ExitStack() as lent:
            machines = lent.enter_context(gather(self._cluster, self._wanted(gone), prepares=True)).wait(self._raise_if_stopped)
            if machines:
                self._held.push(lent.pop_all())
                self.machines = machines

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError


class _StoppedError(Exception):
    """The attempt is over."""
