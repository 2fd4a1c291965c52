"""Events on their way to Prefect's API: in order, none twice, with a few requests a minute, without delaying the training."""

import asyncio
import json
import threading
import time
from collections import deque
from contextlib import suppress
from contextvars import copy_context
from http import HTTPStatus
from itertools import islice

import httpx
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.events import Event, RelatedResource
from prefect.events.related import related_resources_from_run_context
from prefect.exceptions import ObjectNotFound
from prefect_torch.flows.monitoring.text import storable
from prefect_torch.tasks.prefect_api.client import own_connections
from prefect_torch.tasks.prefect_api.flow_run import flow_runs_from
from prefect_torch.tasks.prefect_api.outage import is_key_refused, is_outage
from prefect_torch.tasks.prefect_api.settings import without_retries
from prefect_torch.tasks.run_logs import get_run_logger

PERIOD_S = 5.0
LONGEST_TEXT = 4000
_MOST_PER_REQUEST = 200
_MOST_WAITING = 20_000
_REQUEST_S = 5.0
_MOST_BYTES = 1_000_000  # the server drops an event of more than 1.5 MB, with its own fields
_LONGEST_TEXTS = (LONGEST_TEXT, 100)
_OF_ONE = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)


class EventOutbox:
    """Sends events from a thread of its own: immediately after a pause, then every `PERIOD_S`, up to 200 in one request.

    Prefect's own `emit_event` hands each event to a websocket of the process. With the API away it takes eight seconds for
    each event, and the process does not end before all were tried: minutes for a few dozen. Here, events wait until the API has
    confirmed them, and a warning counts those that were not sent at the end, so that no loss is silent. The server recognizes
    an event that is sent twice, because a confirmation was lost, by its id.

    Every event gets the related resources of Prefect's own events: flow run, flow, deployment, work pool, tags. Of a subflow,
    Prefect's have no deployment; these have that of the flow that has called it.
    """

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._num_dropped = 0
        self._error: Exception | None = None
        self._run_resources: list[RelatedResource] | None = None
        self._thread = threading.Thread(target=copy_context().run, args=(self._run,), name="event-outbox", daemon=True)
        self._thread.start()

    def put(self, *events: Event) -> None:
        """Add `events` to the outbox without waiting; beyond 20,000 waiting events, the oldest are dropped."""
        with self._changed:
            self._waiting.extend(events)
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
                self._num_dropped += 1
            self._changed.notify()

    def close(self, longest_s: float) -> None:
        """Return once all are sent, a request has failed, or `longest_s` have passed; a warning counts the unsent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(longest_s)
        with self._changed:
            num_lost = self._num_dropped + len(self._waiting)
            self._waiting.clear()
        if num_lost:
            get_run_logger().warning(
                "%d events of this training could not be sent to Prefect (%r); the run's storage is complete",
                num_lost,
                self._error,
            )

    def _run(self) -> None:
        not_before_s = 0.0
        while batch := self._next_batch(not_before_s):
            is_last = self._closing  # no retry at the end: a process that is asked to end must end
            if not self._deliver(batch) and is_last:
                return
            not_before_s = time.monotonic() + PERIOD_S

    def _next_batch(self, not_before_s: float) -> list[Event]:
        """Return the next events once there are some and the pause is over; none once the outbox is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            self._changed.wait_for(lambda: self._closing, max(0.0, not_before_s - time.monotonic()))
            return list(islice(self._waiting, _MOST_PER_REQUEST))

    def _deliver(self, batch: list[Event]) -> bool:
        """Send `batch` and drop it unless it can be retried; return whether it was dropped.

        If one of the events is at fault, halves are sent until it is alone, so that no other event is lost.
        """
        try:
            self._send(batch)
        except Exception as exc:  # noqa: BLE001 - the client also raises RuntimeError without an answer
            self._error = exc
            if not _is_permanent(exc):
                return False
            if len(batch) > 1 and _is_of_one(exc):
                half = len(batch) // 2
                return self._deliver(batch[:half]) and self._deliver(batch[half:])
            get_run_logger().warning("Prefect refuses %d events of this training: %s", len(batch), exc)
        with self._changed:
            for event in batch:
                if self._waiting and self._waiting[0] is event:  # unless it was dropped meanwhile
                    self._waiting.popleft()
        return True

    def _send(self, events: list[Event]) -> None:
        # This thread retries; the client would do so for a minute.
        with without_retries():
            if self._run_resources is None:
                self._run_resources = _run_resources()
            body = _encoded([_with_related(event, self._run_resources) for event in events])
            with get_client(httpx_settings=own_connections(_REQUEST_S), sync_client=True) as client:
                client.request("POST", "/events", content=body, headers={"Content-Type": "application/json"})


class _UnencodableError(Exception):
    """JSON cannot hold an event."""


def _encoded(events: list[Event]) -> bytes:
    """Return events as JSON, which cannot hold NaN in a list."""
    try:
        return b"[%s]" % b",".join(map(_fitting, events))
    except (TypeError, ValueError) as exc:
        raise _UnencodableError(f"{events[0].event} has no form in JSON: {exc}") from exc


def _fitting(event: Event) -> bytes:
    """Return an event as JSON, with shorter texts in its payload, or none, where the server would drop it without a word."""
    payload = storable(event.payload)  # before the dump, which refuses a lone surrogate in a metric's name
    dump = storable(event.model_copy(update={"payload": payload}).model_dump(mode="json"))
    for longest in _LONGEST_TEXTS:
        dump["payload"] = storable(dump["payload"], longest)
        fitting = json.dumps(dump, ensure_ascii=False, allow_nan=False).encode()
        if len(fitting) <= _MOST_BYTES:
            return fitting
    get_run_logger().warning("%s is sent without its payload, which is larger than Prefect's server takes", event.event)
    return json.dumps({**dump, "payload": {}}, ensure_ascii=False, allow_nan=False).encode()


def _run_resources() -> list[RelatedResource]:
    """Return what Prefect's own events of this flow run are related to, and the deployment of the flow that has called it."""
    resources, context = asyncio.run(_related_in_prefect()), FlowRunContext.get()
    if context is None or context.flow_run is None:
        return resources
    with get_client(httpx_settings=own_connections(_REQUEST_S), sync_client=True) as client:
        called, deployed = flow_runs_from(client, context.flow_run), None
        with suppress(ObjectNotFound):  # somebody has deleted the flow run above
            deployed = next((it.deployment_id for it in called if it.deployment_id is not None), None)
    resource_id = f"prefect.deployment.{deployed}"
    if deployed is None or resource_id in {it.id for it in resources}:
        return resources
    return [*resources, RelatedResource({"prefect.resource.id": resource_id, "prefect.resource.role": "deployment"})]


async def _related_in_prefect() -> list[RelatedResource]:
    async with get_client(httpx_settings=own_connections(_REQUEST_S)) as client:
        return await related_resources_from_run_context(client)


def _with_related(event: Event, resources: list[RelatedResource]) -> Event:
    known = {resource.id for resource in event.involved_resources}
    return event.model_copy(update={"related": [*event.related, *(it for it in resources if it.id not in known)]})


def _is_permanent(exc: Exception) -> bool:
    """Return whether the same request would be refused again, here or by the server."""
    if not isinstance(exc, httpx.HTTPStatusError):
        return isinstance(exc, _UnencodableError)
    return exc.response.is_client_error and not is_outage(exc) and not is_key_refused(exc)


def _is_of_one(exc: Exception) -> bool:
    """Return whether one of the events may be at fault, and not the request."""
    return not isinstance(exc, httpx.HTTPStatusError) or exc.response.status_code in _OF_ONE
