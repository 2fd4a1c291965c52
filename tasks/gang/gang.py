"""The ranks of one attempt, which start and stop together."""

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from prefect.context import TagsContext
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner
from prefect_torch.ckpt.reporting.events import EventReceiver, ReportEvent, Sent
from prefect_torch.ckpt.reporting.exchange.exits import has_failure
from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue
from prefect_torch.ckpt.text import show_some
from prefect_torch.tasks.gang.machine.machine import RemoteMachine
from prefect_torch.tasks.gang.machine.partition import Partition
from prefect_torch.tasks.gang.machine.regrowth import Regrowth
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.failures import cause_of
from prefect_torch.tasks.rank.rendezvous import CUT_SHORT_KEY, TERMINATION_KEY, heartbeat_key
from prefect_torch.tasks.rank.spec import RankSpec
from prefect_torch.tasks.run_logs import get_run_logger

from .node_task import train_node
from .rank_groups import RankGroup, group_ranks
from .rank_logs import RankLogs
from .rank_task import train_rank
from .returned import released
from .stop_order import StopOrder
from .termination import Termination
from .watch import RANK_HEARTBEAT_S, RankWatch

if TYPE_CHECKING:
    from uuid import UUID

# For flows that start a gang. Unbounded: with fewer threads than ranks, the running ranks would wait for those that cannot
# start.
ONE_THREAD_PER_RANK: Any = ThreadPoolTaskRunner(max_workers=sys.maxsize)
_POLL_S = 0.05
# How long other ranks may take to announce their own exit before they are stopped: the first known exit is often that of a rank
# that lost its connection to the failed one. The exit of a killed rank ends this wait.
_SETTLE_S = 0.4
_STOP_WARNING_S = 30.0  # supervisors kill after seconds; a process that takes longer waits for the kernel: a disk, a driver
_LONGEST_STOP_S = 600.0


class Recorder(Protocol):
    """Records the reports and commits of a training."""

    def record(self, event: Sent) -> None:
        """Record a report, a commit or a request of rank 0; returns immediately."""
        ...

    def poll(self) -> None:
        """Start the writes that are due; returns immediately."""
        ...


