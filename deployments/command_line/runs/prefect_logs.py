"""The log of a flow run, from Prefect's API."""

import logging
from collections.abc import Iterator
from datetime import timezone
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    LogFilter,
    LogFilterFlowRunId,
    LogFilterTimestamp,
    TaskRunFilter,
    TaskRunFilterId,
)
from prefect.client.schemas.objects import Log
from prefect.client.schemas.sorting import LogSort
from prefect.settings import PREFECT_API_URL
from prefect_torch.deployments.command_line.flow_run_errors import flow_run_errors_explained

_PAGE = 200  # the most that the API lists at once
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
        yield from _lines(client, UUID(flow_run_id), rank)


def _lines(client: SyncPrefectClient, flow_run_id: UUID, rank: int | None) -> Iterator[str]:
    names: dict[UUID, str] = {}
    for page in _pages(client, flow_run_id):
        names |= _task_run_names(client, {it.task_run_id for it in page if it.task_run_id is not None} - names.keys())
        for line in page:
            name = names.get(line.task_run_id, "task run") if line.task_run_id is not None else "flow"
            if rank is None or _is_of(rank, name, line.message):
                at = line.timestamp.astimezone(timezone.utc)
                yield f"{at:%Y-%m-%dT%H:%M:%SZ} {logging.getLevelName(line.level)} {name}: {line.message}"


def _pages(client: SyncPrefectClient, flow_run_id: UUID) -> Iterator[list[Log]]:
    """Yield each line of a flow run once, in order; one request per 200 lines.

    The API sorts by the time alone: pages by an offset could lose one of two lines with the same time, and repeat the other,
    and the database would read all lines before it again for each page.
    """
    since, offset, known = None, 0, set[UUID]()  # the lines with the time `since` that were seen
    while True:
        wanted = LogFilter(
            flow_run_id=LogFilterFlowRunId(any_=[flow_run_id]), timestamp=since and LogFilterTimestamp(after_=since)
        )
        page = client.read_logs(wanted, limit=_PAGE, offset=offset, sort=LogSort.TIMESTAMP_ASC)
        yield [line for line in page if line.id not in known]
        if len(page) < _PAGE:
            return
        is_same = page[-1].timestamp == since
        since, offset = page[-1].timestamp, offset + _PAGE if is_same else 0
        known = {it.id for it in page if it.timestamp == since} | (known if is_same else set())


def _is_of(rank: int, task_run: str, message: str) -> bool:
    """Return whether a line is of a rank: in its own task run, or with its number in that of its machine or training."""
    if task_run.startswith("node-"):
        return message.startswith((f"rank {rank}: ", *(f"{failed}rank {rank} of " for failed in _FAILED)))
    return task_run == f"rank-{rank}" or (task_run.startswith("train-") and message.startswith(f"rank {rank} of attempt "))


def _task_run_names(client: SyncPrefectClient, ids: set[UUID]) -> dict[UUID, str]:
    """Return the names of task runs, at most as many as a page has lines."""
    wanted = TaskRunFilter(id=TaskRunFilterId(any_=list(ids)))
    return {it.id: it.name for it in client.read_task_runs(task_run_filter=wanted, limit=_PAGE)} if ids else {}
