"""The flow that runs a crashed training again, after checking its state, and counts the restarts."""

import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from prefect import flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.events.filters import EventFilter
from prefect.runtime import flow_run as this_flow_run
from prefect.states import Crashed
from prefect_torch.flows import FailureConfig
from prefect_torch.flows.monitoring.events.signs_of_life import last_sign
from prefect_torch.flows.monitoring.pages.left_pages import end_left_pages
from prefect_torch.flows.monitoring.pages.live_artifact import LiveArtifact
from prefect_torch.flows.monitoring.restarted import FIRST_NAME_LABEL, RESTART_TAG, RESTARTS_LABEL, RESUMES_LABEL
from prefect_torch.flows.monitoring.text import page_url, plain_text
from prefect_torch.flows.run_names import name_run
from prefect_torch.tasks.options.config import UNLIMITED
from prefect_torch.tasks.training.left_task_runs import end_below
from pydantic import Field

if TYPE_CHECKING:
    from prefect.client.schemas import OrchestrationResult

FLOW_RUN = "prefect.flow-run."
_KUBERNETES_POD = "prefect.kubernetes.pod."  # events of Prefect's Kubernetes worker about a flow run's pod
_OOM_KILLED = "OOMKilled"
_OUT_OF_MEMORY = "prefect-torch.out-of-memory"
_POLL_S = 10.0
_TRAININGS = ("train", "sweep")  # the names of the flows


@flow(
    name="resume",
    description="Runs a crashed or silent flow run again, or one that never began, on the same run, unless it is alive or has "
    "been restarted too often. An automation starts this flow.",
    retries=3,
    retry_delay_seconds=10,
    persist_result=False,
)
def resume(
    flow_run: Annotated[str, Field(description="The flow run: its id, or its resource id in an event.")],
    max_restarts: Annotated[int, Field(ge=0, description="The largest number of restarts of a training.")] = 3,
    silent_s: Annotated[
        float, Field(gt=0, description="The seconds without a heartbeat after which it counts as dead.")
    ] = 540.0,
    confirm_s: Annotated[
        float,
        Field(ge=0, description="The seconds to wait for a heartbeat, since the server may have been away."),
    ] = 200.0,
    pending_s: Annotated[
        float | None, Field(gt=0, description="The seconds after which it counts as dead if it is still Pending.")
    ] = None,
) -> str | None:
    """Run a crashed flow run's deployment again, with its parameters and its run's name; return the new flow run's id.

    Does nothing, and returns None, if the flow run is in any other final state, if a heartbeat came within `silent_s` or comes
    within `confirm_s` from now on, if it begins within that time, if it is being cancelled, or if it is already the
    `max_restarts`-th restart; also if it is a training whose container Kubernetes killed for lack of memory, unless its
    `FailureConfig.max_out_of_memory_failures` allows it. Two calls for the same crash start one new flow run.

    Args:
        flow_run: The flow run's id, or "prefect.flow-run.<id>".
        max_restarts: The number of restarts of a training, counted over the whole chain of flow runs.
        silent_s: The seconds without a heartbeat after which a Running flow run is set to Crashed.
        confirm_s: The seconds for which it must stay silent from now on. A server that was away for longer than `silent_s` has
            no heartbeat of any flow run, and the live ones send their next one soon after it is back.
        pending_s: The seconds after which a flow run that is still Pending is set to Crashed, since the worker that took it
            vanished before it began. If None, it may wait for as long as it takes.

    """
    flow_run_id = UUID(flow_run.removeprefix(FLOW_RUN))
    with get_client(sync_client=True) as client:
        crashed = client.read_flow_run(flow_run_id)
        if (own_id := this_flow_run.id) is not None:  # an automation cannot give a name
            client.update_flow_run(UUID(own_id), name=f"resume-{crashed.name}")
        limits_s = {StateType.RUNNING: silent_s, StateType.PENDING: pending_s}
        reason = _why_not(client, crashed, max_restarts, limits_s, confirm_s)
        if reason is not None:
            get_run_logger().info("flow run %r is not run again: %s", crashed.name, reason)
            return None
        crashed = client.read_flow_run(flow_run_id)  # as it has crashed
        again = _run_again(client, crashed)
        _show_restart(client, crashed, again, max_restarts)
    restarts = again.labels[RESTARTS_LABEL]
    get_run_logger().info("flow run %r crashed; restart %s of %d is %r", crashed.name, restarts, max_restarts, again.name)
    return str(again.id)


def _why_not(
    client: SyncPrefectClient,
    crashed: FlowRun,
    max_restarts: int,
    limits_s: Mapping[StateType, float | None],
    confirm_s: float,
) -> str | None:
    if crashed.deployment_id is None:
        return "it has no deployment"
    state = crashed.state
    if state is not None and (limit_s := limits_s.get(state.type)) is not None:
        state = _declare_dead(client, crashed, limit_s, confirm_s)
    if state is None or not state.is_crashed():
        return "it is alive" if state is None else f"it is {state.name}"
    crashed = client.read_flow_run(crashed.id)  # it may have begun, and crashed, while it was waited for
    led = end_below(client, crashed.id, "The process of its flow run is dead.")
    end_left_pages(client, led, "The process of its flow run is dead.")
    if _num_restarts(crashed) >= max_restarts:
        return f"it is restart {_num_restarts(crashed)}, and max_restarts={max_restarts}"
    if (budget := _out_of_memory_budget(crashed)) is not None and _num_out_of_memory(client, crashed) > budget:
        return f"its container ran out of memory, and max_out_of_memory_failures={budget}"
    return None


