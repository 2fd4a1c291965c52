"""What the leader does with what rank 0 tells: history, the hint to the latest, retention."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from prefect import get_run_logger
from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.history import HistoryWriter

from .job import TrainJob
from .retention_schedule import RetentionSchedule


class Journal:
    """The books of one attempt, kept by the leader, so that no rank waits for them.

    They are written by a thread of their own: a storage that is slow must not keep the leader from seeing a rank fail. One
    that fails costs a warning, not the training.

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
        self._logger = get_run_logger()
        self._writer = ThreadPoolExecutor(1, "prefect-torch-journal")
        self._flushing: Future[None] | None = None

    def take(self, event: ReportEvent | CommitEvent) -> None:
        """Enter one event."""
        if isinstance(event, CommitEvent):
            self._submit(partial(self._store.hint_latest, event.id), "the hint to the latest checkpoint")
            self._retention.committed(event)
        else:
            self._history.append(event.record)

    def poll(self) -> None:
        """Do what has become due; returns at once."""
        if self._history.is_due() and (self._flushing is None or self._flushing.done()):
            self._flushing = self._submit(self._history.flush, "the metric history")
        self._retention.prune_due()

    def close(self) -> None:
        """Return once everything is stored and pruned."""
        self._submit(self._history.flush, "the metric history")
        self._writer.shutdown()
        self._retention.finish()

    def _submit(self, write: Callable[[], None], what: str) -> "Future[None]":
        def write_or_warn() -> None:
            try:
                write()
            except (StorageError, OSError) as exc:
                self._logger.warning("%s could not be written, and is tried again with the next: %s", what, exc)

        return self._writer.submit(write_or_warn)
