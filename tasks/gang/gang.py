"""All ranks of one attempt, which live and end together."""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from prefect import get_run_logger
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner
from prefect_torch.ckpt.events import CommitEvent, EventReceiver, ReportEvent
from prefect_torch.ckpt.key_value import KeyValue
from prefect_torch.ckpt.peers import has_failure
from prefect_torch.ckpt.wording import show_some
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.failures import cause_first
from prefect_torch.tasks.rank.rendezvous import ENDS_SOON_KEY, STACKS_KEY, STOP_KEY, Address, Rendezvous, beat_key
from prefect_torch.tasks.rank.spec import RankSpec

from .rank_task import train_rank
from .termination import Termination
from .watch import BEAT_S, RankWatch

# For flows that start a gang. Without a bound: with fewer threads than ranks, the ranks that run would wait for those that
# cannot begin.
ONE_THREAD_PER_RANK: Any = ThreadPoolTaskRunner(max_workers=sys.maxsize)
_POLL_S = 0.05
# How long other ranks may take to tell of their own end before they are stopped: the first to be heard of is often the one
# that lost its connection to the one that failed.
_SETTLE_S = 0.5
_STOP_WARNING_S = 30.0  # supervisors kill after a few seconds, so who takes as long waits for the kernel: a disk, a driver
_LONGEST_STOP_S = 600.0


class Books(Protocol):
    """Where what rank 0 tells is entered: the journal of a training."""

    def take(self, event: ReportEvent | CommitEvent) -> None:
        """Enter one event."""
        ...

    def poll(self) -> None:
        """Do what has become due; returns at once."""
        ...


class Gang:
    """Starts one task run per rank; the first to fail stops all.

    Args:
        specs: The ranks.
        hang_timeout_s: How long no report may come; None for ever.

    """

    def __init__(self, specs: list[RankSpec], hang_timeout_s: float | None) -> None:
        self._watch = RankWatch(len(specs), hang_timeout_s)
        self._beats_due_s = 0.0
        self._receiver: EventReceiver | None = None
        # Asking a future for its state costs an API request while it runs, so they tell when they are done instead.
        self._finished: set[int] = set()
        self._stop_deadline_s: float | None = None  # from the first `stop` on
        self._futures = [train_rank.submit(spec) for spec in specs]
        for rank, future in enumerate(self._futures):
            future.add_done_callback(partial(self._take_finished, rank))

    def run(self, key_value: KeyValue, journal: Books, termination: Termination) -> Any:
        """Return rank 0's return value once every rank has returned.

        Args:
            key_value: What the ranks share.
            journal: Takes what rank 0 tells, in this thread.
            termination: Whether the flow run is ended from outside. Then the ranks are told, and have the grace to commit.

        Raises:
            RankFailedError: The failure that caused the others.
            TerminatedError: If the flow run was ended from outside; ranks that still run are not stopped yet.

        """
        self._receiver = EventReceiver(key_value)
        problem: RankFailedError | None = None
        while problem is None and not self._advance(journal) and not self._has_failed(key_value):
            if termination.is_requested:
                self._drain(key_value, journal, termination)
                termination.raise_if_requested()
            time.sleep(_POLL_S)
            problem = self._find_problem(key_value)
        if problem is not None:
            key_value.set(STACKS_KEY, b"")
            self.stop(key_value, str(problem))
        elif not self._all_finished():
            _wait_until(lambda: self._advance(journal), _SETTLE_S)
            self.stop(key_value, "another rank failed, so every rank of the attempt is stopped")
        self._advance(journal)
        outcomes = {rank: self._futures[rank].result(raise_on_failure=False) for rank in tuple(self._finished)}
        failures = [outcome for outcome in (*outcomes.values(), problem) if isinstance(outcome, BaseException)]
        if failures:
            raise cause_first(failures)[0]
        return outcomes[0]

    def stop(self, key_value: KeyValue, reason: str) -> None:
        """End every rank that still runs, and return when all have ended: the next attempt must have the machine for itself.

        Raises:
            RankFailedError: Final, if ranks are still there after ten minutes of SIGKILL; every 30 s, a warning names them.

        """
        key_value.set(STOP_KEY, reason.encode())
        if self._stop_deadline_s is None:
            self._stop_deadline_s = time.monotonic() + _LONGEST_STOP_S
        while not _wait_until(self._all_finished, min(_STOP_WARNING_S, self._stop_deadline_s - time.monotonic())):
            alive = show_some([str(rank) for rank in self._running()])
            if time.monotonic() >= self._stop_deadline_s:
                raise RankFailedError(
                    f"rank {alive} could not be ended within {_LONGEST_STOP_S:g} s, so no attempt may begin beside it: look at "
                    "its process (a dead network filesystem, a GPU driver that hangs), and restart the machine if need be",
                    None,
                    "final",
                )
            get_run_logger().warning("rank %s was killed and has not ended yet; no attempt begins before it has", alive)

    def _drain(self, key_value: KeyValue, journal: Books, termination: Termination) -> None:
        """Tell the ranks that they end soon, and return when all have, or after the grace."""
        if termination.grace_left_s > 0:
            get_run_logger().warning("ended from outside: ranks have %.0f s for a last checkpoint", termination.grace_left_s)
        key_value.set(ENDS_SOON_KEY, b"")
        _wait_until(lambda: self._advance(journal) or termination.grace_left_s == 0, math.inf)

    def _advance(self, journal: Books) -> bool:
        """Take what rank 0 told since; say whether all ranks have ended."""
        finished = self._all_finished()  # first: a rank tells before it ends
        if self._receiver is not None:
            for event in self._receiver.drain():
                self._watch.take_report()
                journal.take(event)
            journal.poll()
        return finished

    def _find_problem(self, key_value: KeyValue) -> RankFailedError | None:
        running = self._running()
        if time.monotonic() >= self._beats_due_s:
            self._beats_due_s = time.monotonic() + BEAT_S
            self._watch.take_beats({rank: key_value.add(beat_key(rank), 0) for rank in running})
        return self._watch.problem(running)

    def _has_failed(self, key_value: KeyValue) -> bool:
        if has_failure(key_value):
            return True
        for future in [self._futures[rank] for rank in tuple(self._finished)]:
            future.wait()  # returns at once, and keeps the state here
            if not future.state.is_completed():
                return True
        return False

    def _running(self) -> list[int]:
        return [rank for rank in range(len(self._futures)) if rank not in self._finished]

    def _all_finished(self) -> bool:
        return len(self._finished) == len(self._futures)

    def _take_finished(self, rank: int, _: PrefectFuture[Any]) -> None:
        self._finished.add(rank)


def meet(specs_at: Callable[[Address], list[RankSpec]], hang_timeout_s: float | None) -> tuple[Gang, KeyValue]:
    """Start ranks and return them with what they share, which lives as long as it is held.

    Args:
        specs_at: Returns the ranks that meet at an address.
        hang_timeout_s: How long no report may come; None for ever.

    """
    rendezvous = Rendezvous()
    gang = Gang(specs_at(rendezvous.address), hang_timeout_s)
    try:
        return gang, rendezvous.serve()  # imports torch, while the ranks do the same
    finally:
        rendezvous.close()  # harmless when it serves; else the ranks must not wait for it


def _wait_until(condition: Callable[[], bool], longest_s: float) -> bool:
    """Return whether `condition` has come true within `longest_s`."""
    deadline_s = time.monotonic() + longest_s
    while not (is_true := condition()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return is_true
