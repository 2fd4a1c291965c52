"""Recording the reports and commits of an attempt: metric history, the hint to the latest checkpoint, retention."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from functools import partial

from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.reporting.events import CommitEvent, DecisionRequest, Sent
from prefect_torch.ckpt.runs.attempts.attempt import read_outcome
from prefect_torch.ckpt.runs.attempts.claims import ClaimRenewal
from prefect_torch.ckpt.runs.evaluations import ListedCheckpoint
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord, lost_records, newest_of_each, read_history
from prefect_torch.ckpt.runs.index.reading import read_manifests
from prefect_torch.ckpt.runs.index.writer import IndexWriter
from prefect_torch.ckpt.runs.layout import attempt_number
from prefect_torch.ckpt.runs.manifest import Manifest, ManifestMemory
from prefect_torch.ckpt.runs.metrics import add_newest
from prefect_torch.ckpt.storage.retry import is_refusal
from prefect_torch.ckpt.text import utc_now
from prefect_torch.tasks.run_logs import get_run_logger

from .backoff import Backoff
from .job import TrainJob
from .observers import Observers
from .retention_schedule import RetentionSchedule


class RunRecorder:
    """The records of one attempt, written by the process that leads it, so that no rank waits for them.

    A separate thread writes: a slow storage must not keep the leader from seeing a rank fail. A storage that fails costs a
    warning, not the training.

    Args:
        store: The run.
        job: The training.
        claim: The key of the attempt's claim.
        restored: The checkpoint of the run that the ranks restore, or None.
        observers: They are notified of every report and commit.

    Attributes:
        newest: The id of the newest checkpoint that is known to be committed or was restored; None before the first.
        on_first_report: Called once, in the writing thread, after the first report.
        on_first_commit: Called once, in the writing thread, after the first commit.
        on_request: Called in the writing thread with each request for a decision.

    """

    def __init__(
        self, store: CheckpointStore, job: TrainJob, claim: str, restored: Manifest | None, observers: Observers
    ) -> None:
        self.newest = self._restored_id = None if restored is None else restored.id
        self.on_first_report: Callable[[], None] | None = None
        self.on_first_commit: Callable[[], None] | None = None
        self.on_request: Callable[[DecisionRequest], None] | None = None
        self._store = store
        self._attempt = attempt = attempt_number(claim)
        self._observers = observers
        self._unrecorded: dict[str, CommitEvent] = {}
        self._reported: set[str] = set()
        listed = store.listed()
        memory = ManifestMemory()
        if restored is not None:
            memory.remember(restored)
        lost = lost_records(replace(store, memory=memory), listed, attempt)
        newest = max((it.id for it in listed), default=None)
        self._history = HistoryWriter(store, attempt, newest, lost)
        # Only for the decisions of a resumed run; for any other run, reading the whole history would be useless.
        before = [] if job.decisions is None or restored is None else read_history(store)  # has the lost ones in their places
        self._newest_metrics = newest_of_each(before)
        # A policy that keeps all checkpoints, perhaps a hundred thousand, needs none of their manifests.
        known = [] if job.policy.num_to_keep is None else read_manifests(replace(store, memory=memory), listed)
        self._deciding: Future[None] | None = None
        self._retention = RetentionSchedule(
            job, claim, known, self._restored_id, observers, memory, has_leftovers=_has_leftovers(store, attempt)
        )
        self._logger = get_run_logger()
        self._writer = ThreadPoolExecutor(1, "prefect-torch-recorder")
        self._flushing: Future[None] | None = None
        self._flush_backoff = Backoff()
        self._is_closing = False
        self._renewing: Future[None] | None = None
        self._claim = ClaimRenewal(store, claim)
        self._index = IndexWriter(store)
        self._may_replace_hint = True
        self._write(partial(self._repair_index, listed), "the index of manifests")

    @property
    def has_committed(self) -> bool:
        """Whether a checkpoint of this attempt is known to be committed."""
        return self.newest != self._restored_id

    @property
    def is_deciding(self) -> bool:
        """Whether the ranks wait for a decision."""
        return self._deciding is not None and not self._deciding.done()

    def record(self, event: Sent) -> None:
        """Record a report or a commit of rank 0, or decide on its request; returns immediately."""
        if isinstance(event, DecisionRequest):
            assert self.on_request is not None, f"ranks that must not ask sent {event}"
            decide = partial(self.on_request, replace(event, earlier=dict(self._newest_metrics)))
            self._deciding = self._submit(decide, "a decision could not be made, so the training ends with this report")
            return
        self._observers.notify(event)
        if isinstance(event, CommitEvent):
            self.newest = event.id
            if self.on_first_commit is not None:
                self._submit(self.on_first_commit, "the pin of the checkpoint that the run started from could not be removed")
                self.on_first_commit = None
            self._write(partial(self._hint_latest, event.id), "the hint to the latest checkpoint")
            self._write(partial(self._add_to_index, event.id), "the index of manifests")
            self._retention.committed(event)
            if event.id in self._reported:
                self._reported.remove(event.id)
            else:
                self._unrecorded[event.id] = event
        else:
            self._history.append(event.record)
            add_newest(self._newest_metrics, event.record.metrics)
            if self.on_first_report is not None and not event.record.is_logged:
                self._submit(self.on_first_report, "the node's copy of the restored checkpoint could not be removed")
                self.on_first_report = None
            reported = event.record.checkpoint
            if reported is not None and self._unrecorded.pop(reported, None) is None:  # the commit follows, in the background
                self._reported.add(reported)

    def poll(self) -> None:
        """Start the writes and prunes that are due; returns immediately."""
        is_idle = self._flushing is None or self._flushing.done()
        if is_idle and self._history.is_due() and self._flush_backoff.wait_s() == 0:
            self._flushing = self._write(self._flush, "the metric history")
        if self._claim.is_due and (self._renewing is None or self._renewing.done()):
            self._renewing = self._submit(self._claim.renew, "the claim of the attempt was not stored again")
        self._retention.prune_due(self._history.recorded)

    @property
    def lacks_reports(self) -> bool:
        """Whether reports are not stored in the metric history."""
        return not self._history.is_stored

    def close(self) -> None:
        """Return once everything is stored, except what the last `prune` may make room for."""
        for event in self._unrecorded.values():  # rank 0 died between the commit and the event of its report
            self._history.append(MetricRecord(self._attempt, event.step, event.metrics, event.id, utc_now()))
        self._is_closing = True
        self._store_rest("is tried again after the last prune")  # a repair of the index that is under way ends before

    def prune(self, *, may_go_on: bool) -> None:
        """Return once the storage holds only what the policy keeps, or a prune has failed; to be called after `close`.

        If reports could not be stored, as on a full disk, they are tried once more where the prune has made room.

        Args:
            may_go_on: Whether another attempt may follow, which looks for garbage itself.

        """
        self._retention.finish(self._history.recorded, may_go_on=may_go_on)
        if self.lacks_reports:
            before = self._history.recorded
            self._store_rest("ends without the last reports: those with a checkpoint are in its manifest alone")
            if self._history.recorded != before:  # else there is nothing more to delete, and the storage may be away
                self._retention.finish(self._history.recorded, may_go_on=may_go_on)
        self._writer.shutdown()

    def _store_rest(self, consequence: str) -> None:
        wait([self._submit(self._history.close, f"the metric history could not be written, and {consequence}")])

    def _flush(self) -> None:
        self._flush_backoff.record()
        self._history.flush()
        self._flush_backoff = Backoff()  # only failures follow each other in ever longer pauses

    def _hint_latest(self, checkpoint_id: str) -> None:
        if not self._may_replace_hint:
            return
        try:
            self._store.hint_latest(checkpoint_id)
        except PermissionError as exc:
            if not is_refusal(exc):  # tried again with the next
                raise
            self._may_replace_hint = False
            self._logger.warning("the hint to the latest checkpoint is not written any more by this attempt: %s", exc)

    def _add_to_index(self, checkpoint_id: str) -> None:
        if self._index.add(checkpoint_id):
            self._index.write()

    def _repair_index(self, listed: list[ListedCheckpoint]) -> None:
        # The rest after the writes submitted meanwhile, which must not wait for minutes; or in the next attempt.
        if self._index.repair(listed) and not self._is_closing:
            self._write(partial(self._repair_index, listed), "the index of manifests")

    def _write(self, write: Callable[[], None], what: str) -> "Future[None]":
        return self._submit(write, f"{what} could not be written, and is tried again with the next")

    def _submit(self, act: Callable[[], None], failure: str) -> "Future[None]":
        def act_or_warn() -> None:
            try:
                act()
            except (StorageError, OSError) as exc:
                self._logger.warning("%s: %s", failure, exc)
            except Exception:
                self._logger.exception("%s", failure)
                raise

        return self._writer.submit(copy_context().run, act_or_warn)  # the limit of retries is a context variable


def _has_leftovers(store: CheckpointStore, attempt: int) -> bool:
    """Return whether the attempt before did not end by itself, so that ranks may have been killed during a report."""
    if attempt == 1:
        return False
    former = read_outcome(store, attempt - 1)
    return former is None or not former.is_done
