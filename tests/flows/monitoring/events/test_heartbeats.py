"""Heartbeats of a flow run, read from a real server."""

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events.filters import EventFilter
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect_servers import wait_until
from prefect_torch.flows.monitoring.events.heartbeats import HEARTBEAT, heartbeats


def beats_of(flow_run_id: str) -> list:
    chosen = {"resource": {"id": [f"prefect.flow-run.{flow_run_id}"]}, "event": {"name": [HEARTBEAT]}, "order": "ASC"}
    with get_client(sync_client=True) as client:
        return client.read_events(EventFilter.model_validate(chosen), limit=50).events


@pytest.mark.parametrize("period_s", [None, 0.2])
def test_a_flow_run_is_known_to_be_alive_as_by_prefects_engine(period_s):
    @flow(name="beating")
    def beating() -> str:
        with heartbeats(period_s):
            if period_s is not None:
                wait_until(lambda: len(beats_of(flow_run.id)) > 1, "two heartbeats")
        return str(flow_run.id)

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        found = beats_of(beating())
    assert all("flow" in {related.role for related in it.related} for it in found)
    assert bool(found) == (period_s is not None)
