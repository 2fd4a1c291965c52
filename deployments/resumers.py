"""Resumers of flow runs that are silent where no automation awaits their heartbeats."""

import logging
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.actions import RunDeployment
from prefect_torch.flows.monitoring.events.signs_of_life import last_sign
from prefect_torch.tasks.prefect_api.paging import read_pages

_logger = logging.getLogger(__name__)
# A resumer that has begun may be dead, as when the `serve` that ran it was stopped; beside a living one, another is harmless.
_LEFT_ALONE = (StateType.SCHEDULED, StateType.COMPLETED, StateType.CANCELLING, StateType.CANCELLED)


def start_resumers(deployment_id: UUID, action: RunDeployment, *, also_recent: bool = False) -> None:
    """Start a resumer for each flow run of a deployment that will soon have given no sign of life for too long.

    The deployment's automation does so, too, but while a server is away for longer than it takes to notice a death, as when it
    shares a machine with the trainings and that fails, it forgets that it awaits a heartbeat.

    Args:
        deployment_id: The deployment.
        action: What its automation does: it starts the resumer with these parameters.
        also_recent: Also for flow runs whose last sign is recent, since no automation awaits the next one: each resumer waits
            for that itself, and ends when it comes.

    """
    with get_client(sync_client=True) as client:
        begun = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING])
        flow_runs = read_pages(
            client.read_flow_runs,
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id])),
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=begun)),
        )
        for flow_run in flow_runs:
            _start_resumer(client, flow_run, action, also_recent=also_recent)


def _start_resumer(client: SyncPrefectClient, flow_run: FlowRun, action: RunDeployment, *, also_recent: bool) -> None:
    newest, parameters = last_sign(client, flow_run), action.parameters or {}
    is_pending = flow_run.state is not None and flow_run.state.is_pending()
    limit_s = parameters["pending_s" if is_pending else "silent_s"]
    if newest is None or limit_s is None:
        return
    if newest.age_s + parameters["confirm_s"] >= limit_s:
        silence = "has been Pending" if is_pending else "has had no heartbeat"
        _logger.warning("flow run %r %s for %.0f s", flow_run.name, silence, newest.age_s)
    elif not also_recent:
        return
    key = f"prefect-torch-silent-{newest.id}"
    while (resumer := _resumer_of(client, flow_run, action, key)).state_type not in _LEFT_ALONE:
        key = f"{key}-{resumer.id}"


def _resumer_of(client: SyncPrefectClient, flow_run: FlowRun, action: RunDeployment, key: str) -> FlowRun:
    """Return the resumer that has `key`, in whatever state; it is made if there is none."""
    assert action.deployment_id is not None
    parameters = {**(action.parameters or {}), "flow_run": str(flow_run.id)}
    return client.create_flow_run_from_deployment(action.deployment_id, parameters=parameters, idempotency_key=key)
