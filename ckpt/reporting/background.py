"""Background commits: in order, a bounded number in flight, each failure raised once."""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

from prefect_torch.ckpt.errors import CheckpointError

from .remote_error import RemoteError

_NICER = 5  # a third of the training's share of a core that both want, and all of an idle one


@dataclass(frozen=True, slots=True)
class _Commit:
    step: int
    done: Future[None]


class BackgroundCommits:
    """One rank's commits in a thread of their own.

    Every rank submits the same commits, and each commit ends in the same way on all; so all forget and raise the same ones.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._commits: deque[_Commit] = deque()  # oldest first; failed ones stay until their error is taken

    @property
    def newest_step(self) -> int:
        """The step of the newest commit that may still be under way; -1 if there is none."""
        return self._commits[-1].step if self._commits else -1

    def submit(self, step: int, commit: Callable[[], None]) -> None:
        """Begin `commit` once the earlier ones have ended."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "prefect-torch-commit", _yield_to_training)
        while self._commits and self._commits[0].done.done() and self._commits[0].done.exception() is None:
            self._commits.popleft()
        self._commits.append(_Commit(step, self._thread.submit(commit)))

    def wait(self, *, leave: int = 0, timeout_s: float | None = None) -> None:
        """Wait until at most `leave` commits are under way, or for `timeout_s`."""
        under_way = [commit.done for commit in self._commits]
        wait(under_way[: max(0, len(under_way) - leave)], timeout_s)

    def take_failure(self) -> CheckpointError | None:
        """Return the error of the oldest failed commit, once; only commits that have ended are considered."""
        while self._commits and self._commits[0].done.done():
            failure = self._commits.popleft().done.exception()
            if failure is not None:
                return RemoteError.of(failure).error()
        return None

    def wait_for_failure(self) -> None:
        """Forget the oldest commit that fails, which another rank has already reported, and those before it."""
        while self._commits:
            if self._commits.popleft().done.exception() is not None:
                return


def _yield_to_training() -> None:
    """Give the training priority over this thread, and the threads that it starts, on a core that both want."""
    if sys.platform == "linux":  # the system on which a thread has a priority of its own
        with suppress(OSError):  # without permission they share the core evenly
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICER)
