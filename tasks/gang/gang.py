"""The ranks of one attempt, which start and stop together."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect.context import TagsContext
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner
from prefect_torch.ckpt.text import show_some
from prefect_torch.tasks.gang.machine.machine import RemoteMachine
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.spec import RankSpec
from prefect_torch.tasks.run_logs import get_run_logger

from .node_task import train_node
from .rank_groups import RankGroup, group_ranks
from .rank_logs import RankLogs
from .rank_task import train_rank
from .stop_order import StopOrder
from .watch import RankWatch

if TYPE_CHECKING:
    from uuid import UUID

# For flows that start a gang. Unbounded: with fewer threads than ranks, the running ranks would wait for those that cannot
# start.
ONE_THREAD_PER_RANK: Any = ThreadPoolTaskRunner(max_workers=sys.maxsize)
POLL_S = 0.05
_STOP_WARNING_S = 30.0  # supervisors kill after seconds; a process that takes longer waits for the kernel: a disk, a driver
_MOST_STOP_WAITS = 20  # not a deadline: a process that was stopped itself has to look at its ranks after that
_MOST_STOP_WAITS_ELSEWHERE = 2  # on other machines; this process may have been stopped itself during one of them


class Gang:
    """One task run per rank, or, for many ranks, per machine; `GangRun` leads them from their start to their end.

    Args:
        specs: The ranks.
        hang_timeout_s: The longest time without a report; None for unlimited.
        machines: The machines of the ranks; empty for this one.
        logs: Where the ranks' lines go; None for all to Prefect.

    Attributes:
        task_runs: The task run of each rank that is started.
        machines: The machines of the ranks; empty for this one.
        watch: Detects lost and hanging ranks.
        num_ranks: The number of ranks.
        stop_order: The order to stop the ranks, which `stop` gives and waits for.

    """

    def __init__(
        self,
        specs: list[RankSpec],
        hang_timeout_s: float | None,
        machines: Sequence[RemoteMachine] = (),
        logs: RankLogs | None = None,
    ) -> None:
        self.task_runs: dict[int, UUID] = {}
        self.machines = machines
        self.num_ranks = len(specs)
        self.stop_order = StopOrder()
        self._logs = logs
        self._groups = group_ranks(specs)
        self.watch = RankWatch([group.ranks[0] for group in self._groups], hang_timeout_s)
        self._futures: list[PrefectFuture[Any]] = []
        # Asking a running future for its state costs an API request, so a callback collects those that are done.
        self._finished: set[int] = set()
        self._has_news = threading.Event()  # set when another future is done
        self._num_stop_waits = 0

    def start(self) -> None:
        """Start the ranks; after an error, those that were started wait for the others, so `stop` them."""
        for number, group in enumerate(self._groups):
            future = _submit(group, self.machines, self._logs, self.stop_order)
            self._futures.append(future)
            self.task_runs.update(dict.fromkeys(group.ranks, future.task_run_id))
            # Not a method: the gang and its futures would form a cycle, and the store would serve until that is collected.
            future.add_done_callback(partial(_record_finished, number, self._finished, self._has_news))

    def stop(self, reason: str) -> None:
        """Stop every rank that still runs, and return when all have exited: the next attempt needs the machine for itself.

        Other machines whose ranks have not exited after a minute are given up, and their ranks with them.

        Raises:
            RankFailedError: Of the kind "final", if ranks have not exited after ten minutes; every 30 s, a warning names them.
                The time in which this process was stopped itself, perhaps with its ranks, counts as half a minute at most.

        """
        self.stop_order.give(reason)
        while not wait_until(self.has_exited, _STOP_WARNING_S if self._num_stop_waits < _MOST_STOP_WAITS else 0.0):
            self._num_stop_waits += 1
            alive = show_some([str(group) for group in self.running()])
            if self._num_stop_waits >= _MOST_STOP_WAITS:
                raise RankFailedError(
                    f"rank {alive} could not be stopped within {_MOST_STOP_WAITS * _STOP_WARNING_S:g} s, so no attempt may "
                    "start beside it: look at its process (a dead network filesystem, a GPU driver that hangs), and restart "
                    "the machine if need be",
                    None,
                    "final",
                )
            get_run_logger().warning("rank %s was killed and has not exited yet; no attempt starts before it has", alive)
            if self.machines and self._num_stop_waits == _MOST_STOP_WAITS_ELSEWHERE:
                self._give_machines_up()

    def _give_machines_up(self) -> None:
        """Lose the machines of the ranks that still run; as after any loss of a machine, fencing refuses what these commit."""
        for node in {group.node for group in self.running()}:
            get_run_logger().warning(
                "machine %s is given up, since its ranks have not exited: look at its processes (a dead network filesystem, a "
                "GPU driver that hangs), and restart it if need be",
                self.machines[node].name,
            )
            self.machines[node].release("its ranks were killed and have not exited")

    def wait_for_news(self, longest_s: float) -> None:
        """Return when another task run is finished, or after `longest_s`."""
        self._has_news.wait(longest_s)
        self._has_news.clear()

    def running(self) -> list[RankGroup]:
        """Return the ranks that were started and have not exited."""
        started = self._groups[: len(self._futures)]
        return [group for number, group in enumerate(started) if number not in self._finished]

    def has_exited(self) -> bool:
        """Return whether every rank that was started has exited."""
        return len(self._finished) == len(self._futures)

    def has_completed(self) -> bool:
        """Return whether every rank has exited, and none has failed or was stopped."""
        return self.has_exited() and all(future.state.is_completed() for future in self._futures)

    def has_failed(self) -> bool:
        """Return whether a rank has exited that has failed or was stopped."""
        for future in [self._futures[number] for number in tuple(self._finished)]:
            future.wait()  # returns immediately, and caches the state
            if not future.state.is_completed():
                return True
        return False

    def outcomes(self) -> dict[int, Any]:
        """Return the result or the exception of each finished task run, by its number."""
        return {number: self._futures[number].result(raise_on_failure=False) for number in tuple(self._finished)}

    def stopped(self) -> list[str]:
        """Return the ranks that have exited, and have failed or were stopped, as text."""
        return [str(self._groups[number]) for number in tuple(self._finished) if not self._futures[number].state.is_completed()]


def _record_finished(number: int, finished: set[int], has_news: threading.Event, _: PrefectFuture[Any]) -> None:
    finished.add(number)
    has_news.set()


def _submit(group: RankGroup, machines: Sequence[RemoteMachine], logs: RankLogs | None, stop: StopOrder) -> PrefectFuture[Any]:
    machine = machines[group.node] if machines else None
    first, *more = group.specs
    # Under a tag with a concurrency limit, the attempt's task run holds the slot that its ranks would wait for.
    with TagsContext(current_tags=set()):
        if more:
            return train_node.submit(group, machine, logs, stop)
        return train_rank.submit(first, machine, None if logs is None else logs.of(first), stop)


def wait_until(condition: Callable[[], bool], longest_s: float) -> bool:
    """Return whether `condition` has come true within `longest_s`."""
    deadline_s = time.monotonic() + longest_s
    while not (is_true := condition()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return is_true
