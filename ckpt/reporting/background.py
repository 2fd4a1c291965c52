"""Background commits: in order, a bounded number in flight, each failure raised once."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from prefect_torch.ckpt.errors import CheckpointError
from prefect_torch.ckpt.reporting.exchange.remote_error import RemoteError
from prefect_torch.ckpt.storage.parallel import lower_thread_priority

_NICER = 5  # a third of the training's share of a core that both want, and all of an idle one


@dataclass(frozen=True, slots=True)
class BackgroundCommit:
    """A commit that was begun.

    Attributes:
        step: The step of its report.
        done: Its future, which is done when it has ended.

    """

    step: int
    done: Future[None]


class BackgroundCommits:
    """One rank's commits in a thread of their own.

    Every rank submits the same commits, and each commit ends in the same way on all; so all forget and raise the same ones.

    Args:
        max_in_flight: How many may be under way.

    Attributes:
        commits: Those that may still be under way, oldest first; failed ones stay until their error is taken.

    """

    def __init__(self, max_in_flight: int = 1) -> None:
        self._max_in_flight = max_in_flight
        self._thread: ThreadPoolExecutor | None = None
        self.commits: deque[BackgroundCommit] = deque()

    def submit(self, step: int, commit: Callable[[], None]) -> None:
        """Begin `commit` once the earlier ones have ended."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "prefect-torch-commit", partial(lower_thread_priority, _NICER))
        while self.commits and self.commits[0].done.done() and self.commits[0].done.exception() is None:
            self.commits.popleft()
        self.commits.append(BackgroundCommit(step, self._thread.submit(commit)))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until none is under way, or for `timeout_s`."""
        wait([commit.done for commit in self.commits], timeout_s)

    def wait_for_slot(self, *, for_another: bool) -> None:
        """Wait until one more may run beside those under way, or, if not `for_another`, until none is under way."""
        under_way = [commit.done for commit in self.commits]
        leave = self._max_in_flight - 1 if for_another else 0
        wait(under_way[: max(0, len(under_way) - leave)])

    def wait_and_raise(self) -> None:
        """Wait until none is under way, and raise the error of the oldest failed one that nobody has raised.

        Raises:
            CheckpointError: That error; a later call raises the next one.

        """
        self.wait()
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def take_failure(self) -> CheckpointError | None:
        """Return the error of the oldest failed commit, once; only commits that have ended are considered."""
        while self.commits and self.commits[0].done.done():
            failure = self.commits.popleft().done.exception()
            if failure is not None:
                return RemoteError.of(failure).exception()
        return None

    def forget_failure(self) -> None:
        """Forget the oldest commit that fails, which another rank has already reported, and those before it."""
        while self.commits:
            if self.commits.popleft().done.exception() is not None:
                return
