"""Which failures are worth another attempt, counted in storage so that the count outlives the process."""

from collections import Counter

from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.attempts import FailureKind, read_outcomes

from .errors import RankFailedError
from .job import TrainJob

UNLIMITED = -1
_MOST_RETRIES = 1_000_000  # what Prefect is told for "without end"


def failure_kind(error: BaseException) -> FailureKind:
    """Return which budget `error` counts against; "final" has none."""
    failed = error if isinstance(error, RankFailedError) else error.__cause__
    if isinstance(failed, RankFailedError):
        if failed.kind in ("user", "final"):
            return "user" if failed.kind == "user" else "final"
        return "infrastructure"
    return "infrastructure" if isinstance(error, StorageError) else "final"


def may_restart(store: CheckpointStore, job: TrainJob, flow_run_id: str | None, kind: FailureKind) -> bool:
    """Say whether the budget for the failure that was just recorded is not used up."""
    if kind not in ("user", "infrastructure"):
        return False
    budget = job.max_failures if kind == "user" else job.max_infrastructure_failures
    if budget == UNLIMITED:
        return True
    failures = Counter(outcome.kind for outcome in read_outcomes(store) if outcome.flow_run_id == flow_run_id)
    return failures[kind] <= budget


def max_retries(job: TrainJob) -> int:
    """Return how often Prefect may retry the task at most; `may_restart` decides each time."""
    budgets = (job.max_failures, job.max_infrastructure_failures)
    return _MOST_RETRIES if UNLIMITED in budgets else sum(budgets)
