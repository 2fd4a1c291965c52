"""The Prefect task of one rank: supervises its process, logs its output, and ends as the process does."""

import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Failed
from prefect_torch.ckpt.reporting.exchange.exits import RankExit, announce_exit, has_announced_failure
from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue
from prefect_torch.tasks.gang.processes.local_rank import LocalRank
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.failures import CONSEQUENCES
from prefect_torch.tasks.rank.rendezvous import WITHIN_LEADER, connect, heartbeat_key
from prefect_torch.tasks.rank.spec import RankResult, RankSpec
from prefect_torch.tasks.run_logs import get_run_logger

from .lost_peers import describe_lost_connection
from .rank_logs import RankLog
from .returned import held
from .stop_order import StopOrder
from .watch import RANK_HEARTBEAT_S

_POLL_S = 0.1
_STOP_GRACE_S = 3.0
_STACK_TRACES_S = 1.0  # enough to print them
_RECORD_S = 5.0  # NCCL's thread looks at its pipe every second


class StartedRank(Protocol):
    """A rank that runs, on this machine or another."""

    def lines(self, poll_s: float) -> Iterator[list[str]]:
        """Yield the lines written since the last yield, until the process exits or is lost.

        Yields at least every few seconds, and every `poll_s` once `wake` was called.
        """
        ...

    def wake(self) -> None:
        """Let `lines` yield now, and every `poll_s` from now on."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM to the process; no effect once it has exited."""
        ...

    def write_stack_traces(self) -> bool:
        """Have the process print its stack traces, and return whether NCCL writes a record as well, which takes seconds."""
        ...

    def kill(self) -> None:
        """Kill the process and all its descendants (SIGKILL); no effect once they have exited."""
        ...

    def finish(self) -> RankResult:
        """Kill what is left of the process, and return how it ended."""
        ...


class Machine(Protocol):
    """A machine on which ranks are started."""

    def start(self, spec: RankSpec) -> StartedRank:
        """Start a rank."""
        ...


@task(
    name="train_rank",
    task_run_name="rank-{spec.rank}",
    cache_policy=NO_CACHE,
    persist_result=False,
    # A task without retries logs the failed state, its data and the traceback of no exception.
    retries=1,
    retry_condition_fn=lambda *_: False,
)
def train_rank(
    spec: RankSpec, machine: Machine | None = None, log: RankLog | None = None, stop: StopOrder | None = None
) -> Any:
    """Run one rank to its end and return what its function returned (rank 0; None on the others), or its holder; see `held`.

    The process's output becomes this task run's log, line by line. The process cannot outlive this one. When the attempt
    is over because another rank failed, the process is killed and this task run is cancelled.

    Args:
        spec: The rank.
        machine: Its machine; None for this one.
        log: Where its lines go; None for all to Prefect.
        stop: Whether it is to be stopped; None for never.

    Raises:
        RankFailedError: With the rank's traceback, exit code or signal; the failed state has the same message. If another rank
            caused the failure, the state is Cancelled.

    """
    connected = cache(partial(connect, spec.rendezvous, tries_for=WITHIN_LEADER))
    heartbeat = Heartbeat(connected, spec.rank)
    with heartbeat.kept_up():
        return run_rank(spec, machine, stop or StopOrder(), heartbeat, log or RankLog(spec.rank))


