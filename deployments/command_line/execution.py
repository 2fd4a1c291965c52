"""The flow run of a container; SIGTERM leaves it all of the container's grace for a last checkpoint, a cancellation its own."""

import asyncio
import os
import signal
from typing import Any
from uuid import UUID

import anyio
from prefect.cli.flow_run import execute
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import Abort, Pause
from prefect.runner._process_manager import ProcessManager
from prefect.states import AwaitingRetry, Crashed
from prefect.utilities.engine import propose_state_sync
from prefect_torch.tasks import FailureConfig
from prefect_torch.tasks.prefect_api.flow_run import let_workers_continue
from prefect_torch.tasks.prefect_api.outage import repeat_without_database

from .flow_run_errors import flow_run_errors_explained

BEHAVIOR = "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"
_POLL_S = 0.2
_LONGEST_END_S = 600.0  # after its grace, before the process of a cancelled flow run is killed
_LONGEST_GRACE_S = 3600.0  # of the trainings of a user's own flow, which may have any


def execute_gracefully(flow_run_id: UUID) -> int:
    """Execute a flow run as `prefect flow-run execute` does; on SIGTERM, wait until it exits; return the exit code.

    Prefect kills the flow 30 s after SIGTERM, or immediately if its engine is slow to answer. Before that it lets the flow run
    be scheduled elsewhere: a second process would fence the first, which then cannot commit its last checkpoint. Here the flow
    run is rescheduled after its process has exited, and only the container's grace period limits its time. After a cancellation
    in Prefect, its server sets the flow run to Cancelled within 300 s (a setting of it), and lets the worker end the container.
    Where no worker does, a process that has not exited ten minutes after its grace (`FailureConfig.grace_s`) is killed; one of
    a user's own flow, whose trainings may have any grace, after 70 minutes.

    PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR is respected: "reschedule" (the default) makes the flow run AwaitingRetry;
    "relinquish" leaves it Running, and the exit code 1 makes Kubernetes start another pod for it; "crash" makes it Crashed. One
    that is suspended stays so, and the exit code is 0.

    Raises:
        FileNotFoundError: If the API does not know the flow run.
        ConnectionError: If the API does not answer, or for a minute has no database.

    """
    with repeat_without_database():
        return _execute(flow_run_id)


def _execute(flow_run_id: UUID) -> int:
    flow_run = _look_up(flow_run_id)
    behavior = os.environ.get(BEHAVIOR, "").lower()
    # The one of the three that proposes no state: a state may be proposed only after the process has exited.
    os.environ[BEHAVIOR] = "relinquish"
    terminated = _wait_instead_of_kill(_grace_s(flow_run) + _LONGEST_END_S)
    try:
        asyncio.run(execute(flow_run_id))
    except SystemExit as exc:
        exit_code = exc.code if isinstance(exc.code, int) else 1
    else:
        exit_code = 0
    if flow_run_id not in terminated:
        return exit_code
    if behavior == "relinquish":
        left = _look_up(flow_run_id).state
        return 0 if left is not None and left.is_paused() else exit_code
    _propose(flow_run_id, Crashed(message="Ended by SIGTERM.") if behavior == "crash" else AwaitingRetry())
    return 0


def _look_up(flow_run_id: UUID) -> FlowRun:
    """Return a flow run; raise for one that cannot be read, of which Prefect's command says so in a traceback."""
    with flow_run_errors_explained(flow_run_id), get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id)


def _grace_s(flow_run: FlowRun) -> float:
    """Return how long the ranks of a flow run have for a last checkpoint, by its parameters; an hour in a user's own flow."""
    if flow_run.parameters.keys().isdisjoint(("failure", "train_fn", "eval_fn")):
        return _LONGEST_GRACE_S
    try:
        return FailureConfig.model_validate(flow_run.parameters.get("failure") or {}).grace_s
    except ValueError:  # it is another flow's parameter
        return FailureConfig().grace_s


def _wait_instead_of_kill(longest_s: float) -> set[UUID]:
    """Make Prefect wait for the exit of a process instead of killing it; return the terminated flow runs, a set that grows.

    Args:
        longest_s: How long a flow run that is cancelled has until it is killed, in seconds.

    """
    terminated = set[UUID]()

    async def terminate_and_wait(
        manager: ProcessManager, flow_run_id: UUID, grace_seconds: float = 30, *, force: bool | None = None
    ) -> None:
        del grace_seconds  # for a supervisor that has already rescheduled the flow run
        has_sigterm = force is not None  # only a supervisor that got SIGTERM says whether to kill immediately
        terminated.add(flow_run_id)
        handle = manager.get(flow_run_id)
        if handle is not None and handle.is_alive():
            handle.graceful_kill()
            with anyio.move_on_after(None if has_sigterm else longest_s) as limit:
                while handle.is_alive():  # noqa: ASYNC110 - a process has no event
                    await anyio.sleep(_POLL_S)
            if limit.cancelled_caught:
                handle.hard_kill()

    setattr(ProcessManager, "kill", terminate_and_wait)  # noqa: B010 - type checkers refuse assignments to a method
    return terminated


def _propose(flow_run_id: UUID, state: State[Any]) -> None:
    """Propose `state` for a flow run that is neither suspended, nor being cancelled, nor in a final state but Crashed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with flow_run_errors_explained(flow_run_id), get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(flow_run_id)
        let_workers_continue(client, flow_run)
        left = flow_run.state
        if left is not None and (left.is_paused() or left.is_cancelling() or (left.is_final() and not left.is_crashed())):
            return
        try:
            propose_state_sync(client, state, flow_run_id=flow_run_id)
        except (Abort, Pause):  # the server refuses: its state is newer
            return
