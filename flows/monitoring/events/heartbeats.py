"""The heartbeats of a flow run whose engine sends none, by which automations find flow runs that were killed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import datetime, timedelta, timezone
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.events import ReceivedEvent, emit_event
from prefect.events.filters import EventFilter
from prefect.settings import get_current_settings

HEARTBEAT = "prefect.flow-run.heartbeat"
MISSED_HEARTBEATS = 3
LONGEST_BEGINNING_S = 1800.0  # from when a worker takes a flow run until it begins: slow images, pull steps that install
WAIT_FOR_NO_MACHINE = ("process", "docker")  # work pools whose workers take a flow run only when they can begin it
_FREQUENCY_S = 180.0  # Prefect's own default


def frequency_s() -> float:
    """Return the seconds between two heartbeats of a flow run, as far as the settings here are also those of the flow run."""
    return float(get_current_settings().flows.heartbeat_frequency or _FREQUENCY_S)


def silence_s() -> float:
    """Return the seconds without a heartbeat after which a flow run counts as dead, if nobody has chosen another time."""
    return MISSED_HEARTBEATS * frequency_s()


def begins_at_once(client: SyncPrefectClient, flow_run: FlowRun) -> bool:
    """Return whether who takes the flow run can begin it: not where it may have to wait for a machine, as in Kubernetes."""
    pool = flow_run.work_pool_name
    return pool is None or client.read_work_pool(pool).type in WAIT_FOR_NO_MACHINE


def newest_heartbeat(client: SyncPrefectClient, flow_run_id: UUID) -> ReceivedEvent | None:
    """Return the last heartbeat of a flow run, or None if there was none."""
    heartbeats = EventFilter.model_validate(
        {
            "event": {"name": [HEARTBEAT]},
            "resource": {"id": [f"prefect.flow-run.{flow_run_id}"]},
            "occurred": {"until": datetime.now(timezone.utc) + timedelta(days=1)},  # another machine's clock may be ahead
            "order": "DESC",
        }
    )
    newest = client.read_events(heartbeats, limit=1).events
    return newest[0] if newest else None


@contextmanager
def heartbeats(period_s: float | None) -> Iterator[None]:
    """Send a heartbeat of the current flow run immediately and every `period_s` while the body runs; none if that is None.

    Prefect's engine does the same, but waits at the end of the flow for its heartbeat thread, which polls once a second.
    """
    if period_s is None:
        yield
        return
    ended = threading.Event()
    threading.Thread(target=copy_context().run, args=(_beat, ended, period_s), name="heartbeats", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _beat(ended: threading.Event, period_s: float) -> None:
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    flow_run, flow_id = context.flow_run, context.flow_run.flow_id
    flow = {"prefect.resource.id": f"prefect.flow.{flow_id}", "prefect.resource.role": "flow"}
    resource = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.name": flow_run.name}
    while True:
        emit_event(HEARTBEAT, resource, related=[flow])
        if ended.wait(period_s):
            return
