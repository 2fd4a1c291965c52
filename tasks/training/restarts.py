"""The budgets of restarts: whether a training that failed is started again."""

from collections import Counter
from collections.abc import Iterator, Sequence

from prefect.utilities.math import clamped_poisson_interval
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, FailureKind, list_attempts, read_outcomes
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import read_history
from prefect_torch.ckpt.runs.manifest import attempt_of
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.specs.location import canonical
from prefect_torch.tasks.options.config import UNLIMITED, FailureConfig
from prefect_torch.tasks.prefect_api.flow_run import find_end_before_rerun
from prefect_torch.tasks.rank.errors import RestartsUsedUpError

_MOST_RETRIES = 1_000_000  # for Prefect, which does not support "unlimited"
_DESCRIPTIONS: dict[FailureKind, str] = {
    "user": "failed by exceptions of its function",
    "infrastructure": "lost its processes, its storage or its network",
    "out_of_memory": "ran out of memory",
    "preemption": "was terminated",
    "final": "failed for good",
}


class Restarts:
    """The failures of one flow run's training, against its budgets.

    Failures of this process are counted in memory, since the storage may be what failed; those of the flow run's earlier
    processes are read from storage when an attempt begins.

    Args:
        budgets: How many failures of each kind are allowed.
        flow_run_id: The Prefect flow run, or None outside one.
        is_rerun: Whether the flow run has run before.

    Attributes:
        delay_s: How many seconds to wait before the next attempt.

    """

    def __init__(self, budgets: FailureConfig, flow_run_id: str | None, *, is_rerun: bool = False) -> None:
        self._budgets: dict[FailureKind, tuple[str, int]] = {
            "user": ("max_failures", budgets.max_failures),
            "infrastructure": ("max_infrastructure_failures", budgets.max_infrastructure_failures),
            "out_of_memory": ("max_out_of_memory_failures", budgets.max_out_of_memory_failures),
            "preemption": ("max_preemptions", budgets.max_preemptions),
            "final": ("no restarts for that", 0),
        }
        self.delay_s = 0.0
        self._delays_s = budgets.retry_delay_s
        self._jitter = budgets.retry_jitter_factor
        self._flow_run_id = flow_run_id
        self._is_rerun = is_rerun and flow_run_id is not None
        self._owner: Owner | None = None
        self._here: Counter[FailureKind] = Counter()
        self._earlier: Counter[FailureKind] | None = None

    @property
    def owner(self) -> Owner:
        """The owner of the attempts that this process leads; asks Prefect, once, if the flow run has run before."""
        if self._owner is None:
            budget = find_end_before_rerun(str(self._flow_run_id)) if self._is_rerun else None
            self._owner = Owner.current(self._flow_run_id, budget)
        return self._owner

    @property
    def most_retries(self) -> int:
        """How often Prefect may retry the task at most; `count_failure` decides each time."""
        budgets = [budget for _, budget in self._budgets.values()]
        return _MOST_RETRIES if UNLIMITED in budgets else sum(budgets)

    def count_failure(self, kind: FailureKind) -> bool:
        """Count a failure of this process, and return whether its budget allows another attempt, after `delay_s`."""
        self._here[kind] += 1
        self.delay_s = self._draw_delay_s()
        return not self._is_used_up(kind)

    def describe_last(self, kind: FailureKind) -> str:
        """Return which restart of its budget the last failure of `kind` takes."""
        name, budget = self._budgets[kind]
        used = self._here[kind] + (0 if self._earlier is None else self._earlier[kind])
        return f"restart {used}, {name} is unlimited" if budget == UNLIMITED else f"restart {used} of {budget} ({name})"

    def refuse_if_used_up(self, store: CheckpointStore) -> None:
        """Raise before an attempt if a budget is used up: the process of the last attempt may have died before it could decide.

        Costs nothing unless the flow run has run before; then, once, small reads of the run's attempts and outcomes.

        Raises:
            RestartsUsedUpError: If a budget is used up.

        """
        if self._earlier is not None or not self._is_rerun:
            return
        self._earlier = Counter(_failures_before(store, self.owner))
        for kind, number in self._earlier.items():
            if self._is_used_up(kind):
                name, budget = self._budgets[kind]
                raise RestartsUsedUpError(
                    f"flow run {self._flow_run_id} trained run {store.run!r} and {_DESCRIPTIONS[kind]} {number} times, with "
                    f"{name}{'' if kind == 'final' else f'={budget}'}; run it again, or a new flow run with this name, to go "
                    "on with the run and with new budgets"
                )

    def _draw_delay_s(self) -> float:
        if not self._delays_s:
            return 0.0
        delay_s = self._delays_s[min(sum(self._here.values()), len(self._delays_s)) - 1]
        return clamped_poisson_interval(delay_s, self._jitter) if self._jitter else delay_s

    def _is_used_up(self, kind: FailureKind) -> bool:
        budget = self._budgets[kind][1]
        earlier = 0 if self._earlier is None else self._earlier[kind]
        return budget != UNLIMITED and self._here[kind] + earlier > budget


def _failures_before(store: CheckpointStore, owner: Owner) -> Iterator[FailureKind]:
    """Yield the kinds of failure of the attempts of the flow run's earlier processes.

    An attempt without an outcome was killed for an unknown reason: it counts as a preemption if it had committed a checkpoint,
    and as infrastructure otherwise. Else a flow that is killed each time for lack of memory would be restarted without limit.
    """
    kinds: dict[int, FailureKind | None] = {outcome.attempt: outcome.kind for outcome in read_outcomes(store)}
    attempts = list(list_attempts(store))
    earlier = [attempt for attempt in attempts if attempt.owner.is_earlier_process_of(owner)]
    is_unknown = any(attempt.number not in kinds for attempt in earlier)
    committed = committed_attempts(store, attempts) if is_unknown else set()
    for attempt in earlier:
        unknown: FailureKind = "preemption" if attempt.number in committed else "infrastructure"
        if (kind := kinds.get(attempt.number, unknown)) is not None:  # else it completed, or ended as was planned
            yield kind


def committed_attempts(store: Run, attempts: Sequence[Attempt]) -> set[int]:
    """Return which attempts have committed a checkpoint, though retention may have deleted it since."""
    known = {attempt_of(checkpoint_id) for checkpoint_id in store.ids()}
    known.update(record.attempt for record in read_history(store) if record.checkpoint is not None)
    restored = ((attempt.restored_id, attempt.resumed_from) for attempt in attempts)
    own = {found for found, path in restored if found is not None and canonical(path or "") == canonical(store.path_of(found))}
    return known | set(map(attempt_of, own))
