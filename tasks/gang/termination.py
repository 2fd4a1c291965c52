"""A flow run that is ended from outside: noted wherever the exception lands, obeyed only where that does no harm."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Generic, TypeVar

from prefect.exceptions import TerminationSignal
from prefect_torch.ckpt.retry import retries_ended_by

if TYPE_CHECKING:
    from prefect_torch.ckpt.attempts import Outcome

# What ends a flow run from outside is one of these: SIGTERM, which is also how a worker cancels; Ctrl-C; and what Prefect
# throws into a flow whose concurrency lease is lost, a subclass of asyncio's error in a private module.
TERMINATIONS = (TerminationSignal, KeyboardInterrupt, asyncio.CancelledError)
_POLL_S = 0.05
# After the grace: stopping ranks, a try of each write that is left, a question to Prefect.
_LAST_S = 45.0

T = TypeVar("T")


class TerminatedError(Exception):
    """What is led stops here, since its flow run was ended from outside."""


class Termination:
    """Whether a flow run is being ended, told by the thread that is interrupted to the one that leads its ranks.

    The exception comes between any two instructions of the flow's thread, in a lock, a client or a `finally` as well. So that
    thread only waits, and a thread that nobody interrupts leads; it looks here where it can stop.

    Args:
        grace_s: How long ranks may still commit.

    Attributes:
        cause: The first exception that ended the flow run, or None.
        outcome: How the attempt that was ended came to its end; None while it has not.

    """

    def __init__(self, grace_s: float) -> None:
        self.cause: BaseException | None = None
        self.outcome: Outcome | None = None
        self._grace_s = grace_s
        self._grace_ends_s = math.inf
        self._is_left = False
        self._no_more_retries = threading.Event()

    @property
    def is_requested(self) -> bool:
        """Whether what is led should come to its end."""
        return self.cause is not None or self._is_left

    @property
    def grace_left_s(self) -> float:
        """How long ranks may still commit, once that is requested."""
        return self._grace_s if self._grace_ends_s == math.inf else max(0.0, self._grace_ends_s - time.monotonic())

    def raise_if_requested(self) -> None:
        """Raise TerminatedError if the flow run is being ended."""
        if self.is_requested:
            raise TerminatedError(f"ended from outside ({type(self.cause).__name__})")

    def end_retries(self) -> None:
        """Let each storage operation within `limit_retries` fail for good when it fails next."""
        self._no_more_retries.set()

    @contextmanager
    def limit_retries(self) -> Iterator[None]:
        """Retry storage operations of the body as ever, but not past the end of the grace."""
        with retries_ended_by(self._no_more_retries):
            yield

    def outlast(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, which runs in a thread of its own in this context, however this one is interrupted.

        A second Ctrl-C ends the grace. Work that has not ended a while after the grace is left behind.

        Raises:
            BaseException: What ended the flow run from outside, once the work has ended; else what the work raised.

        """
        led = _Led(work)
        self._is_left = False
        try:
            self._wait_for(led)
        finally:
            self._is_left = True  # whatever came in between, nothing is led on without this thread
        if self.cause is not None:
            raise self.cause
        return led.result()

    def _wait_for(self, led: "_Led[T]") -> None:
        try:
            led.start()
            # No lock is held here: an exception may come while it is taken, and leave it taken.
            while not led.has_ended and time.monotonic() < self._grace_ends_s + _LAST_S:
                time.sleep(_POLL_S)
                if time.monotonic() >= self._grace_ends_s:
                    self.end_retries()
        except TERMINATIONS as exc:
            self._request(exc)
            self._wait_for(led)

    def _request(self, cause: BaseException) -> None:
        if self.cause is None:
            self._grace_ends_s = time.monotonic() + self._grace_s
            self.cause = cause
        elif isinstance(cause, KeyboardInterrupt):
            self._grace_ends_s = time.monotonic()


class _Led(Generic[T]):
    """A piece of work, and how it ended."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.has_ended = False
        self._work = work
        self._begins = threading.Lock()
        self._value: T
        self._error: BaseException | None = None

    def start(self) -> None:
        """Let a thread do the work, once: an exception that came in between does not tell whether one was started."""
        if not self._begins.locked():
            threading.Thread(target=copy_context().run, args=(self._run,), name="leader", daemon=True).start()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        if not self._begins.acquire(blocking=False):
            return
        try:
            self._value = self._work()
        except BaseException as exc:  # noqa: BLE001 - raised again by `result`
            self._error = exc
        self.has_ended = True
