"""The time from the start of a gang to its end: reports are recorded, and what goes wrong is seen and stops all ranks."""

import math
import time
from typing import Any, Protocol

from prefect_torch.ckpt.reporting.events import EventReceiver, ReportEvent, Sent
from prefect_torch.ckpt.reporting.exchange.exits import has_failure
from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue
from prefect_torch.ckpt.text import show_some
from prefect_torch.tasks.gang.machine.partition import Partition
from prefect_torch.tasks.gang.machine.regrowth import Regrowth
from prefect_torch.tasks.rank.errors import RankFailedError, show_traceback
from prefect_torch.tasks.rank.failures import cause_of
from prefect_torch.tasks.rank.rendezvous import CUT_SHORT_KEY, TERMINATION_KEY, are_joining, heartbeat_key
from prefect_torch.tasks.run_logs import get_run_logger

from .gang import POLL_S, Gang, wait_until
from .returned import released
from .termination import Termination
from .watch import RANK_HEARTBEAT_S

# How long other ranks may take to announce their own exit before they are stopped: the first known exit is often that of a rank
# that lost its connection to the failed one. The exit of a killed rank ends this wait.
_SETTLE_S = 0.4


class Recorder(Protocol):
    """Records the reports and commits of a training."""

    @property
    def is_deciding(self) -> bool:
        """Whether the ranks wait for a decision."""
        ...

    def record(self, event: Sent) -> None:
        """Record a report, a commit or a request of rank 0; returns immediately."""
        ...

    def poll(self) -> None:
        """Start the writes that are due; returns immediately."""
        ...


