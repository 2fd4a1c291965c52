"""Whether a cluster has room for more ranks, asked while an attempt runs with fewer than the most."""

import threading
from collections.abc import Callable
from contextvars import copy_context

from prefect_torch.tasks.gang.engines.cluster import Cluster, MachineRequest
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from prefect_torch.tasks.run_logs import get_run_logger

from .gathering import gather


class Regrowth:
    """Asks a cluster for the machines that an attempt lacks, until it lends some; these are held until `stop`.

    Only a request for machines gets a reliable answer from every engine: others may take resources that are counted as free.
    On the lent machines, agents are started but no ranks.

    Args:
        cluster: The cluster.
        wanted: Returns the ranks that are missing, and the machines that the attempt has or has lost by now.
        every_s: The seconds before the first request to the cluster, and between two requests.

    Attributes:
        room: For how many more ranks there is room; 0 until the cluster lends machines.

    """

    def __init__(self, cluster: Cluster, wanted: Callable[[], MachineRequest], every_s: float) -> None:
        self.room = 0
        self._cluster, self._wanted, self._every_s = cluster, wanted, every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._ask,), name="regrowth", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop asking, and return when the machines that were lent are released."""
        self._stopped.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                if self._hold_more():
                    return
            except (NotEnoughMachinesError, _StoppedError):
                continue
            except Exception as exc:  # noqa: BLE001 - the training goes on without more machines
                get_run_logger().warning("the cluster could not be asked for more machines: %s", exc)

    def _hold_more(self) -> bool:
        """Return False if the cluster has no more machines; otherwise hold them, and return True after `stop`."""
        with gather(self._cluster, self._wanted()) as gathering:
            room = sum(machine.slots for machine in gathering.wait(self._raise_if_stopped))
            self.room = room
            return room > 0 and self._stopped.wait()

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError


class _StoppedError(Exception):
    """The attempt is over."""
