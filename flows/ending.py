"""What a flow run that is ended from outside says last: up to which step its work is safe."""

from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import Flow
from prefect.logging.loggers import flow_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Crashed
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.attempts import read_outcomes

_ended: dict[str, str] = {}  # by flow run, from its body to its hook in the same process


def note_ending(store: CheckpointStore, flow_run_id: str) -> None:
    """Take note of how the training of a run was ended, while its exception passes through the flow's body.

    A flow run that is being cancelled becomes Cancelled here, with a message; its runner would do so without one.
    """
    told = next((outcome for outcome in reversed(read_outcomes(store)) if outcome.flow_run_id == flow_run_id), None)
    if told is None or told.error is None:
        return
    try:
        is_cancelled = _tell_cancelled(flow_run_id, told.error)
    except httpx.TransportError:  # the API is away, and the end must not wait for it
        is_cancelled = False
    if not is_cancelled:
        _ended[flow_run_id] = told.error


def _tell_cancelled(flow_run_id: str, message: str) -> bool:
    """Say whether the flow run is being cancelled, which it then is, with that message."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(flow_run_id)).state
        if state is None or not state.is_cancelling():
            return False
        client.set_flow_run_state(UUID(flow_run_id), Cancelled(message=message), force=True)
    return True


def tell_ending(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Give a crashed flow run's state the message that `note_ending` took note of."""
    message = _ended.pop(str(flow_run.id), None)
    if message is None:
        return
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Crashed(message=f"{state.message} {message}"), force=True)
    flow_run_logger(flow_run, flow).warning("%s", message)
