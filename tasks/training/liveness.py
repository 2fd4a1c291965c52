"""Whether a run is alive, by its storage, the machine of its leader and Prefect.

`may_be_led`: an attempt may be under way, or a retry of it. `is_being_trained`: also if it has failed for good.
"""

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus, read_status
from prefect_torch.tasks.prefect_api.flow_run import has_flow_run_ended, has_left_machine, read_state
from prefect_torch.tasks.prefect_api.outage import NO_ANSWER, is_outage
from prefect_torch.tasks.run_logs import get_run_logger


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
        state = None if flow_run_id is None else read_state(flow_run_id)
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
        return flow_run_id is None or not has_flow_run_ended(flow_run_id)
    if flow_run_id is None or outcome is None or outcome.ending not in ("failed", "preempted") or outcome.kind == "final":
        return False
    if not status.is_process_gone:
        return has_flow_run_ended(flow_run_id) is False
    if outcome.ending == "failed":  # a retry in that process has died with it
        return False
    state = read_state(flow_run_id)
    return state is not None and has_left_machine(state)
