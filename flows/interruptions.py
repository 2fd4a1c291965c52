"""Leaving the machine on request: a flow run that is suspended, or gives way to a more urgent one, continues later."""

import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, Pause, PrefectException, TerminationSignal
from prefect.states import Cancelled, Scheduled
from prefect_torch.ckpt.runs.attempts.attempt import GAVE_WAY, SUSPENDED
from prefect_torch.tasks.gang.termination import CancelledInPrefect, Interruption, Termination
from prefect_torch.tasks.prefect_api.flow_run import current_flow_run, flow_runs_from, is_cancellation, let_workers_continue
from prefect_torch.tasks.prefect_api.outage import NO_ANSWER, is_outage
from prefect_torch.tasks.prefect_api.settings import without_retries
from prefect_torch.tasks.training.backoff import Backoff

from .urgency import YIELDED, find_urgent

_POLL_S = 5.0
# A worker or runner sends SIGTERM to a cancelled flow run within ten seconds.
_UNHEEDED_S = 30.0
_LEAVE_S = 600.0

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def spared_from_suspension() -> Iterator[Callable[[], State | None]]:
    """Keep Prefect from raising Pause in the body; yield a function that returns the state of a suspended flow run, else None.

    Prefect raises it in every thread of a suspended flow run that submits, begins or ends a task: a leader would leave its
    ranks without their grace, and without a record of the attempt.
    """
    context = FlowRunContext.get()
    if context is None:
        yield lambda: None
        return
    request = context.flow_run_suspension_request
    with context.model_copy(update={"flow_run_suspension_request": type(request)()}):
        yield request.get_state


@contextmanager
def interruptible(termination: Termination, *, yields_to_urgent: bool) -> Iterator[None]:
    """Let the flow run of the body be suspended, and give way to a more urgent one; costs a request every five seconds.

    A flow run without a deployment can do neither: Prefect could not start it again. It leaves when one above it is suspended:
    see `suspendable`. A flow run of a deployment that another flow has started gives way, but Prefect refuses to suspend it.
    Every flow run ends when it, or one above it, is cancelled: see `cancellable`.

    Args:
        termination: Where the request is recorded; its ranks have the grace for a last checkpoint.
        yields_to_urgent: Whether the flow run gives way to one that waits in a more urgent work queue of its work pool.

    Raises:
        Pause: If it was interrupted, once the body has ended.

    """
    this = current_flow_run()
    if this.deployment_id is None:
        with suspendable(termination):
            yield
        return

    def find() -> BaseException | None:
        with get_client(sync_client=True) as client:
            return find_interruption(client, this, yields_to_urgent=yields_to_urgent)

    with spared_from_suspension():
        try:
            with _terminated_by_hangup(), _watched(find, termination):
                yield
        except Interruption as exc:
            raise Pause(state=_leave(this, exc)) from None


@contextmanager
def cancellable(termination: Termination, find_other: Callable[[], BaseException | None] = lambda: None) -> Iterator[None]:
    """Terminate the body half a minute after its flow run, or one above it, was cancelled; costs a request every five seconds.

    A worker or a runner ends the process before that. But a worker may be gone, and a flow that is called directly has none.

    Args:
        termination: Where the request is recorded.
        find_other: Returns another exception that terminates the body; None as long as there is none. Not called once the flow
            run is cancelled.

    """
    cancellation = _Cancellation(current_flow_run())

    def find() -> BaseException | None:
        return cancellation.find() or find_other()

    with cancellation.recorded_at_exit(termination), _terminated_by_hangup(), _watched(find, termination):
        yield


