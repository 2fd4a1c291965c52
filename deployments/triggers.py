"""What automations wait for: a crash of a flow run, its silence, or that it does not begin."""

from datetime import timedelta
from uuid import UUID

from prefect.automations import EventTrigger, Posture
from prefect_torch.flows.monitoring.events.heartbeats import HEARTBEAT

_ENDINGS = ("Completed", "Failed", "Cancelled", "Crashed")


def crash_of(deployment_id: UUID) -> EventTrigger:
    """Return the trigger that fires when a flow run of the deployment is set to Crashed."""
    return EventTrigger(
        posture=Posture.Reactive,
        expect={"prefect.flow-run.Crashed"},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=of_deployment(deployment_id),
        for_each={"prefect.resource.id"},
    )


def silence_of(deployment_id: UUID, noticed_s: float) -> EventTrigger:
    """Return the trigger that fires when a flow run of the deployment has had no heartbeat for so long."""
    return EventTrigger(
        posture=Posture.Proactive,
        after={HEARTBEAT},
        expect={HEARTBEAT, *(f"prefect.flow-run.{ending}" for ending in _ENDINGS)},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=of_deployment(deployment_id),
        for_each={"prefect.resource.id"},
        within=timedelta(seconds=noticed_s),
    )


def absence_of(deployment_id: UUID, noticed_s: float) -> EventTrigger:
    """Return the trigger that fires when a worker took a flow run of the deployment, which has not begun since."""
    states = ("Running", "AwaitingConcurrencySlot", "Suspended", *_ENDINGS)  # the resumer looks at the state again
    return EventTrigger(
        posture=Posture.Proactive,
        after={"prefect.flow-run.Pending"},
        expect={f"prefect.flow-run.{state}" for state in states},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=of_deployment(deployment_id),
        for_each={"prefect.resource.id"},
        within=timedelta(seconds=noticed_s),
    )


def of_deployment(deployment_id: UUID) -> dict[str, str | list[str]]:
    """Return what an event about a flow run of the deployment names as related."""
    return {"prefect.resource.role": "deployment", "prefect.resource.id": f"prefect.deployment.{deployment_id}"}
