"""Events on their way to Prefect's API: in order, none twice, a few requests a minute, and never in anybody's way."""

import asyncio
import threading
import time
from collections import deque
from contextvars import copy_context
from itertools import islice

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.events import Event, RelatedResource
from prefect.events.related import related_resources_from_run_context
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

PERIOD_S = 5.0
_MOST_PER_REQUEST = 200
_MOST_WAITING = 20_000
# With settings, else it would be the flow's own, which this thread must not share.
_OWN_CLIENT = {"timeout": 5.0}
_TOO_MANY_REQUESTS = 429


class EventOutbox:
    """Sends events from a thread of its own: at once after a pause, then every `PERIOD_S`, up to 200 in one request.

    Prefect's own `emit_event` hands each event to a websocket of the process. With the API away it takes eight seconds for
    each, and the process does not end before it has tried them all: minutes for a few dozen. Here, events wait until the API
    has confirmed them, and what has not arrived at the end is counted in a warning. Nothing is lost in silence, and what is
    sent again because a confirmation was lost is known to the server by its id.

    Every event gets what Prefect's own have as related resources: flow run, flow, deployment, work pool, tags.
    """

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._num_given_up = 0
        self._problem: Exception | None = None
        self._run_resources: list[RelatedResource] | None = None
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="event-outbox", daemon=True)
        self._thread.start()

    def put(self, *events: Event) -> None:
        """Take `events`; returns at once. Beyond 20,000 that wait, the oldest are given up."""
        with self._changed:
            self._waiting.extend(events)
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
                self._num_given_up += 1
            self._changed.notify()

    def close(self, longest_s: float) -> None:
        """Return once all are sent, or a request has failed, or after `longest_s`; a warning counts what was not sent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(longest_s)
        with self._changed:
            num_lost = self._num_given_up + len(self._waiting)
            self._waiting.clear()
        if num_lost:
            get_run_logger().warning(
                "%d events of this training could not be sent to Prefect (%r); its storage has it all", num_lost, self._problem
            )

    def _run(self) -> None:
        not_before_s = 0.0
        while batch := self._next_batch(not_before_s):
            is_last = self._closing  # what fails at the end is not tried again: a process that was told to end must end
            if not self._deliver(batch) and is_last:
                return
            not_before_s = time.monotonic() + PERIOD_S

    def _next_batch(self, not_before_s: float) -> list[Event]:
        """Return what is to be sent, as soon as there is something and it may be sent; nothing when no more comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            self._changed.wait_for(lambda: self._closing, max(0.0, not_before_s - time.monotonic()))
            return list(islice(self._waiting, _MOST_PER_REQUEST))

    def _deliver(self, batch: list[Event]) -> bool:
        """Send `batch`, and forget it unless it can be tried again; say whether it can not."""
        try:
            self._send(batch)
        except Exception as exc:  # noqa: BLE001 - the client raises RuntimeError, too, when nobody answers
            self._problem = exc
            if not _is_refusal(exc):
                return False
            get_run_logger().warning("Prefect refuses %d events of this training: %s", len(batch), exc)
        with self._changed:
            for event in batch:
                if self._waiting and self._waiting[0] is event:  # unless it was given up meanwhile
                    self._waiting.popleft()
        return True

    def _send(self, events: list[Event]) -> None:
        # Tried again by this thread, and not for a minute by the client.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            if self._run_resources is None:
                self._run_resources = asyncio.run(_run_resources())
            body = [_with_related(event, self._run_resources).model_dump(mode="json") for event in events]
            with get_client(_OWN_CLIENT, sync_client=True) as client:
                client.request("POST", "/events", json=body)


async def _run_resources() -> list[RelatedResource]:
    async with get_client(httpx_settings=_OWN_CLIENT) as client:
        return await related_resources_from_run_context(client)


def _with_related(event: Event, resources: list[RelatedResource]) -> Event:
    known = {resource.id for resource in event.involved_resources}
    return event.model_copy(update={"related": [*event.related, *(it for it in resources if it.id not in known)]})


def _is_refusal(exc: Exception) -> bool:
    """Say whether the same request would be refused again."""
    if not isinstance(exc, httpx.HTTPStatusError):
        return False
    return exc.response.is_client_error and exc.response.status_code != _TOO_MANY_REQUESTS
