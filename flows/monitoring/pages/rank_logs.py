"""Where the logs of a training's ranks are: the pages of their task runs in Prefect's UI."""

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
from prefect.utilities.urls import url_for

from .attempt_log import AttemptLog

_MOST = 200  # what Prefect's server gives at once
_NAME = "rank-"


class RankLogs:
    """Finds the task runs of one flow run's ranks; a request each time that some are still missing."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, str]] = {}

    def look(self, client: SyncPrefectClient, flow_run_id: UUID, logs: Sequence[AttemptLog]) -> None:
        """Ask Prefect for the ranks of the newest attempt, unless they are known.

        Args:
            client: Whom to ask.
            flow_run_id: Whose ranks.
            logs: All attempts of the run, oldest first.

        """
        of_flow_run = [log for log in logs if log.attempt.owner.flow_run_id == str(flow_run_id)]
        if not of_flow_run or self._is_known(of_flow_run[-1]):
            return
        task_runs = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])),
            task_run_filter=TaskRunFilter(name=TaskRunFilterName(like_=_NAME)),
            sort=TaskRunSort.EXPECTED_START_TIME_DESC,
            limit=_MOST,
        )
        self._found.update(ranks_by_attempt(task_runs, {log.number: log.claimed_s for log in of_flow_run}))

    def urls(self) -> Mapping[int, Mapping[int, str]]:
        """Return the pages that were found, by attempt and rank."""
        return self._found

    def _is_known(self, log: AttemptLog) -> bool:
        return len(self._found.get(log.number, ())) >= min(log.attempt.world_size, _MOST)


def ranks_by_attempt(task_runs: Sequence[TaskRun], claims: Mapping[int, float]) -> dict[int, dict[int, str]]:
    """Return the page of each rank's task run by attempt and rank: an attempt's ranks are submitted after its claim.

    Args:
        task_runs: Task runs of one flow run, in any order.
        claims: When its attempts were claimed (seconds since the epoch, the clock that task runs are submitted by).

    """
    found: dict[int, dict[int, str]] = {}
    for task_run in task_runs:
        rank = task_run.name.removeprefix(_NAME)
        submitted = task_run.expected_start_time
        if submitted is None or not rank.isdecimal():
            continue
        before = [number for number, claimed_s in claims.items() if claimed_s <= submitted.timestamp()]
        if before:
            found.setdefault(max(before), {})[int(rank)] = page_of("task-run", task_run.id)
    return {number: dict(sorted(ranks.items())) for number, ranks in sorted(found.items())}


def page_of(kind: str, run_id: UUID) -> str:
    """Return a run's page: at PREFECT_UI_URL, or where that is unknown, on the server that shows the link."""
    return url_for(kind, run_id) or f"/runs/{kind}/{run_id}"
