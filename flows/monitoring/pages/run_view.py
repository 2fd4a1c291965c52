"""The view of a run that pages show: its past from storage, its present from the events of its training."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timezone

from prefect_torch.ckpt import CheckpointStore, Manifest, Plan, RetentionPolicy
from prefect_torch.ckpt.reporting.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome, list_attempts, read_outcomes
from prefect_torch.ckpt.runs.history import MetricRecord, read_history
from prefect_torch.ckpt.runs.index.reading import read_manifests
from prefect_torch.ckpt.runs.layout import stem
from prefect_torch.ckpt.runs.manifest import attempt_of
from prefect_torch.ckpt.runs.retention import overdue_evaluations, plan
from prefect_torch.flows.monitoring.pages.drawing.curves import Curves
from prefect_torch.flows.monitoring.progress import ProgressRate, progressed
from prefect_torch.flows.monitoring.text import page_url
from prefect_torch.tasks.training.observers import (
    AttemptEnded,
    AttemptStarted,
    CheckpointQuarantined,
    CheckpointsPruned,
    RanksStarted,
    TrainingEvent,
)

from .attempt_log import AttemptLog
from .stored_checkpoints import MAX_HELD, StoredCheckpoint, StoredCheckpoints

MAX_LINKED_ATTEMPTS = 5  # the newest ones, whose ranks are known
_NUM_BEFORE = 20  # attempts whose end is looked for also before a fresh start


class RunView:
    """Attempts, metrics and checkpoints of a run, in bounded memory and without requests while the training runs.

    Everything before the first attempt of this process is read from storage when that attempt starts; of what came before the
    run's last fresh start (`resume="never"`), only the checkpoints, which retention compares with later ones. Everything later
    comes from the training's events alone, so that nothing is recorded twice.

    Args:
        store: The run.
        policy: Its retention policy.
        clock: Returns seconds, by which the progress is measured: a step of the machine's time would be one of the progress.

    Attributes:
        checkpoints: The run's checkpoints.
        curves: The metrics of `logs`.
        lost_before: Those of the newest attempts of earlier processes that were killed or overtaken, and have no outcome.
        quarantined: Why checkpoints were set aside, by id.
        progress: The completed share that the training has reported, or None.

    """

    def __init__(self, store: CheckpointStore, policy: RetentionPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._policy = policy
        self._clock = clock
        self._logs: dict[int, AttemptLog] = {}
        self.checkpoints = StoredCheckpoints(policy)
        self.curves = Curves()
        self.lost_before: list[Attempt] = []
        self.quarantined: dict[str, str] = {}
        self.progress: float | None = None
        self._rate: ProgressRate | None = None

    @property
    def logs(self) -> list[AttemptLog]:
        """Every attempt since the last fresh start, oldest first."""
        return [self._logs[number] for number in sorted(self._logs)]

    @property
    def newest(self) -> AttemptLog | None:
        """The newest attempt; None before the first."""
        return max(self._logs.values(), key=lambda log: log.number, default=None)

    @property
    def left_s(self) -> float | None:
        """The seconds until the training is done if it continues at the rate of its newest attempt; None if that is unknown."""
        return None if self._rate is None else self._rate.left_s

    def kept(self) -> dict[str, tuple[str, ...]]:
        """Return the reasons to keep each checkpoint, by id; the next prune deletes those that are missing."""
        newest = self.newest
        restored = newest.attempt.restored_id if newest is not None and newest.is_running else None
        in_use = () if restored is None else (restored,)
        held = self.checkpoints.held
        overdue = overdue_evaluations(held, self._policy, datetime.now(timezone.utc))
        return plan(held, self._policy, pinned=self.checkpoints.pinned, in_use=in_use, overdue=overdue).keep

    def record(self, event: TrainingEvent, now_s: float) -> None:
        """Record `event`, at `now_s` (seconds since the epoch)."""
        match event:
            case AttemptStarted(attempt, resumed_from):
                self._add_attempt(replace(attempt, resumed_from=resumed_from))
                self._rate = None
            case RanksStarted(number, task_runs):
                self._logs[number].ranks = {rank: page_url("task-run", it) for rank, it in task_runs.items()}
                for log in self.logs[:-MAX_LINKED_ATTEMPTS]:
                    log.ranks = {}
            case ReportEvent(record, progress):
                self._record_report(record)
                if progress is not None:
                    self.progress = progress
                    self._rate = progressed(self._rate, progress, self._clock())
            case CommitEvent():
                self.checkpoints.add(StoredCheckpoint(event.id, event.step, event.metrics, event.bytes, created_s=now_s))
                self._logs[attempt_of(event.id)].record_commit(event.id, event.stall_s)
            case CheckpointsPruned(decided):
                self._record_prune(decided)
            case CheckpointQuarantined(checkpoint_id, reason):
                self.quarantined[checkpoint_id] = reason
                self.checkpoints.discard(checkpoint_id)
            case AttemptEnded(outcome):
                self._end(outcome, now_s)

    def read_checkpoints(self) -> None:
        """Read from storage which checkpoints exist and which are pinned; costs two listings, and a small read for each.

        If there are more than can be held, no checkpoint is read, and those held that no longer exist are removed.

        Raises:
            StorageError: If the storage does not answer.

        """
        listed = list(self._store.listed())
        if len(listed) <= MAX_HELD:
            self._replace(read_manifests(self._store, listed))
            return
        self.checkpoints.pinned = self._store.pinned()
        existing = {it.id for it in listed}
        for checkpoint in self.checkpoints.held:
            if checkpoint.id not in existing:
                self.checkpoints.discard(checkpoint.id)

    def _replace(self, manifests: Iterable[Manifest]) -> None:
        self.checkpoints.replace(map(StoredCheckpoint.of, manifests), self._store.pinned())

    def _add_attempt(self, attempt: Attempt) -> None:
        try:
            if not self._logs:
                self._read_past(attempt)
        finally:  # the present is shown even if the past cannot be read
            self._logs[attempt.number] = AttemptLog(attempt)

    def _end(self, outcome: Outcome, now_s: float) -> None:
        if outcome.attempt not in self._logs:  # it ended before its AttemptStarted
            claimed = [it for it in list_attempts(self._store, outcome.attempt) if it.number == outcome.attempt]
            if not claimed:
                return
            self._add_attempt(claimed[0])
        log = self._logs[outcome.attempt]
        log.outcome, log.ended_s = outcome, now_s

    def _record_report(self, record: MetricRecord) -> None:
        self.curves.add(record)
        self._logs[record.attempt].record_report(record)

    def _record_prune(self, decided: Plan[Manifest]) -> None:
        for manifest in decided.drop:
            self.checkpoints.remove(manifest.id, manifest.total_bytes)
        self.checkpoints.pinned = frozenset(key for key, reasons in decided.keep.items() if "pinned" in reasons)

    def _read_past(self, attempt: Attempt) -> None:
        """Read what came before `attempt`; an error leaves the view unchanged."""
        since = min(attempt.lineage, attempt.number - _NUM_BEFORE)
        before = [it for it in _newest_claims(list_attempts(self._store, since)) if it.number < attempt.number]
        logs = {it.number: AttemptLog(it) for it in before if it.number >= attempt.lineage}
        manifests = [manifest for manifest in self._store.list() if manifest.attempt < attempt.number]
        history = [it for it in read_history(self._store, since=attempt.lineage) if it.attempt in logs]
        outcomes = {it.attempt: it for it in read_outcomes(self._store, since)}
        written = {stem(info.key): info.modified_s for info in self._store.storage.list(self._store.layout.outcomes)}
        self._replace(manifests)
        self._logs = logs
        self.lost_before = [it for it in before if it.number not in outcomes]
        for manifest in manifests:
            if manifest.attempt in logs:
                logs[manifest.attempt].record_commit(manifest.id, manifest.timings.get("stall_s"))
        for record in history:
            self._record_report(record)
        for log in logs.values():
            log.outcome = outcomes.get(log.number)
            log.ended_s = max(log.last_seen_s(), written.get(f"{log.number:06d}", 0.0))


def _newest_claims(attempts: Iterable[Attempt]) -> Iterable[Attempt]:
    """Return one claim for each number: the other claims lost to it and were not deleted."""
    return {attempt.number: attempt for attempt in attempts}.values()
