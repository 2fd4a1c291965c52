"""What the state of a flow run that is ended from outside says last: up to which step its work is safe."""

from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelled, Crashed
from prefect_torch.ckpt.runs.attempts import Outcome

_ended: dict[str, Outcome] = {}  # by flow run, from its body to its hook in the same process


def note_ending(outcome: Outcome | None) -> None:
    """Take note of how an attempt was ended, while the exception passes through the flow's body; costs no request."""
    if outcome is not None and outcome.flow_run_id is not None:
        _ended[outcome.flow_run_id] = outcome


def tell_ending(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Give a crashed flow run's state the message that `note_ending` took note of.

    One that was cancelled by whoever cannot tell Prefect's engine so (who stops a container) becomes Cancelled, so that no
    automation runs it again.
    """
    outcome = _ended.pop(str(flow_run.id), None)
    if outcome is None or outcome.error is None:
        return
    told: State[Any] = Crashed(message=f"{state.message} {outcome.error}")
    if outcome.ending == "cancelled":
        told = Cancelled(message=outcome.error)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, told, force=True)
    flow_run_logger(flow_run, flow).warning("%s", outcome.error)
