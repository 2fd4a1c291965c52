"""A flow run without a Prefect API: the training continues, and its logs and its final state are sent once the API is back."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.logging.handlers import APILogWorker
from prefect.runtime import flow_run
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_CSRF_SUPPORT_ENABLED,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_RETRY_EXTRA_CODES,
    PREFECT_SERVER_CSRF_PROTECTION_ENABLED,
)
from prefect_torch.ckpt.errors import PAGE_OF_PROXY
from prefect_torch.tasks.run_logs import get_run_logger

from .embedded_server.keeping import ServerKeeper, embedded_server_kept_running
from .settings import settings_with_defaults, using, without_retries

# Pauses of 2, 4, ..., 128 s: a request with log lines is repeated for four minutes. Prefect's own 5 retries end after one.
_RETRIES = 7
_MOST_WAITING = 50_000  # log lines: some 60 MB, and their texts
# Answers of a server without its database, and of a proxy without its server; Prefect itself repeats after 408, 429, 502, 503.
_REPEATED = {HTTPStatus.INTERNAL_SERVER_ERROR.value, HTTPStatus.GATEWAY_TIMEOUT.value}
_LONGEST_S = 600.0
_POLL_S = 1.0
_JUST_NOW_S = 1.0
_LATER = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)  # a proxy says so, or Prefect Cloud
_OF_KEY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
# What a request raises that got no answer of Prefect; the second for the page of a proxy, which is no JSON.
NO_ANSWER = (httpx.HTTPError, ValueError)

_keeper: ContextVar[ServerKeeper] = ContextVar("keeper")
_unreached: ContextVar[set[str | None]] = ContextVar("unreached")  # flow runs for which a body has waited in vain


@contextmanager
def outlast_api_outages(is_terminated: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Repeat requests for four minutes while Prefect's API is away, and return once it answers, or after ten minutes.

    A terminated body (preempted or cancelled) does not wait, and no longer than until `is_terminated` is true. A user's own
    PREFECT_CLIENT_MAX_RETRIES and PREFECT_CLIENT_RETRY_EXTRA_CODES are respected.

    Without the wait, the flow run would stay "Running" forever and its process would end with a connection error: Prefect's
    engine proposes the final state for a minute only, with settings that the flow's body cannot change. An embedded server that
    dies is started again; there is no wait for one that does not start. Within another such body, such as a trial within
    its sweep, the settings and the server are the outer one's, and after less than a second the API is not checked: it answered
    when the inner flow run began, whose final state is proposed with the outer one's retries.
    Where one body of a flow run has waited in vain, or is terminated, none around it waits again.
    """
    outer = _keeper.get(None)
    if outer is not None:
        with _api_answers_after(outer, is_terminated, unless_within_s=_JUST_NOW_S):
            yield
        return
    with using(settings_with_defaults(_defaults())), embedded_server_kept_running() as keeper:
        # The log worker keeps its first settings: it ends here, and another starts before a thread with other settings logs.
        APILogWorker.instance().drain()
        APILogWorker.instance()
        token, unreached = _keeper.set(keeper), _unreached.set(set())
        try:
            with _api_answers_after(keeper, is_terminated):
                yield
        finally:
            _keeper.reset(token)
            _unreached.reset(unreached)


def repeat_without_database() -> AbstractContextManager[None]:
    """Repeat the requests of the body that a server without its database answers, and those of the processes of flow runs.

    These get the body's settings. One that begins at that moment would otherwise end, perhaps without anybody to tell that.
    """
    return using(settings_with_defaults({PREFECT_CLIENT_RETRY_EXTRA_CODES: _REPEATED}))


