"""The task runs and subflow runs that a killed flow has left running in Prefect's API."""

import re
from collections.abc import Callable
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType, TaskRun
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Crashed
from prefect_torch.ckpt.runs.attempts.attempt import Attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.text import printable
from prefect_torch.tasks.prefect_api.flow_run import has_own_process, quick_client
from prefect_torch.tasks.prefect_api.paging import read_pages
from prefect_torch.tasks.run_logs import get_run_logger

_OF_RANKS = re.compile(r"rank-\d+|node-\d+: ranks .*")  # a run's name may contain "rank", and is in its task run's name
_OPEN = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]


def end_left_task_runs(previous: Attempt, owner: Owner, run: str) -> None:
    """End the task runs that the killed leader of an attempt could not end; no effect while the API is unavailable.

    They are those of ranks, of the training, and of its prunes. The leader may be an earlier process of this flow run.

    Args:
        previous: The attempt, whose leader is known to be gone, unless it is this process.
        owner: This process, in the task run that leads the training now.
        run: The name of the run.

    """
    left = previous.owner
    if left.flow_run_id is None or left.is_same_process(owner):
        return
    leader = f"the process {left.pid} on {left.machine} that led attempt {previous.number}"
    context = TaskRunContext.get()
    own_id = None if context is None else context.task_run.id

    def is_left(task_run: TaskRun) -> bool:
        is_of_run = task_run.name in (f"train-{run}", f"prune-{run}") and task_run.id != own_id
        return is_of_run or _OF_RANKS.fullmatch(task_run.name) is not None

    try:
        with quick_client() as client:
            end_task_runs(client, UUID(left.flow_run_id), f"{leader} was killed, and its ranks with it", is_left)
    except (httpx.HTTPError, PrefectHTTPStatusError, ValueError) as exc:  # the last is for an id that is not of Prefect
        get_run_logger().warning(
            "task runs that flow run %s has left running could not be ended: %s", printable(left.flow_run_id), exc
        )


def end_task_runs(
    client: SyncPrefectClient, flow_run_id: UUID, message: str, is_left: Callable[[TaskRun], bool] = lambda _: True
) -> None:
    """Set the task runs of a flow run that are not final, and for which `is_left` is true, to Crashed."""
    open_ones = read_pages(
        client.read_task_runs,
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])),
        task_run_filter=TaskRunFilter(
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_OPEN), name=None),  # no default in the oldest prefect
        ),
    )
    for task_run in list(filter(is_left, open_ones)):
        client.set_task_run_state(task_run.id, Crashed(message=message), force=True)


def end_below(client: SyncPrefectClient, flow_run_id: UUID, message: str) -> list[UUID]:
    """Set all that the dead process of a flow run has left to Crashed: its task runs and subflow runs, and those below them.

    Return the flow run, and the subflow runs that the process led. A subflow run of a deployment, or of a flow that is bound to
    a work pool, has a process of its own, and stays as it is.
    """
    led = [flow_run_id]
    below = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run_id]))
    for subflow_run in list(read_pages(client.read_flow_runs, flow_run_filter=below)):
        if has_own_process(subflow_run):
            continue
        led += end_below(client, subflow_run.id, message)
        if subflow_run.state is None or not subflow_run.state.is_final():
            client.set_flow_run_state(subflow_run.id, Crashed(message=message), force=True)
    end_task_runs(client, flow_run_id, message)
    return led
