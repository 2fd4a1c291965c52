"""Serving while Prefect's API is away or refuses, and after it: Prefect's own runner ends in minutes, with its flow runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from uuid import UUID

import httpx
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
from prefect.utilities.services import critical_service_loop
from prefect_torch.flows.prefect_api.outage import is_key_refused, is_outage
from prefect_torch.flows.prefect_api.paging import read_pages

from .resuming import last_sign

# Where the runner finds the loop that polls for due flow runs, and the one for those that are cancelled or suspended.
_DUE = "prefect.runner._scheduled_run_poller.critical_service_loop"
_CANCELLED = "prefect._internal.observers.critical_service_loop"
_AWAY = "Prefect's API is away (%r): flow runs go on, and due ones start when it is back"
_REFUSED = (
    "Prefect's API refuses the key of this process (%r): flow runs go on, and due ones wait. Unless it is to be valid again, "
    "start another `serve` with a new key, and end this one when its flow runs have ended"
)
_logger = logging.getLogger(__name__)


@contextmanager
def runner_outlasts_outages(after_outage: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Let the runners of the body poll on while Prefect's API is away or refuses the key; call `after_outage` afterwards.

    Otherwise, a refusal, or three polls in a row without an answer, end the polling for cancellations and suspensions, and the
    runner. The runner ends all flow runs that it has started, and no automation restarts them: nothing runs the restarts.
    """
    _replace({_DUE: partial(_poll_patiently, after_outage), _CANCELLED: partial(_poll_patiently, lambda: None)})
    try:
        yield
    finally:
        _replace(dict.fromkeys((_DUE, _CANCELLED), critical_service_loop))


def start_resumers(actions: Mapping[UUID, RunDeployment]) -> None:
    """Start a resumer for each flow run that will soon have had no heartbeat, or have been Pending, for too long.

    The deployments' automations do so, too, but while a server is away for longer than it takes to notice a death, as when it
    shares a machine with the trainings and that fails, it forgets that it awaits a heartbeat.

    Args:
        actions: By each deployment's id, what its automation does: it starts the resumer with these parameters.

    """
    for deployment_id, action in actions.items():
        with get_client(sync_client=True) as client:
            begun = FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING])
            flow_runs = read_pages(
                client.read_flow_runs,
                deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id])),
                flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=begun)),
            )
            for flow_run in flow_runs:
                _start_resumer(client, flow_run, action)


def _start_resumer(client: SyncPrefectClient, flow_run: FlowRun, action: RunDeployment) -> None:
    newest, parameters = last_sign(client, flow_run), action.parameters or {}
    is_pending = flow_run.state is not None and flow_run.state.is_pending()
    limit_s = parameters["pending_s" if is_pending else "silent_s"]
    if newest is None or newest.age_s + parameters["confirm_s"] < limit_s:
        return
    silence = "has been Pending" if is_pending else "has had no heartbeat"
    _logger.warning("flow run %r %s for %.0f s", flow_run.name, silence, newest.age_s)
    assert action.deployment_id is not None
    client.create_flow_run_from_deployment(
        action.deployment_id,
        parameters={**parameters, "flow_run": str(flow_run.id)},
        idempotency_key=f"prefect-torch-silent-{newest.id}",
    )


def _replace(loops: Mapping[str, Callable[..., Awaitable[None]]]) -> None:
    for place, loop in loops.items():
        module, _, name = place.rpartition(".")
        setattr(import_module(module), name, loop)


async def _poll_patiently(
    after_outage: Callable[[], object], workload: Callable[[], Awaitable[None]], interval: float, **options: Any
) -> None:
    """Run Prefect's loop with a workload that passes over an outage or a refusal; its beginning and its end are logged."""
    lost: str | None = None

    async def poll() -> None:
        nonlocal lost
        try:
            await workload()
            if lost is not None:
                await asyncio.to_thread(after_outage)
        except httpx.HTTPError as exc:
            if not is_outage(exc) and not is_key_refused(exc):
                raise
            said = _REFUSED if is_key_refused(exc) else _AWAY
            if lost != said:
                _logger.warning(said, exc)
            lost = said
        else:
            if lost is not None:
                _logger.warning("Prefect's API is back")
            lost = None

    await critical_service_loop(poll, interval, **options)
