"""The termination of a flow run: caught wherever the exception is raised, acted on only where that does no harm."""

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Generic, TypeVar

from prefect.exceptions import TerminationSignal
from prefect_torch.ckpt.storage.retry import retries_ended_by

if TYPE_CHECKING:
    from uuid import UUID

    from prefect_torch.ckpt.runs.attempts.attempt import Outcome

# A flow run is terminated by SIGTERM, which is also how a worker cancels, by Ctrl-C, or by the error that Prefect raises in a
# flow whose concurrency lease is lost: a subclass of asyncio's error in a private module. A closed terminal counts as SIGTERM.
TERMINATIONS = (TerminationSignal, KeyboardInterrupt, asyncio.CancelledError)
_FIRST_POLL_S, _POLL_S = 0.001, 0.05
# After the grace: stopping ranks, one try of each write that is left, a request to Prefect.
_LAST_S = 45.0

T = TypeVar("T")


class TerminationSwitch:
    """Requests the termination of a training from another thread than its flow's, such as an event loop's.

    Attributes:
        cause: The exception that requests it; None as long as nothing does.

    """

    def __init__(self) -> None:
        self.cause: BaseException | None = None

    @staticmethod
    def current() -> "TerminationSwitch | None":
        """Return the switch that governs this thread; None if none does."""
        return _switch.get()

    @staticmethod
    def is_thrown() -> bool:
        """Return whether a switch governs this thread, and requests termination."""
        switch = _switch.get()
        return switch is not None and switch.cause is not None

    @contextmanager
    def governs(self) -> Iterator[None]:
        """Let the trainings that the body starts in this thread be terminated by this switch."""
        token = _switch.set(self)
        try:
            yield
        finally:
            _switch.reset(token)


_switch: ContextVar[TerminationSwitch | None] = ContextVar("termination_switch", default=None)


class Interruption(TerminationSignal):
    """Requests the termination of a flow run that is to be resumed later.

    Attributes:
        reason: The reason that is recorded.
        yields: Whether the flow run is resumed as soon as there is room for it again; otherwise it waits to be resumed.

    """

    def __init__(self, reason: str, *, yields: bool = False) -> None:
        super().__init__(signal.SIGTERM)
        self.reason = reason
        self.yields = yields


class CancelledInPrefect(asyncio.CancelledError):
    """Requests the termination of a flow run that is cancelled, or one above it, while nobody ends its process.

    Not a TerminationSignal: Prefect's engine kills the process at the end of a flow that raises one, even a notebook's.

    Attributes:
        alone: The id of the flow run if it is cancelled, and none above it; else None.

    """

    def __init__(self) -> None:
        super().__init__("the flow run, or one above it, was cancelled in Prefect, and nobody ended its process")
        self.alone: UUID | None = None


class TerminatedError(Exception):
    """The attempt stops, since its flow run is being terminated."""


class Termination:
    """Whether a flow run is being terminated: set by the thread that is interrupted, read by the one that leads its ranks.

    The exception is raised between any two instructions of the flow's thread, also in a lock, a client or a `finally`. So that
    thread only waits, and a thread that is never interrupted does the work; it checks this object where it can stop.

    Args:
        grace_s: How long ranks may still commit.

    Attributes:
        cause: The first exception that requested termination, or None.
        outcome: The outcome of the terminated attempt; None before it has one.

    """

    def __init__(self, grace_s: float) -> None:
        self.cause: BaseException | None = None
        self.outcome: Outcome | None = None
        self._grace_s = grace_s
        self._grace_ends_s = math.inf
        self._is_abandoned = False
        self._no_more_retries = threading.Event()
        self._switch = TerminationSwitch.current() or TerminationSwitch()

    @property
    def is_requested(self) -> bool:
        """Whether termination is requested."""
        return self.cause is not None or self._is_abandoned

    @property
    def is_by_keyboard(self) -> bool:
        """Whether Ctrl-C requested it, so that a user can press it again."""
        return isinstance(self.cause, KeyboardInterrupt)

    @property
    def grace_left_s(self) -> float:
        """How long ranks may still commit, in seconds."""
        return self._grace_s if self._grace_ends_s == math.inf else max(0.0, self._grace_ends_s - time.monotonic())

    def has_cause(self) -> bool:
        """Return whether something has requested termination, also by the switch that governs the thread of this flow run."""
        if self._switch.cause is not None and self.cause is None:
            self.request(self._switch.cause)
        return self.cause is not None

    def raise_if_requested(self) -> None:
        """Raise TerminatedError if termination is requested."""
        if self.is_requested:
            raise TerminatedError(f"terminated ({type(self.cause).__name__})")

    def sleep(self, seconds: float) -> None:
        """Sleep, and raise TerminatedError as soon as termination is requested."""
        ends_s = time.monotonic() + seconds
        self.raise_if_requested()
        while (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))
            self.raise_if_requested()

    def wait_for(self, work: Callable[[], T]) -> T:
        """Run `work` in another thread, and return its result.

        Raises:
            TerminatedError: As soon as termination is requested; the work goes on.
            BaseException: What the work raised.

        """
        thread = _Work(work)
        thread.start()
        while not thread.has_ended:
            self.sleep(_FIRST_POLL_S)
        return thread.result()

    def end_retries(self) -> None:
        """Let each storage operation within `limit_retries` raise at its next failure."""
        self._no_more_retries.set()

    def request(self, cause: BaseException) -> None:
        """Request termination from another thread; a second KeyboardInterrupt ends the grace."""
        if self.cause is None:
            self._grace_ends_s = time.monotonic() + self._grace_s
            self.cause = cause
        elif isinstance(cause, KeyboardInterrupt):
            self._grace_ends_s = min(self._grace_ends_s, time.monotonic())  # a third one does not prolong what follows it

    @contextmanager
    def limit_retries(self) -> Iterator[None]:
        """Retry storage operations of the body as usual, but not past the end of the grace."""
        with retries_ended_by(self._no_more_retries):
            yield

    def outlast(self, work: Callable[[], T]) -> T:
        """Run `work` in another thread, in this context, and return its result; interrupting this thread does not interrupt it.

        A second Ctrl-C ends the grace. Work that is not done a while after the grace is abandoned.

        Raises:
            BaseException: The exception that requested termination, once the work is done; else what the work raised.

        """
        thread = _Work(work)
        self._is_abandoned = False
        try:
            self._wait_for(thread)
        finally:
            self._is_abandoned = True  # the work must not go on without this thread, whatever was raised here
        if self.cause is not None:
            raise self.cause
        return thread.result()

    def _wait_for(self, thread: "_Work[T]") -> None:
        try:
            self.has_cause()  # set while this attempt waited for the slot of a tag: it must not begin
            thread.start()
            pause_s = _FIRST_POLL_S
            # No lock here: an exception while it is acquired would leave it locked.
            while not thread.has_ended and time.monotonic() < self._grace_ends_s + _LAST_S:
                time.sleep(pause_s)
                pause_s = min(1.05 * pause_s, _POLL_S)  # a short piece of work is not prolonged by more than a twentieth
                self.has_cause()
                if time.monotonic() >= self._grace_ends_s:
                    self.end_retries()
        except TERMINATIONS as exc:
            self.request(exc)
            self._wait_for(thread)
        except BaseException as exc:  # such as a limit of the user's own, by SIGALRM: nobody waits, but ranks have the grace
            self.request(exc)
            raise


class _Work(Generic[T]):
    """A piece of work in a thread, with its result."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.has_ended = False
        self._work = work
        self._begins = threading.Lock()
        self._value: T
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the thread, once: after an exception it is unknown whether one was started."""
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
