"""Which failures are worth another attempt, counted in storage so that the count outlives the process."""

from collections import Counter

import httpx
from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.attempts import FailureKind, list_attempts, read_outcomes

from .errors import RankFailedError
from .job import TrainJob

UNLIMITED = -1
_COUNTS_AS: dict[str, FailureKind] = {"user": "user", "final": "final", "preemption": "preemption"}
_MOST_RETRIES = 1_000_000  # what Prefect is told for "without end"


def failure_kind(error: BaseException) -> FailureKind:
    """Return which budget `error` counts against; "final" has none."""
    failed = error if isinstance(error, RankFailedError) else error.__cause__
    if isinstance(failed, RankFailedError):
        return _COUNTS_AS.get(failed.kind, "infrastructure")
    return "infrastructure" if isinstance(error, (StorageError, httpx.HTTPError)) else "final"  # of Prefect's API, the latter


def may_restart(store: CheckpointStore, job: TrainJob, flow_run_id: str | None, kind: FailureKind) -> bool:
    """Say whether the budget for the failure that was just recorded is not used up."""
    budgets = {
        "user": job.max_failures,
        "infrastructure": job.max_infrastructure_failures,
        "preemption": job.max_preemptions,
    }
    if kind not in budgets:
        return False
    return budgets[kind] == UNLIMITED or count_failures(store, flow_run_id)[kind] <= budgets[kind]


def count_failures(store: CheckpointStore, flow_run_id: str | None) -> Counter[FailureKind | None]:
    """Count the failed attempts of a flow run by kind; one whose process was killed could not say so, and was preempted."""
    kinds: dict[int, FailureKind | None] = {outcome.attempt: outcome.kind for outcome in read_outcomes(store)}
    attempts = (attempt for attempt in list_attempts(store) if attempt.owner.flow_run_id == flow_run_id)
    return Counter(kinds.get(attempt.number, "preemption") for attempt in attempts)


def max_retries(job: TrainJob) -> int:
    """Return how often Prefect may retry the task at most; `may_restart` decides each time."""
    budgets = (job.max_failures, job.max_infrastructure_failures, job.max_preemptions)
    return _MOST_RETRIES if UNLIMITED in budgets else sum(budgets)
