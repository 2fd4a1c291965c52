"""A container's flow run from its start to its end; SIGTERM waits for the last checkpoint as long as the container allows."""

import asyncio
import os
import signal
from typing import Any
from uuid import UUID

import anyio
from prefect.cli.flow_run import execute
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort, Pause
from prefect.runner._process_manager import ProcessManager
from prefect.states import AwaitingRetry, Crashed
from prefect.utilities.engine import propose_state_sync

BEHAVIOR = "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"
_POLL_S = 0.2


def execute_patiently(flow_run_id: UUID) -> int:
    """Execute a flow run as `prefect flow-run execute` does; on SIGTERM, let it end by itself; return the exit code.

    Prefect kills the flow 30 s after SIGTERM, or at once where its engine is slow to answer. Before that it lets the flow run
    be scheduled elsewhere: a second process would fence the first, which then cannot commit its last checkpoint. Here the flow
    run is handed on when its process has ended, and what bounds its time is the grace of the container alone.

    What PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR says holds: "reschedule" (also when nothing is said): the flow run is awaited
    elsewhere; "relinquish": it stays Running, and the exit code 1 has Kubernetes start another pod for it; "crash".
    """
    behavior = os.environ.get(BEHAVIOR, "").lower()
    # Of the three, the one that proposes no state: not before the process has ended.
    os.environ[BEHAVIOR] = "relinquish"
    terminated = _end_by_themselves()
    try:
        asyncio.run(execute(flow_run_id))
    except SystemExit as exc:
        exit_code = exc.code if isinstance(exc.code, int) else 1
    else:
        exit_code = 0
    if behavior == "relinquish" or flow_run_id not in terminated:
        return exit_code
    _hand_on(flow_run_id, Crashed(message="Ended by SIGTERM.") if behavior == "crash" else AwaitingRetry())
    return 0


def _end_by_themselves() -> set[UUID]:
    """Have Prefect kill no process that may yet end by itself; return the flow runs that were told to end, which grows."""
    terminated = set[UUID]()

    async def end_by_itself(
        manager: ProcessManager, flow_run_id: UUID, grace_seconds: float = 30, *, force: bool = False
    ) -> None:
        del grace_seconds, force  # they are for a supervisor that has promised the flow run to another already
        terminated.add(flow_run_id)
        handle = manager.get(flow_run_id)
        if handle is not None and handle.is_alive():
            handle.graceful_kill()
            while handle.is_alive():  # noqa: ASYNC110 - of a process there is no event
                await anyio.sleep(_POLL_S)

    setattr(ProcessManager, "kill", end_by_itself)  # noqa: B010 - a method, which type checkers let nobody assign
    return terminated


def _hand_on(flow_run_id: UUID, state: State[Any]) -> None:
    """Propose `state` for a flow run unless it has ended or is being cancelled; Crashed, as its engine may say, is no end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with get_client(sync_client=True) as client:
        left = client.read_flow_run(flow_run_id).state
        if left is not None and (left.is_cancelling() or (left.is_final() and not left.is_crashed())):
            return
        try:
            propose_state_sync(client, state, flow_run_id=flow_run_id)
        except (Abort, Pause):  # the server knows better
            return