class Heartbeat:
    """The heartbeats of a task run, at most one every few seconds however often it is called.

    Args:
        connected: Returns the store that the ranks share.
        rank: The first of its ranks.

    """

    def __init__(self, connected: Callable[[], KeyValue], rank: int) -> None:
        self.connected = connected
        self._key = heartbeat_key(rank)
        self._due_s = 0.0

    def __call__(self) -> None:
        """Send a heartbeat if one is due."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + RANK_HEARTBEAT_S
            self.connected().add(self._key, 1)

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Send heartbeats from another thread within the context, too: a terminal that nobody reads blocks whoever logs."""
        ended = threading.Event()

        def send() -> None:
            with suppress(Exception):  # the supervisor's own heartbeat raises it, too
                while not ended.wait(RANK_HEARTBEAT_S):
                    self()

        threading.Thread(target=send, name="heartbeat", daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def run_rank(spec: RankSpec, machine: Machine | None, stop: StopOrder, heartbeat: Heartbeat, log: RankLog) -> Any:
    """Run one rank to its end, and return what its function returned, `held`, or the state of one that failed or was stopped.

    Args:
        spec: The rank.
        machine: Its machine; None for this one.
        stop: Whether it is to be stopped.
        heartbeat: The heartbeat of this task run.
        log: Where its lines go.

    """
    try:
        rank: StartedRank = LocalRank(spec) if machine is None else machine.start(spec)
    except (OSError, RuntimeError) as exc:  # no descriptor, process or thread is left for the moment
        not_started = RankResult(kind="infrastructure", error=f"its process cannot be started: {exc}")
        return _fail(spec, not_started, heartbeat.connected())
    try:
        stop.follow(rank.wake)
        stopped = _supervise(rank, stop, heartbeat, lambda: has_announced_failure(heartbeat.connected(), spec.rank), log)
    finally:
        result = rank.finish()
    if stopped is not None and result.kind is not None:  # else its function had returned, and only threads were awaited
        return Cancelled(message=stopped)
    if result.kind is not None:
        if result.kind not in CONSEQUENCES:
            log.write_all()
        return _fail(spec, result, heartbeat.connected())
    return None if result.return_value is None else held(_load_value(result.return_value))


def _load_value(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)  # noqa: S301 - from our own process
    except BaseException as exc:  # noqa: BLE001 - a finished training must not fail for it, nor for a SystemExit of its module
        get_run_logger().warning("the return value is dropped, since it cannot be rebuilt here: %r", exc)
        return None


def _supervise(
    started: StartedRank, stop: StopOrder, heartbeat: Callable[[], None], has_failed: Callable[[], bool], log: RankLog
) -> str | None:
    """Log lines until the process has exited; return why it was stopped, or None if it exited by itself.

    A rank that announced its failure before the order to stop, and has yet to exit, counts as exited by itself: it may be the
    cause. It gets time to exit, since SIGTERM would discard its error, and look like a preemption.
    """
    reason: str | None = None
    is_stopping = False
    terminate_at_s, kill_at_s = math.inf, math.inf
    for lines in started.lines(_POLL_S):
        log.write(lines)
        heartbeat()
        now_s = time.monotonic()
        if not is_stopping and stop.reason is not None:
            is_stopping = True
            if has_failed():
                kill_at_s = now_s + _STOP_GRACE_S
            else:
                reason, terminate_at_s = stop.reason, now_s
            if stop.wants_stack_traces:
                log.write_all()
                terminate_at_s += _RECORD_S if started.write_stack_traces() else _STACK_TRACES_S
        if now_s >= terminate_at_s:
            started.terminate()
            terminate_at_s, kill_at_s = math.inf, now_s + _STOP_GRACE_S
        if now_s >= kill_at_s:
            started.kill()
    return reason


def _fail(spec: RankSpec, result: RankResult, key_value: KeyValue) -> State[Any]:
    """Announce the failure, and return the final state; a raised error would be logged with the traceback of the supervisor."""
    error = _error(spec, result)
    is_consequence = error.kind in CONSEQUENCES
    left = RankExit(spec.rank, None, "died", result.error, is_consequence)
    announce_exit(key_value, left)  # unless the rank has announced it
    if is_consequence:
        is_lost = error.kind == "communication"
        reason = describe_lost_connection(key_value, spec.rank, str(result.error)) if is_lost else result.error
        return Cancelled(message=f"stopped: {reason}", data=error)
    return Failed(message=str(error), data=error)


def _error(spec: RankSpec, result: RankResult) -> RankFailedError:
    assert result.kind is not None
    original = None
    if result.exception is not None:
        try:
            original = pickle.loads(result.exception)  # noqa: S301 - from our own process
        except BaseException:  # noqa: BLE001 - its module cannot be imported here, or exits; the text has the traceback
            original = None
    where = "" if spec.node_name is None else f" on machine {spec.node_name}"
    return RankFailedError(
        f"rank {spec.rank} of {spec.group}{where} failed: {result.error}",
        spec.rank,
        result.kind,
        original if isinstance(original, Exception) else None,
        result.traceback,
        was_killed=result.was_killed,
    )