class WaitingLines:
    """The log lines of this process that wait for Prefect's API, of which there may be any number otherwise.

    Prefect sends some megabytes at a time, and the next ones wait while a request is repeated.
    """

    def __init__(self) -> None:
        self._num_dropped = 0
        self._dropping = threading.Lock()

    def bound(self) -> None:
        """If more than 50,000 wait, drop the older half, and log how many were dropped so far."""
        workers = tuple(getattr(APILogWorker, "_instances", {}).values())  # also those of other services
        for lines in [getattr(it, "_queue", None) for it in workers if isinstance(it, APILogWorker)]:
            if not isinstance(lines, queue.Queue) or lines.qsize() <= _MOST_WAITING:  # another Prefect may have no queue
                continue
            with self._dropping, suppress(queue.Empty):
                while lines.qsize() > _MOST_WAITING // 2:
                    lines.get_nowait()
                    lines.task_done()
                    self._num_dropped += 1
            get_run_logger().warning(
                "%d log lines of this process were not sent to Prefect: too many wait, since its API is away or slow",
                self._num_dropped,
            )


WAITING_LINES = WaitingLines()


def is_outage(error: BaseException) -> bool:
    """Return whether a request failed because Prefect's API is away, or its database is, so that it may succeed later.

    A page of a proxy in the place of an answer, whatever its status, shows that the API is away.
    An embedded server that died too often is not restarted.
    """
    keeper = _keeper.get(None)
    return _is_away(error) and (keeper is None or not keeper.has_given_up)


def is_key_refused(error: BaseException) -> bool:
    """Return whether Prefect's API refused a request for its key, which may have expired, perhaps not for good."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in _OF_KEY


def _is_away(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.is_server_error or error.response.status_code in _LATER
    return isinstance(error, (httpx.TransportError, *PAGE_OF_PROXY))


def _defaults() -> dict[Any, Any]:
    """Return the values of settings that the user has not set."""
    defaults: dict[Any, Any] = {PREFECT_CLIENT_MAX_RETRIES: _RETRIES, PREFECT_CLIENT_RETRY_EXTRA_CODES: _REPEATED}
    if PREFECT_API_URL.value() is None and not PREFECT_SERVER_CSRF_PROTECTION_ENABLED.value():
        # The embedded server has no tokens, and each new client would request one.
        defaults[PREFECT_CLIENT_CSRF_SUPPORT_ENABLED] = False
    return defaults


@contextmanager
def _api_answers_after(keeper: ServerKeeper, is_terminated: Callable[[], bool], unless_within_s: float = 0.0) -> Iterator[None]:
    begun_s = time.monotonic()

    def wait() -> None:
        if time.monotonic() - begun_s >= unless_within_s:
            _wait_for_api(keeper, is_terminated)

    try:
        yield
    except Exception:
        wait()
        raise
    wait()


def _wait_for_api(keeper: ServerKeeper, is_terminated: Callable[[], bool]) -> None:
    deadline_s, unreached = time.monotonic() + _LONGEST_S, _unreached.get()
    is_logged = False
    if flow_run.id in unreached:
        return
    error: Exception | None = None
    while not (is_ended := is_terminated()) and (error := _outage()) is not None and time.monotonic() < deadline_s:
        if keeper.has_given_up:
            unreached.add(flow_run.id)
            get_run_logger().error(
                "the training has ended, but Prefect's embedded server died and does not start again, so Prefect cannot record "
                "the final state; everything is in the run's storage, for Result.from_storage(storage, run) and the next start"
            )
            return
        if not is_logged:
            get_run_logger().warning(
                "the training has ended, but Prefect's API is away (%r): waiting up to %g s to record the final state",
                error,
                _LONGEST_S,
            )
            is_logged = True
        time.sleep(_POLL_S)
    if is_ended or error is not None:
        unreached.add(flow_run.id)


def _outage() -> Exception | None:
    """Return the error of a request for the flow run, None if the API answers; a server without its database counts as away."""
    with without_retries(), get_client(sync_client=True) as client:
        try:
            client.read_flow_run(UUID(flow_run.id))
        except NO_ANSWER as exc:
            return exc if _is_away(exc) else None
        except ObjectNotFound:  # the server has another database now, and waiting does not bring the old one back
            return None
    return None
