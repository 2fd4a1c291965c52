"""Automations of deployments: evaluate every new best checkpoint; and how any automation is registered."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect.automations import Automation, AutomationCore, EventTrigger, Posture, RunDeployment
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.actions import ActionTypes
from prefect_torch.flows.monitoring.events.observer import COMMITTED
from prefect_torch.tasks.prefect_api.deployments import read_deployment

from .triggers import of_deployment


def evaluate_new_best(
    deployment: str | UUID,
    *,
    parameter: str = "checkpoint",
    parameters: Mapping[str, Any] | None = None,
    trained_by: str | UUID | None = None,
    run: str | None = None,
    storage: str | None = None,
) -> Automation:
    """Make Prefect run `deployment` for every checkpoint that is better than all previous ones of its run.

    Creates or updates one automation, "Evaluate new best by <deployment>", whose name includes its conditions. The score is
    that of the training's own `CheckpointConfig`; without a score, each newer checkpoint is better.

    Args:
        deployment: The deployment to run, "flow/deployment" or its id.
        parameter: The parameter that receives the checkpoint's path or URL.
        parameters: The other parameters; strings may be templates such as "{{ event.resource['run'] }}".
        trained_by: Only checkpoints of this deployment's trainings, "flow/deployment" or its id.
        run: Only checkpoints of this run, or with a "*" at the end of all runs whose names begin so.
        storage: Only checkpoints in this storage: its absolute path or URL, or the beginning of one and a "*".

    Raises:
        ObjectNotFound: If there is no such deployment.

    """
    with get_client(sync_client=True) as client:
        evaluator = read_deployment(client, deployment)
        trained = None if trained_by is None else read_deployment(client, trained_by)
    labels = {"run": run, "storage": storage}
    of = [it for it in (None if trained is None else name_of(trained), run, storage) if it is not None]
    automation, _ = create_or_update(
        AutomationCore(
            name=" of ".join([f"Evaluate new best by {name_of(evaluator)}", *of]),
            description=f"Runs {name_of(evaluator)} with each new best checkpoint{''.join(f' of {it}' for it in of)}.",
            trigger=EventTrigger(
                posture=Posture.Reactive,
                expect={COMMITTED},
                match={"is_best": "true", **{label: wanted for label, wanted in labels.items() if wanted is not None}},
                match_related={} if trained is None else of_deployment(trained.id),
            ),
            actions=to_run(evaluator.id, {**(parameters or {}), parameter: "{{ event.resource['checkpoint'] }}"}),
        )
    )
    return automation


def create_or_update(automation: AutomationCore) -> tuple[Automation, bool]:
    """Return the automation, and whether it replaces one: an unchanged one stays, since a new one has seen no event yet."""
    with get_client(sync_client=True) as client:
        known = client.read_automations_by_name(automation.name)
        if known:  # somebody may have paused it
            automation.enabled = known[0].enabled
        if known and _content(known[0]) == _content(automation):
            return Automation(id=known[0].id, **automation.model_dump()), False
        if known:
            # The client sends only fields that were set, and the server requires all.
            client.update_automation(known[0].id, AutomationCore(**automation.model_dump(exclude={"owner_resource"})))
        automation_id = known[0].id if known else client.create_automation(automation)
    return Automation(id=automation_id, **automation.model_dump()), bool(known)


def _content(automation: AutomationCore) -> Any:
    """Return what an automation does, without the ids of its parts."""
    return _without_ids(automation.model_dump(mode="json", include={"description", "trigger", "actions"}))


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_ids(item) for name, item in value.items() if name != "id"}
    return sorted(map(_without_ids, value), key=repr) if isinstance(value, list) else value


def to_run(deployment_id: UUID, parameters: dict[str, Any]) -> list[ActionTypes]:
    """Return the actions of an automation that runs a deployment with these parameters."""
    return [RunDeployment(source="selected", deployment_id=deployment_id, parameters=parameters, job_variables=None)]


def name_of(deployment: DeploymentResponse) -> str:
    """Return "flow/deployment"."""
    with get_client(sync_client=True) as client:
        return f"{client.read_flow(deployment.flow_id).name}/{deployment.name}"
