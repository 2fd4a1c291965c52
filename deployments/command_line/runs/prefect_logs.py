"""The log of a flow run, from Prefect's API."""

import logging
from collections.abc import Iterator
from datetime import timezone
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.sorting import LogSort
from prefect.settings import PREFECT_API_URL
from prefect_torch.deployments.command_line.flow_run_errors import flow_run_errors_explained
from prefect_torch.tasks.prefect_api.paging import read_pages

_FAILED = ("Finished in state Failed('", 'Finished in state Failed("')  # the message's repr: KeyError('x') has an apostrophe


def read_lines(flow_run_id: str, rank: int | None) -> Iterator[str]:
    """Yield the lines of a flow run and its task runs, oldest first: time (UTC), level, task run and message.

    Args:
        flow_run_id: The flow run.
        rank: Only the lines of this rank's task runs, and its traceback, which the training logs; None for all lines.

    Raises:
        FileNotFoundError: If no API is set, or it does not know the flow run.
        ConnectionError: If the API does not answer.

    """
    if not PREFECT_API_URL.value():
        raise FileNotFoundError(
            f"the log of flow run {flow_run_id} is in Prefect: set PREFECT_API_URL to the API that ran it, or, "
            "if the flow started a server of its own, to that of `prefect server start` on its machine"
        )
    with flow_run_errors_explained(UUID(flow_run_id)), get_client(sync_client=True) as client:
        client.read_flow_run(UUID(flow_run_id))
        names = _task_run_names(client, flow_run_id)
        yield from _lines(client, flow_run_id, names, rank)


def _lines(client: SyncPrefectClient, flow_run_id: str, names: dict[UUID, str], rank: int | None) -> Iterator[str]:
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[UUID(flow_run_id)]))
    for line in read_pages(client.read_logs, log_filter=wanted, sort=LogSort.TIMESTAMP_ASC):
        name = names.get(line.task_run_id, "task run") if line.task_run_id is not None else "flow"
        if rank is None or _is_of(rank, name, line.message):
            at = line.timestamp.astimezone(timezone.utc)
            yield f"{at:%Y-%m-%dT%H:%M:%SZ} {logging.getLevelName(line.level)} {name}: {line.message}"


def _is_of(rank: int, task_run: str, message: str) -> bool:
    """Return whether a line is of a rank: in its own task run, or with its number in that of its machine or training."""
    if task_run.startswith("node-"):
        return message.startswith((f"rank {rank}: ", *(f"{failed}rank {rank} of " for failed in _FAILED)))
    return task_run == f"rank-{rank}" or (task_run.startswith("train-") and message.startswith(f"rank {rank} of attempt "))


def _task_run_names(client: SyncPrefectClient, flow_run_id: str) -> dict[UUID, str]:
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run_id)]))
    return {it.id: it.name for it in read_pages(client.read_task_runs, flow_run_filter=wanted)}
