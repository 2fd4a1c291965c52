"""Links to the logs of ranks: the pages of their task runs in Prefect's UI."""

import re
from collections.abc import Mapping, Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterName,
)
from prefect.client.schemas.objects import TaskRun
from prefect.client.schemas.sorting import TaskRunSort
from prefect_torch.flows.monitoring.text import page_url

from .attempt_log import AttemptLog

_LIMIT = 200  # the most that Prefect's server returns per request
_NAME = "rank"
_OF_RANKS = re.compile(r"rank-(\d+)|node-\d+: ranks (\d+)-(\d+)")


class RankLogs:
    """The task runs of one flow run's ranks; one request per update while some are missing."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, str]] = {}

    def update(self, client: SyncPrefectClient, flow_run_id: UUID, logs: Sequence[AttemptLog]) -> None:
        """Read the task runs of the newest attempt's ranks unless they are known.

        Args:
            client: A client of Prefect's API.
            flow_run_id: The flow run of the ranks.
            logs: All attempts of the run, oldest first.

        """
        of_flow_run = [log for log in logs if log.attempt.owner.flow_run_id == str(flow_run_id)]
        if not of_flow_run or self._is_known(of_flow_run[-1]):
            return
        task_runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])),
            task_run_filter=TaskRunFilter(name=TaskRunFilterName(like_=_NAME)),
            sort=TaskRunSort.EXPECTED_START_TIME_DESC,
            limit=_LIMIT,
        )
        self._found.update(ranks_by_attempt(task_runs, {log.number: log.claimed_s for log in of_flow_run}))

    def urls(self) -> Mapping[int, Mapping[int, str]]:
        """Return the URLs of the pages found so far, by attempt and rank."""
        return self._found

    def _is_known(self, log: AttemptLog) -> bool:
        return len(self._found.get(log.number, ())) >= min(log.attempt.world_size, _LIMIT)


def ranks_by_attempt(task_runs: Sequence[TaskRun], claims: Mapping[int, float]) -> dict[int, dict[int, str]]:
    """Return the URL of each rank's task run by attempt and rank: a rank belongs to the newest attempt claimed before it.

    Args:
        task_runs: Task runs of one flow run, in any order.
        claims: The times of its attempts' claims (seconds since the epoch, by the clock that stamps task runs).

    """
    found: dict[int, dict[int, str]] = {}
    for task_run in task_runs:
        submitted, ranks = task_run.expected_start_time, _ranks_of(task_run.name)
        if submitted is None or not ranks:
            continue
        before = [number for number, claimed_s in claims.items() if claimed_s <= submitted.timestamp()]
        if before:
            found.setdefault(max(before), {}).update(dict.fromkeys(ranks, page_url("task-run", task_run.id)))
    return {number: dict(sorted(ranks.items())) for number, ranks in sorted(found.items())}


def _ranks_of(name: str) -> range:
    """Return the ranks of a task run of this name."""
    found = _OF_RANKS.fullmatch(name)
    if found is None:
        return range(0)
    one, first, last = found.groups()
    return range(int(one), int(one) + 1) if one is not None else range(int(first), int(last) + 1)