class Gang:
    """One task run per rank, or, for many ranks, per machine; the first rank to fail stops all.

    Args:
        specs: The ranks.
        hang_timeout_s: The longest time without a report; None for unlimited.
        machines: The machines of the ranks; empty for this one.
        regrowth: Looks for room for more ranks; as long as there is some, the next checkpoint is the last. None if the attempt
            does not grow.
        logs: Where the ranks' lines go; None for all to Prefect.

    Attributes:
        task_runs: The task run of each rank that is started.
        is_cut_short: Whether the ranks have returned before their work was done, to continue with more ranks.

    """

    def __init__(
        self,
        specs: list[RankSpec],
        hang_timeout_s: float | None,
        machines: Sequence[RemoteMachine] = (),
        regrowth: Regrowth | None = None,
        logs: RankLogs | None = None,
    ) -> None:
        self.task_runs: dict[int, UUID] = {}
        self.is_cut_short = False
        self._machines = machines
        self._partition = Partition(machines)
        self._regrowth = regrowth
        self._is_regrowing = False
        self._logs = logs
        self._stop = StopOrder()
        self._groups = group_ranks(specs)
        self._futures: list[PrefectFuture[Any]] = []
        self._watch = RankWatch([group.ranks[0] for group in self._groups], hang_timeout_s)
        self._heartbeats_due_s = 0.0
        self._receiver: EventReceiver | None = None
        # Asking a running future for its state costs an API request, so a callback collects those that are done.
        self._finished: set[int] = set()
        self._has_news = threading.Event()  # set when another future is done
        self._stop_deadline_s: float | None = None  # from the first `stop` on

    def start(self) -> None:
        """Start the ranks; after an error, those that were started wait for the others, so `stop` them."""
        for number, group in enumerate(self._groups):
            future = _submit(group, self._machines, self._logs, self._stop)
            self._futures.append(future)
            self.task_runs.update(dict.fromkeys(group.ranks, future.task_run_id))
            # Not a method: the gang and its futures would form a cycle, and the store would serve until that is collected.
            future.add_done_callback(partial(_record_finished, number, self._finished, self._has_news))

    def run(self, key_value: KeyValue, recorder: Recorder | None, termination: Termination) -> Any:
        """Return rank 0's return value once every rank has returned.

        Args:
            key_value: The store that the ranks share.
            recorder: Records the reports and commits, in this thread; None for ranks that must not report.
            termination: Whether the flow run is being terminated. If so, the ranks are asked to checkpoint within the grace.

        Raises:
            RankFailedError: The failure that caused the others.
            TerminatedError: If the flow run was terminated; ranks that still run are not stopped yet.

        """
        self._receiver = EventReceiver(key_value)
        problem: RankFailedError | None = None
        left: RankFailedError | None = None
        while problem is None and left is None and not self._advance(recorder) and not self._has_failed(key_value):
            if termination.is_requested:
                self._drain(key_value, recorder, termination)
                termination.raise_if_requested()
            if terminated := [machine.name for machine in self._machines if machine.is_terminated]:
                left = self._leave(terminated, key_value, recorder, termination)
            self._regrow(key_value)
            self._has_news.wait(_POLL_S)
            self._has_news.clear()
            problem = self._find_problem(key_value) if left is None else None
        self._end(problem, left, recorder)
        return self._result(problem, left, key_value)

    def _end(self, problem: RankFailedError | None, left: RankFailedError | None, recorder: Recorder | None) -> None:
        """Stop the ranks that still run, and return when all have exited."""
        if left is not None:
            self.stop(str(left))
        elif problem is not None:
            self._stop.give(str(problem), wants_stack_traces=True)
            self.stop(str(problem))
        elif not self._all_finished():
            _wait_until(lambda: self._advance(recorder) or self._has_killed_rank(), _SETTLE_S)
            self.stop("another rank failed, so every rank of the attempt is stopped")
        self._advance(recorder)

    def _result(self, problem: RankFailedError | None, left: RankFailedError | None, key_value: KeyValue) -> Any:
        """Return what rank 0 has returned, or raise the failure that caused the others.

        Args:
            problem: Why the ranks were stopped, or None.
            left: Why the ranks had to leave their machines, or None; their work may have been done by then.
            key_value: The store that the ranks share.

        """
        outcomes = self._outcomes()
        problem = None if self._has_completed() else problem  # such as a hang while only the last threads of ranks ran
        failures = [outcome for outcome in (*outcomes.values(), problem) if isinstance(outcome, BaseException)]
        if left is not None and (key_value.check(CUT_SHORT_KEY) or not self._has_completed()):
            if failures:  # the machine's end may be its cause; otherwise it occurs again
                get_run_logger().warning("a rank failed meanwhile: %s", cause_of(failures))
            raise left
        if failures:
            raise cause_of(failures)
        if stopped := [str(self._groups[number]) for number in outcomes if not self._futures[number].state.is_completed()]:
            raise RankFailedError(f"rank {show_some(stopped)} was stopped, and no rank has said why", None, "infrastructure")
        self.is_cut_short = self._regrowth is not None and key_value.check(CUT_SHORT_KEY)
        return released(outcomes[0])

    def stop(self, reason: str) -> None:
        """Stop every rank that still runs, and return when all have exited: the next attempt needs the machine for itself.

        Raises:
            RankFailedError: Of the kind "final", if ranks have not exited after ten minutes; every 30 s, a warning names them.

        """
        self._stop.give(reason)
        if self._stop_deadline_s is None:
            self._stop_deadline_s = time.monotonic() + _LONGEST_STOP_S
        while not _wait_until(self._all_finished, min(_STOP_WARNING_S, self._stop_deadline_s - time.monotonic())):
            alive = show_some([str(group) for group in self._running()])
            if time.monotonic() >= self._stop_deadline_s:
                raise RankFailedError(
                    f"rank {alive} could not be stopped within {_LONGEST_STOP_S:g} s, so no attempt may start beside it: look "
                    "at its process (a dead network filesystem, a GPU driver that hangs), and restart the machine if need be",
                    None,
                    "final",
                )
            get_run_logger().warning("rank %s was killed and has not exited yet; no attempt starts before it has", alive)

    def _drain(self, key_value: KeyValue, recorder: Recorder | None, termination: Termination) -> None:
        """Notify the ranks that termination is requested, and return when all have exited, or after the grace.

        The ranks exit after their next checkpoint.
        """
        key_value.set(TERMINATION_KEY, b"")
        if termination.grace_left_s > 0:
            get_run_logger().warning(
                "termination requested: the ranks end with their next checkpoint, or after %.0f s%s",
                termination.grace_left_s,
                "; press Ctrl-C again to end immediately" if termination.is_by_keyboard else "",
            )
        _wait_until(lambda: self._advance(recorder) or termination.grace_left_s == 0, math.inf)

    def _leave(
        self, machines: list[str], key_value: KeyValue, recorder: Recorder | None, termination: Termination
    ) -> RankFailedError:
        """Give the ranks the grace for a last checkpoint, and return why they stop: `machines` are going to be taken away."""
        message = f"machine {show_some(machines)} is being terminated (SIGTERM at its agent)"
        get_run_logger().warning("%s: ranks have %.0f s for a last checkpoint", message, termination.grace_left_s)
        key_value.set(TERMINATION_KEY, b"")
        _wait_until(lambda: self._advance(recorder) or termination.is_requested, termination.grace_left_s)
        if termination.is_requested:  # as at Slurm's time limit, which ends agents and flow at the same time
            self._drain(key_value, recorder, termination)
        termination.raise_if_requested()
        return RankFailedError(message, None, "preemption")

    def _regrow(self, key_value: KeyValue) -> None:
        """Have the attempt end with its next checkpoint as long as there is room for more ranks."""
        room = 0 if self._regrowth is None else self._regrowth.room
        if room and not self._is_regrowing:
            get_run_logger().info("the cluster has room for %d more: they begin with the next checkpoint", room)
            key_value.set(TERMINATION_KEY, b"")
        elif self._is_regrowing and not room:
            get_run_logger().info("the machines for more ranks are gone again: unless the ranks end already, they go on")
            key_value.delete(TERMINATION_KEY)
        self._is_regrowing = room > 0

    def _advance(self, recorder: Recorder | None) -> bool:
        """Record the new events of rank 0, and return whether all ranks have exited."""
        finished = self._all_finished()  # first: a rank sends its events before it exits
        if self._receiver is not None:
            for event in self._receiver.drain():
                assert recorder is not None, f"ranks that must not report sent {event}"
                if not (isinstance(event, ReportEvent) and event.record.is_logged):  # a monitor's thread logs in a hanging rank
                    self._watch.record_report()
                recorder.record(event)
        if recorder is not None:
            recorder.poll()
        return finished

    def _find_problem(self, key_value: KeyValue) -> RankFailedError | None:
        running = [group.ranks[0] for group in self._running()]
        if time.monotonic() >= self._heartbeats_due_s:
            self._heartbeats_due_s = time.monotonic() + RANK_HEARTBEAT_S
            self._watch.record_heartbeats({rank: key_value.add(heartbeat_key(rank), 0) for rank in running})
        return self._watch.problem(running) or self._partition.problem()

    def _has_failed(self, key_value: KeyValue) -> bool:
        if has_failure(key_value):
            return True
        for future in [self._futures[number] for number in tuple(self._finished)]:
            future.wait()  # returns immediately, and caches the state
            if not future.state.is_completed():
                return True
        return False

    def _has_killed_rank(self) -> bool:
        return any(isinstance(it, RankFailedError) and it.was_killed for it in self._outcomes().values())

    def _outcomes(self) -> dict[int, Any]:
        """Return the result or the exception of each finished task run, by its number."""
        return {number: self._futures[number].result(raise_on_failure=False) for number in tuple(self._finished)}

    def _running(self) -> list[RankGroup]:
        started = self._groups[: len(self._futures)]
        return [group for number, group in enumerate(started) if number not in self._finished]

    def _has_completed(self) -> bool:
        return self._all_finished() and all(future.state.is_completed() for future in self._futures)

    def _all_finished(self) -> bool:
        return len(self._finished) == len(self._futures)


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


def _wait_until(condition: Callable[[], bool], longest_s: float) -> bool:
    """Return whether `condition` has come true within `longest_s`."""
    deadline_s = time.monotonic() + longest_s
    while not (is_true := condition()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return is_true
