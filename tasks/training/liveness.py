"""Whether a run is alive, by its storage, the machine of its leader and Prefect.

`may_be_led`: an attempt may be under way, or a retry of it. `is_being_trained`: also if it has failed for good.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus, read_status
from prefect_torch.tasks.prefect_api.outage import NO_ANSWER, is_outage
from prefect_torch.tasks.prefect_api.settings import without_retries
from prefect_torch.tasks.run_logs import get_run_logger

_LONGEST_REQUEST_S = 5.0


def is_being_trained(store: CheckpointStore) -> bool:
    """Return whether the flow run of the newest attempt is alive: it trains, may start another attempt, or is suspended.

    A flow run on another machine that Prefect does not know, or which it hides from this user, is over once the outcome
    of its newest attempt is recorded.
    """
    status = read_status(store)
    if status is None or status.is_completed:
        return False
    flow_run_id = status.attempt.owner.flow_run_id
    try:
        state = None if flow_run_id is None else _read_state(flow_run_id)
    except NO_ANSWER as exc:
        if is_outage(exc):  # the training goes on meanwhile
            return True
        state = None
        if not status.may_be_alive:
            get_run_logger().warning("Prefect does not tell whether flow run %s goes on: %s", flow_run_id, exc)
    if state is None:
        return status.may_be_alive
    if status.is_process_gone and status.state not in ("suspended", "yielded"):  # after these, another process may have begun
        return has_left_machine(state)
    return not state.is_final()


def may_be_led(status: AttemptStatus) -> bool:
    """Return whether the attempt may be under way, or its flow run may start another one after it.

    Asks Prefect only where the storage and the machine do not show its end.

    Raises:
        httpx.HTTPError, ValueError: If Prefect's API is unavailable; the latter for the page of a proxy.

    """
    flow_run_id, outcome = status.attempt.owner.flow_run_id, status.outcome
    if status.may_be_alive:
        return flow_run_id is None or not has_ended(flow_run_id)
    may_be_retried = outcome is not None and outcome.ending in ("failed", "preempted") and outcome.kind != "final"
    return may_be_retried and not status.is_process_gone and flow_run_id is not None and has_ended(flow_run_id) is False


def has_ended(flow_run_id: str) -> bool | None:
    """Return whether a flow run has ended; None if Prefect does not know it: it belongs to another server and may be alive."""
    state = _read_state(flow_run_id)
    return None if state is None else state.is_final()


def has_left_machine(state: State[Any]) -> bool:
    """Return whether a flow run in that state has no process, but may begin again, as one that is suspended or gives way."""
    return state.is_paused() or state.is_scheduled() or state.is_pending()


def _read_state(flow_run_id: str) -> State[Any] | None:
    try:
        known_id = UUID(flow_run_id)
    except ValueError:  # not of Prefect
        return None
    with get_client(sync_client=True) as client:
        try:
            return client.read_flow_run(known_id).state
        except ObjectNotFound:
            return None


def is_unknown(flow_run_id: str) -> bool:
    """Return whether Prefect answers that it does not know a flow run: it was deleted, or is another server's."""
    try:
        return has_ended(flow_run_id) is None
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
