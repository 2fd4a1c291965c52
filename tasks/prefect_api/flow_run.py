"""Prefect's flow runs: their states, those above them in their process, and the current one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound

from .outage import NO_ANSWER
from .settings import without_retries

_LONGEST_REQUEST_S = 5.0


def read_state(flow_run_id: str) -> State[Any] | None:
    """Return the state of a flow run; None if Prefect does not know it: it belongs to another server and may be alive."""
    try:
        known_id = UUID(flow_run_id)
    except ValueError:  # not of Prefect
        return None
    with get_client(sync_client=True) as client:
        try:
            return client.read_flow_run(known_id).state
        except ObjectNotFound:
            return None


def has_flow_run_ended(flow_run_id: str) -> bool | None:
    """Return whether a flow run has ended; None if Prefect does not know it: it belongs to another server and may be alive."""
    state = read_state(flow_run_id)
    return None if state is None else state.is_final()


def has_left_machine(state: State[Any]) -> bool:
    """Return whether a flow run in that state has no process, but may begin again, as one that is suspended or gives way."""
    return state.is_paused() or state.is_scheduled() or state.is_pending()


def let_workers_continue(client: SyncPrefectClient, this: FlowRun) -> None:
    """Let workers be given a flow run whose process ends, also after a retry in it; one request after such a retry, else none.

    Prefect leaves a flow run to the process that has retried it, also when that ends, until the flow run ends.
    """
    policy = this.empirical_policy
    if policy.retry_type == "in_process":
        client.update_flow_run(this.id, empirical_policy=policy.model_copy(update={"retry_type": "reschedule"}))


def is_unknown(flow_run_id: str) -> bool:
    """Return whether Prefect answers that it does not know a flow run: it was deleted, or is another server's."""
    try:
        return has_flow_run_ended(flow_run_id) is None
    except NO_ANSWER:
        return False


@contextmanager
def quick_client() -> Iterator[SyncPrefectClient]:
    """Yield a client of Prefect's API that raises after one request without an answer within seconds, also in a maintenance."""
    settings = {"timeout": _LONGEST_REQUEST_S, "event_hooks": {"response": [_forget_maintenance]}}
    with without_retries(), get_client(httpx_settings=settings, sync_client=True) as client:
        yield client


def _forget_maintenance(response: httpx.Response) -> None:
    """Remove the header with which Prefect Cloud makes the client repeat a request until its maintenance has ended."""
    response.headers.pop("Prefect-Maintenance", None)


def has_own_process(subflow_run: FlowRun) -> bool:
    """Return whether a subflow run has another process than the flow that started it.

    This is one of a deployment, as by `run_deployment`, or one of a flow that is bound to a work pool, as by Prefect's
    decorators `docker` and `kubernetes`: it has no deployment, but a work pool.
    """
    return subflow_run.deployment_id is not None or subflow_run.work_pool_name is not None


def flow_run_above(client: SyncPrefectClient, this: FlowRun) -> FlowRun | None:
    """Return the flow run in whose process `this` was called; None if no flow called it. Costs two requests.

    None, too, if `this` has a process of its own, which keeps running without the flow that started it.
    """
    if this.parent_task_run_id is None or has_own_process(this):
        return None
    above = client.read_task_run(this.parent_task_run_id).flow_run_id
    return None if above is None else client.read_flow_run(above)


def flow_runs_from(client: SyncPrefectClient, this: FlowRun) -> Iterator[FlowRun]:
    """Yield a flow run, then those above it in its process, innermost first; costs two requests for each of them."""
    found: FlowRun | None = this
    while found is not None:
        yield found
        found = flow_run_above(client, found)


def is_being_cancelled(flow_run_id: str) -> bool:
    """Return whether a flow run, or one above it in its process, is being cancelled: a worker cancels the outermost one.

    False if Prefect does not answer a request within seconds.
    """
    with quick_client() as client:
        try:
            this = client.read_flow_run(UUID(flow_run_id))
            return any(is_cancellation(it.state) for it in flow_runs_from(client, this))
        except (*NO_ANSWER, ObjectNotFound):
            return False


def is_cancellation(state: State[Any] | None) -> bool:
    """Return whether a flow run in that state is being cancelled, or has been."""
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def find_end_before_rerun(flow_run_id: str) -> str | None:
    """Return the id of the state in which a flow run ended last before a user ran it again; None if there is none.

    Crashed does not count: a worker or an automation that runs it again continues what was interrupted.
    """
    with get_client(sync_client=True) as client:
        states = client.read_flow_run_states(UUID(flow_run_id))
    ended = [state for state in states if state.type in (StateType.FAILED, StateType.CANCELLED, StateType.COMPLETED)]
    return str(max(ended, key=lambda state: state.timestamp).id) if ended else None


def current_flow_run() -> FlowRun:
    """Return the flow run of this thread as it was when it began."""
    context = FlowRunContext.get()
    assert context is not None, "this is called within a flow run"
    assert context.flow_run is not None
    return context.flow_run


def has_run_before() -> bool:
    """Return whether the current flow run has had another process: Prefect's count leaves out those that were suspended."""
    this = current_flow_run()
    return this.run_count > 1 or bool(this.empirical_policy.pause_keys)