class GangRun:
    """The run of a gang that was started; the first rank to fail stops all.

    Args:
        gang: The gang.
        key_value: The store that the ranks share.
        recorder: Records the reports and commits, in the thread of `run`; None for ranks that must not report.
        termination: Whether the flow run is being terminated. If so, the ranks are asked to checkpoint within the grace.
        regrowth: Looks for room for more ranks; as long as there is some, the next checkpoint is the last. None if the attempt
            does not grow.

    Attributes:
        is_cut_short: Whether the ranks have returned before their work was done, to continue with more ranks.

    """

    def __init__(
        self,
        gang: Gang,
        key_value: KeyValue,
        recorder: Recorder | None,
        termination: Termination,
        regrowth: Regrowth | None = None,
    ) -> None:
        self.is_cut_short = False
        self._gang = gang
        self._key_value = key_value
        self._recorder = recorder
        self._termination = termination
        self._regrowth = regrowth
        self._is_regrowing = False
        self._receiver = EventReceiver(key_value)
        self._partition = Partition(gang.machines, self._are_joining)
        self._heartbeats_due_s = 0.0

    def run(self) -> Any:
        """Return rank 0's return value once every rank has returned.

        Raises:
            RankFailedError: The failure that caused the others, also of a rank that failed while the flow run was terminated.
            TerminatedError: If the flow run was terminated; ranks that still run are not stopped yet.

        """
        problem: RankFailedError | None = None
        left: RankFailedError | None = None
        while problem is None and left is None and not self._advance() and not self._has_failed():
            if self._termination.is_requested:
                self._drain()
            if terminated := [machine.name for machine in self._gang.machines if machine.is_terminated]:
                left = self._leave(terminated)
            self._regrow()
            self._gang.wait_for_news(POLL_S)
            problem = self._find_problem() if left is None else None
        self._end(problem, left)
        return self._result(problem, left)

    def _end(self, problem: RankFailedError | None, left: RankFailedError | None) -> None:
        """Stop the ranks that still run, and return when all have exited."""
        if left is not None:
            self._gang.stop(str(left))
        elif problem is not None:
            self._gang.stop_order.give(str(problem), wants_stack_traces=True)
            self._gang.stop(str(problem))
        elif not self._gang.has_exited():
            wait_until(lambda: self._advance() or self._has_killed_rank(), _SETTLE_S)
            self._gang.stop("another rank failed, so every rank of the attempt is stopped")
        self._advance()

    def _result(self, problem: RankFailedError | None, left: RankFailedError | None) -> Any:
        """Return what rank 0 has returned, or raise the failure that caused the others.

        Args:
            problem: Why the ranks were stopped, or None.
            left: Why the ranks had to leave their machines, or None; their work may have been done by then.

        """
        outcomes = self._gang.outcomes()
        problem = None if self._gang.has_completed() else problem  # such as a hang while only the last threads of ranks ran
        failures = [outcome for outcome in (*outcomes.values(), problem) if isinstance(outcome, BaseException)]
        if left is not None and (self._key_value.check(CUT_SHORT_KEY) or not self._gang.has_completed()):
            if failures:  # the machine's end may be its cause; otherwise it occurs again
                cause = cause_of(failures)
                shown = show_traceback(cause) if isinstance(cause, RankFailedError) else ""
                get_run_logger().warning("a rank failed meanwhile: %s", shown or cause)
            raise left
        if failures:
            raise cause_of(failures)
        if stopped := self._gang.stopped():
            raise RankFailedError(f"rank {show_some(stopped)} was stopped, and no rank has said why", None, "infrastructure")
        self.is_cut_short = self._regrowth is not None and self._key_value.check(CUT_SHORT_KEY)
        return released(outcomes[0])

    def _drain(self) -> None:
        """Notify the ranks that termination is requested, and raise when all have exited, or after the grace; see `run`.

        The ranks exit after their next checkpoint.
        """
        self._key_value.set(TERMINATION_KEY, b"")
        if self._termination.grace_left_s > 0:
            get_run_logger().warning(
                "termination requested: the ranks end with their next checkpoint, or after %.0f s%s",
                self._termination.grace_left_s,
                "; press Ctrl-C again to end immediately" if self._termination.is_by_keyboard else "",
            )
        wait_until(lambda: self._advance() or self._termination.grace_left_s == 0, math.inf)
        if failures := [outcome for outcome in self._gang.outcomes().values() if isinstance(outcome, RankFailedError)]:
            raise cause_of(failures)
        self._termination.raise_if_requested()

    def _leave(self, machines: list[str]) -> RankFailedError:
        """Give the ranks the grace for a last checkpoint, and return why they stop: `machines` are going to be taken away."""
        message = f"machine {show_some(machines)} is being terminated (SIGTERM at its agent)"
        get_run_logger().warning("%s: ranks have %.0f s for a last checkpoint", message, self._termination.grace_left_s)
        self._key_value.set(TERMINATION_KEY, b"")
        wait_until(lambda: self._advance() or self._termination.is_requested, self._termination.grace_left_s)
        if self._termination.is_requested:  # as at Slurm's time limit, which ends agents and flow at the same time
            self._drain()
        self._termination.raise_if_requested()
        return RankFailedError(message, None, "preemption")

    def _regrow(self) -> None:
        """Have the attempt end with its next checkpoint as long as there is room for more ranks."""
        room = 0 if self._regrowth is None else self._regrowth.room
        if room and not self._is_regrowing:
            get_run_logger().info("the cluster has room for %d more: they begin with the next checkpoint", room)
            self._key_value.set(TERMINATION_KEY, b"")
        elif self._is_regrowing and not room:
            get_run_logger().info("the machines for more ranks are gone again: unless the ranks end already, they go on")
            self._key_value.delete(TERMINATION_KEY)
        self._is_regrowing = room > 0

    def _advance(self) -> bool:
        """Record the new events of rank 0, and return whether all ranks have exited."""
        finished = self._gang.has_exited()  # first: a rank sends its events before it exits
        recorder = self._recorder
        for event in self._receiver.drain():
            assert recorder is not None, f"ranks that must not report sent {event}"
            if not (isinstance(event, ReportEvent) and event.record.is_logged):  # a monitor's thread logs in a hanging rank
                self._gang.watch.record_report()
            recorder.record(event)
        if recorder is not None:
            recorder.poll()
            if recorder.is_deciding:  # the ranks wait for the leader, perhaps for minutes, and do not hang
                self._gang.watch.record_report()
        return finished

    def _find_problem(self) -> RankFailedError | None:
        running = [group.ranks[0] for group in self._gang.running()]
        if time.monotonic() >= self._heartbeats_due_s:
            self._heartbeats_due_s = time.monotonic() + RANK_HEARTBEAT_S
            self._gang.watch.record_heartbeats({rank: self._key_value.add(heartbeat_key(rank), 0) for rank in running})
        return self._gang.watch.problem(running) or self._partition.problem()

    def _are_joining(self) -> bool:
        return are_joining(self._key_value, self._gang.num_ranks)

    def _has_failed(self) -> bool:
        return has_failure(self._key_value) or self._gang.has_failed()

    def _has_killed_rank(self) -> bool:
        return any(isinstance(it, RankFailedError) and it.was_killed for it in self._gang.outcomes().values())
