"""The heartbeats of a flow run whose engine sends none, by which automations find flow runs that were killed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.settings import get_current_settings

HEARTBEAT = "prefect.flow-run.heartbeat"
_FREQUENCY_S = 180.0  # Prefect's own default


def frequency_s() -> float:
    """Return the seconds between two heartbeats of a flow run, as far as the settings here are also those of the flow run."""
    return float(get_current_settings().flows.heartbeat_frequency or _FREQUENCY_S)


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
