"""The task runs of ranks that a killed flow has left running in Prefect's API."""

import re
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterName,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Crashed
from prefect_torch.ckpt.runs.attempts.attempt import Attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.flows.prefect_api.paging import read_pages
from prefect_torch.tasks.liveness import impatient_client
from prefect_torch.tasks.run_logs import get_run_logger

_OF_RANKS = re.compile(r"rank-\d+|node-\d+: ranks .*")  # a run's name may contain "rank", and is in its task run's name
_OPEN = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]


def end_left_task_runs(previous: Attempt, owner: Owner) -> None:
    """End the task runs of ranks that the killed leader of an attempt could not end; no effect while the API is unavailable.

    Args:
        previous: The attempt, whose leader is known to be gone, unless it is this process.
        owner: This process.

    """
    left = previous.owner
    if left.flow_run_id is None or (left.host, left.pid, left.started) == (owner.host, owner.pid, owner.started):
        return
    try:
        with impatient_client() as client:
            _end(client, UUID(left.flow_run_id), f"the process {left.pid} on {left.machine} that led attempt {previous.number}")
    except (httpx.HTTPError, PrefectHTTPStatusError) as exc:
        get_run_logger().warning("task runs that flow run %s has left running could not be ended: %s", left.flow_run_id, exc)


def _end(client: SyncPrefectClient, flow_run_id: UUID, leader: str) -> None:
    open_ones = read_pages(
        client.read_task_runs,
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])),
        task_run_filter=TaskRunFilter(
            name=TaskRunFilterName(like_="rank"),
            state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_OPEN), name=None),  # no default in the oldest prefect
        ),
    )
    left = [task_run.id for task_run in open_ones if _OF_RANKS.fullmatch(task_run.name)]
    for task_run_id in left:
        client.set_task_run_state(task_run_id, Crashed(message=f"{leader} was killed, and its ranks with it"), force=True)
