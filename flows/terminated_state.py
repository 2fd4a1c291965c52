"""The final state of a terminated flow run: its message says up to which step the work is safe."""

from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelled, Crashed
from prefect_torch.ckpt.runs.attempts import Outcome

_outcomes: dict[str, Outcome] = {}  # by flow run, from the flow's body to its hook in the same process


def record_termination(outcome: Outcome | None) -> None:
    """Record the outcome of a terminated attempt while the exception passes through the flow's body; costs no request."""
    if outcome is not None and outcome.flow_run_id is not None:
        _outcomes[outcome.flow_run_id] = outcome


def set_terminated_state(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Give a crashed flow run's state the message that `record_termination` recorded.

    A cancellation that does not come through Prefect's API, such as a stopped container's, becomes Cancelled here, so that no
    automation runs the flow again.
    """
    outcome = _outcomes.pop(str(flow_run.id), None)
    if outcome is None or outcome.error is None:
        return
    final: State[Any] = Crashed(message=f"{state.message} {outcome.error}")
    if outcome.ending == "cancelled":
        final = Cancelled(message=outcome.error)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, final, force=True)
    flow_run_logger(flow_run, flow).warning("%s", outcome.error)
