"""The signs of life that a flow run has given to Prefect, and the silence after which it counts as dead."""

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.events import ReceivedEvent
from prefect.events.filters import EventFilter

from .heartbeats import HEARTBEAT, frequency_s

MISSED_HEARTBEATS = 3
LONGEST_BEGINNING_S = 1800.0  # from when a worker takes a flow run until it begins: slow images, pull steps that install
WAIT_FOR_NO_MACHINE = ("process", "docker")  # work pools whose workers take a flow run only when they can begin it


@dataclass(frozen=True)
class SignOfLife:
    """A flow run's last heartbeat, or the Pending state that a worker set when it took the flow run."""

    id: UUID
    occurred: datetime

    @property
    def age_s(self) -> float:
        """How long ago it occurred, by the clock of the machine that sent it."""
        return (datetime.now(timezone.utc) - self.occurred).total_seconds()


def last_sign(client: SyncPrefectClient, flow_run: FlowRun) -> SignOfLife | None:
    """Return the last sign of life of a Pending or Running flow run, or None if there was none; a request if it is Running."""
    state = flow_run.state
    if state is not None and state.is_pending():
        return SignOfLife(state.id, state.timestamp)
    newest = _newest_heartbeat(client, flow_run.id)
    return None if newest is None else SignOfLife(newest.id, newest.occurred)


def silence_s() -> float:
    """Return the seconds without a heartbeat after which a flow run counts as dead, if nobody has chosen another time."""
    return MISSED_HEARTBEATS * frequency_s()


def begins_immediately(client: SyncPrefectClient, flow_run: FlowRun) -> bool:
    """Return whether the flow run can begin immediately: not where it may have to wait for a machine, as in Kubernetes."""
    pool = flow_run.work_pool_name
    return pool is None or client.read_work_pool(pool).type in WAIT_FOR_NO_MACHINE


def _newest_heartbeat(client: SyncPrefectClient, flow_run_id: UUID) -> ReceivedEvent | None:
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
