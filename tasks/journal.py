"""What the leader does with what rank 0 tells: history, the hint to the latest, retention."""

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.history import HistoryWriter

from .job import TrainJob
from .retention_schedule import RetentionSchedule


class Journal:
    """The books of one attempt; kept by the leader, so that no rank waits for them.

    Args:
        store: The run.
        job: The training.
        attempt: The attempt's number.
        restored: The id that the ranks restore, or None.

    """

    def __init__(self, store: CheckpointStore, job: TrainJob, attempt: int, restored: str | None) -> None:
        self._store = store
        self._history = HistoryWriter(store, attempt)
        self._retention = RetentionSchedule(job, store.list(), restored)

    def take(self, event: ReportEvent | CommitEvent) -> None:
        """Enter one event."""
        if isinstance(event, CommitEvent):
            self._store.hint_latest(event.id)
            self._retention.committed(event)
        else:
            self._history.append(event.record)

    def poll(self) -> None:
        """Do what has become due."""
        self._history.flush_due()
        self._retention.prune_due()

    def close(self) -> None:
        """Return once everything is stored and pruned."""
        self._history.flush()
        self._retention.finish()