def call_cancellable(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | State[Any]:
    """Call a flow; where it alone is cancelled, that is an error of the call, as with any subflow in Prefect.

    Its caller, which may catch the error, and the other work of that are not cancelled.

    Args:
        call: Calls the flow.
        args: Its arguments.
        kwargs: Its keyword arguments; with `return_state`, the cancelled state is returned.

    Raises:
        CancelledRun: If the flow run is cancelled, and none above it.

    """
    try:
        return call(*args, **kwargs)
    except CancelledInPrefect as exc:
        if exc.alone is None:
            raise
        state = _record_cancelled(exc.alone)
    if kwargs.get("return_state"):
        return state
    raise CancelledRun(state.message)


@contextmanager
def suspendable(termination: Termination) -> Iterator[None]:
    """Do what `cancellable` promises, and terminate the body within seconds after its flow run, or one above it, was suspended.

    Raises:
        Pause: If it was suspended, once the body has ended.

    """
    with spared_from_suspension() as suspended:
        try:
            with cancellable(termination, lambda: None if suspended() is None else Interruption(SUSPENDED)):
                yield
        except Interruption:
            raise Pause(state=suspended()) from None


@contextmanager
def _terminated_by_hangup() -> Iterator[None]:
    """Let a terminal that is closed (SIGHUP) end the body as SIGTERM does; no effect if it is ignored (nohup) or handled."""
    is_ended_by_it = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    if not is_ended_by_it:
        yield
        return
    signal.signal(signal.SIGHUP, _terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGHUP) is _terminate:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the kernel and the shell both send it
    signal.raise_signal(signal.SIGTERM)


class _Cancellation:
    """Whether a flow run, or one above it in its process, is cancelled.

    Args:
        this: The flow run.

    """

    def __init__(self, this: FlowRun) -> None:
        self._this = this
        self._ids: list[UUID] = []  # of the flow run and those above it
        self._cancelled: list[UUID] = []  # of these
        self._cause = CancelledInPrefect()

    def find(self) -> CancelledInPrefect | None:
        """Return the exception that terminates the flow run if it, or one above it, is cancelled, else None; one request."""
        with get_client(sync_client=True) as client:
            self._ids = self._ids or [it.id for it in flow_runs_from(client, self._this)]
            found = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=self._ids)))
        self._cancelled = [it.id for it in found if is_cancellation(it.state)]
        self._cause.alone = self._this.id if self._cancelled == [self._this.id] else None
        return self._cause if self._cancelled else None

    @contextmanager
    def recorded_at_exit(self, termination: Termination) -> Iterator[None]:
        """Set the cancelled flow runs to Cancelled at the end of the process, unless another one terminates the body.

        Also if that has ended before the cancellation could terminate it: from Cancelling, Prefect refuses Completed.
        """
        try:
            yield
        finally:
            if termination.cause is self._cause:
                with suppress(PrefectException, *NO_ANSWER), without_retries():
                    self.find()  # one above it may have been cancelled within the grace
            if termination.cause in (None, self._cause):
                for flow_run_id in self._cancelled:
                    atexit.register(_record_cancelled, flow_run_id)


def _record_cancelled(flow_run_id: UUID) -> State[Any]:
    """Set a flow run that was cancelled to Cancelled once it has ended, so that no automation runs it again; return that state.

    Prefect's engine ends it as Crashed, as Failed where it waits for the task of a training, or not at all.
    """
    cancelled: State[Any] = Cancelled(message="Cancelled. Nobody ended its process, so its work ended by itself.")
    with suppress(PrefectException, *NO_ANSWER), without_retries(), get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run_id).state
        if state is not None and (state.is_cancelled() or state.is_completed()):
            return state
        client.set_flow_run_state(flow_run_id, cancelled, force=True)
    return cancelled


@contextmanager
def _watched(find: Callable[[], BaseException | None], termination: Termination) -> Iterator[None]:
    has_ended = threading.Event()
    watch = threading.Thread(
        target=copy_context().run, args=(_watch, find, termination, has_ended), name="interruptions", daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        has_ended.set()


def _watch(find: Callable[[], BaseException | None], termination: Termination, has_ended: threading.Event) -> None:
    """Request the termination that `find` returns; a cancellation only after a while, since a worker or a runner is faster."""
    found_s: float | None = None
    while not has_ended.wait(_POLL_S) and termination.cause is None:  # also between two attempts, when none is led
        # The next poll tries again, also after a proxy's page in the place of an answer.
        with suppress(PrefectException, *NO_ANSWER):
            found, now_s = find(), time.monotonic()
            if found is None:
                found_s = None
                continue
            found_s = now_s if found_s is None else found_s
            if isinstance(found, Interruption) or now_s - found_s >= _UNHEEDED_S:
                termination.request(found)


def find_interruption(client: SyncPrefectClient, this: FlowRun, *, yields_to_urgent: bool) -> TerminationSignal | None:
    """Return why a flow run is to leave its machine now, a plain TerminationSignal if it is cancelled; None if it may stay.

    Args:
        client: A client of the API that has the flow run.
        this: The flow run.
        yields_to_urgent: Whether it leaves for a more urgent flow run.

    """
    state = client.read_flow_run(this.id).state
    if state is not None and state.is_paused() and state.state_details.pause_reschedule:
        return Interruption(SUSPENDED)
    if is_cancellation(state):
        return TerminationSignal(signal.SIGTERM)
    urgent = find_urgent(client, this) if yields_to_urgent else None
    return None if urgent is None else Interruption(f"{GAVE_WAY} to the more urgent flow run {urgent.name!r}", yields=True)


def _leave(this: FlowRun, why: Interruption) -> State | None:
    """Return the state in which the flow run waits to continue; one that gives way is scheduled behind the more urgent one.

    Tries for ten minutes while Prefect's API is away: the flow run would be recorded as Failed, and nobody would continue it.
    """
    until_s, pauses = time.monotonic() + _LEAVE_S, Backoff()
    while True:
        try:
            with get_client(sync_client=True) as client:
                left = client.read_flow_run(this.id)
                let_workers_continue(client, left)
                if why.yields:
                    return client.set_flow_run_state(this.id, Scheduled(name=YIELDED, message=why.reason), force=True).state
                return left.state
        except NO_ANSWER as exc:
            if not is_outage(exc) or time.monotonic() > until_s:
                raise
        pauses.record()
        time.sleep(pauses.wait_s())