def _out_of_memory_budget(crashed: FlowRun) -> int | None:
    """Return how often a training may run out of memory; None if unlimited, and for a user's own flow."""
    if "train_fn" not in crashed.parameters:
        return None
    try:
        failure = FailureConfig.model_validate(crashed.parameters.get("failure") or {})
    except ValueError:  # it is another flow's parameter
        return None
    return None if failure.max_out_of_memory_failures == UNLIMITED else failure.max_out_of_memory_failures


def _num_out_of_memory(client: SyncPrefectClient, crashed: FlowRun) -> int:
    """Return how often Kubernetes has killed a flow run and its predecessors for lack of memory.

    The kernel's own count is lost with the container. Other workers report exit code 137, which any SIGKILL causes.
    """
    pod_events = EventFilter.model_validate(
        {
            "event": {"prefix": [_KUBERNETES_POD]},
            "related": {"id": [f"{FLOW_RUN}{crashed.id}"]},
            "occurred": {"since": _now() - timedelta(days=7), "until": _now() + timedelta(days=1)},
            "order": "DESC",
        }
    )
    pods = [dict(event.resource.root) for event in client.read_events(pod_events, limit=50).events]
    message = "" if crashed.state is None else crashed.state.message or ""
    is_killed = _OOM_KILLED in message or any(_OOM_KILLED in pod.values() for pod in pods)
    return int(str(crashed.labels.get(_OUT_OF_MEMORY, 0))) + is_killed


def _declare_dead(client: SyncPrefectClient, silent: FlowRun, silent_s: float, confirm_s: float) -> State[Any] | None:
    """Return the new state of a silent flow run, Crashed unless it has another one meanwhile; None if it is alive."""
    newest = last_sign(client, silent)
    if newest is None:  # without any heartbeat, silence means nothing
        return None
    # By another machine's clock, its age says little: it counts as dead only when it has been silent for long by this one, too.
    until_s = time.monotonic() + max(confirm_s, min(silent_s - newest.age_s, silent_s))
    state = silent.state
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, _POLL_S))
        if (found := last_sign(client, silent)) is not None and found.id != newest.id:
            return None
        state = client.read_flow_run(silent.id).state
        assert silent.state is not None
        if state is None or state.id != silent.state.id:  # it began, was cancelled, or was scheduled again, meanwhile
            return state
    assert state is not None
    # Not forced: a flow run that has ended meanwhile keeps its state.
    message = (
        f"Pending for {silent_s:g} s: the process that was to begin it is dead, or cut off."
        if state.is_pending()
        else f"No heartbeat for {silent_s:g} s: its process is dead, or cut off."
    )
    answer: OrchestrationResult[Any] = client.set_flow_run_state(silent.id, Crashed(message=message))
    return answer.state if answer.status == SetStateStatus.ACCEPT else client.read_flow_run(silent.id).state


def _run_again(client: SyncPrefectClient, crashed: FlowRun) -> FlowRun:
    assert crashed.deployment_id is not None
    number = _num_restarts(crashed) + 1
    first_name = str(crashed.labels.get(FIRST_NAME_LABEL, crashed.name))
    return client.create_flow_run_from_deployment(
        crashed.deployment_id,
        parameters=_same_run(client, crashed),
        name=f"{first_name}-restart-{number}",
        tags=[*dict.fromkeys([*crashed.tags, RESTART_TAG])],
        # Both triggers may fire for one crash. A flow run that was retried since, as in Prefect's UI, may crash once more.
        idempotency_key=f"prefect-torch-resume-{crashed.id}-{crashed.run_count}",
        work_queue_name=crashed.work_queue_name,
        job_variables=crashed.job_variables,
        labels={
            **crashed.labels,
            RESTARTS_LABEL: number,
            _OUT_OF_MEMORY: _num_out_of_memory(client, crashed),
            FIRST_NAME_LABEL: first_name,
            RESUMES_LABEL: str(crashed.id),
        },
    )


def _show_restart(client: SyncPrefectClient, crashed: FlowRun, again: FlowRun, max_restarts: int) -> None:
    """Link from the crashed flow run to its restart; the restart links back in its log and on its summary page."""
    number, link = again.labels[RESTARTS_LABEL], f"[{plain_text(again.name)}]({page_url('flow-run', again.id)})"
    about = "An automation ran this crashed flow run again."
    shown = LiveArtifact(f"restart-of-{crashed.id}", "markdown", may_exist=True)  # of the other trigger's resumer
    shown.show(client, crashed.id, f"Restart {number} of {max_restarts}: {link}", about)


def _num_restarts(flow_run: FlowRun) -> int:
    return int(str(flow_run.labels.get(RESTARTS_LABEL, 0)))


def _same_run(client: SyncPrefectClient, crashed: FlowRun) -> dict[str, Any]:
    """Return the parameters of `crashed`, with the name of its run if it is a training.

    A user's own flow may have parameters of these names, too, and the trainings that it calls have names of their own.
    """
    parameters = dict(crashed.parameters)
    if "train_fn" not in parameters or client.read_flow(crashed.flow_id).name not in _TRAININGS:
        return parameters
    run = dict(parameters.get("run") or {})
    run["name"] = run.get("name") or name_run(client, crashed)
    return {**parameters, "run": run}


def _now() -> datetime:
    return datetime.now(timezone.utc)
