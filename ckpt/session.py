"""One rank's side of a training: every report of it, from the ranks' agreement to the manifest."""

import operator
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import SupportsIndex

from .agreement import Agreement, Intent, Upload, agree
from .checkpoint import Checkpoint
from .commit import Brought, CommitJob, commit
from .context import TrainContext
from .errors import CheckpointError, PeerGoneError, ReportMismatchError
from .events import CommitEvent, EventSender, ReportEvent
from .history import MetricRecord
from .key_value import KeyValue
from .manifest import MAX_STEP
from .metrics import Metrics, clean_metrics
from .peers import Peers, RankEnd
from .refusal import Refusal
from .staging import scan_files, take_over
from .store import CheckpointStore


class RankSession:
    """The reports of one rank in one attempt.

    Args:
        context: The rank's place.
        store: The run.
        key_value: What the ranks and the leader share.
        restored: The checkpoint that this attempt begins from.

    """

    def __init__(
        self,
        context: TrainContext,
        store: CheckpointStore,
        key_value: KeyValue,
        restored: Checkpoint | None = None,
    ) -> None:
        self.context = context
        self.store = store
        self.restored = restored
        self._peers = Peers(key_value, context.world_rank, context.world_size)
        self._events = EventSender(key_value)
        self._reports = 0
        self._rounds = 0
        self._last_step = -1 if restored is None else restored.step
        self._last_checkpoint_step = self._last_step
        self._parent = None if restored is None else _name_from(store, restored)
        self._one_report = threading.Lock()
        self._background: ThreadPoolExecutor | None = None
        self._in_flight: Future[None] | None = None
        self._parted: CheckpointError | None = None
        self._before_in_flight = (self._last_checkpoint_step, self._parent)

    def report(
        self,
        metrics: Mapping[str, object],
        checkpoint: Checkpoint | None = None,
        *,
        step: SupportsIndex | None = None,
        progress: float | None = None,
        upload: Upload | None = None,
    ) -> None:
        """Report from this rank; see `reporting.report`."""
        with self._one_report, ExitStack() as cleanup:
            try:
                cleaned = clean_metrics(metrics)
                _check_progress(progress)
                brought, upload = self._bring(checkpoint, upload, cleanup)
                step = self._choose_step(step, upload)
            except Exception as exc:
                self._withdraw(exc)
                raise
            intent = Intent(self.context.world_rank, step, upload, list(brought.files), brought.metadata)
            if upload is not None:
                self._wait_for_in_flight()
            agreement = self._agree(intent)
            if agreement.refusal is not None:
                raise agreement.refusal.error()
            self._act(agreement, brought, cleaned, progress)

    def finish(self) -> None:
        """Return once every background commit is durable and every rank returned after equally many reports.

        Raises:
            CheckpointError: The failure of a background commit that no report has raised yet.
            ReportMismatchError: If ranks reported a different number of times.
            PeerGoneError: If another rank failed.

        """
        self._wait_for_in_flight()
        failure = self._take_failure() or self._parted
        if failure is not None:
            raise failure
        self._peers.end(RankEnd(self.context.world_rank, self._reports, "returned"))
        ends = self._peers.wait_for_all_ends()
        gone = [end for end in ends if end.ending != "returned"]
        if gone:
            raise PeerGoneError(f"{gone[0]}, so the training of rank {self.context.world_rank} has no result")
        uneven = [end for end in ends if end.reports != self._reports]
        if uneven:
            raise ReportMismatchError(
                f"{uneven[0]}, but rank {self.context.world_rank} returned after {self._reports} reports; "
                "call report() equally often on every rank"
            )

    def fail(self, detail: str, flush_s: float) -> None:
        """Tell the other ranks that this one's function raised, after giving a background commit its last chance.

        Args:
            detail: The error in one line.
            flush_s: How long to wait for the commit.

        """
        if self._in_flight is not None:
            wait([self._in_flight], flush_s)
        self._peers.end(RankEnd(self.context.world_rank, self._reports, "failed", detail))

    def _bring(self, checkpoint: Checkpoint | None, upload: Upload | None, cleanup: ExitStack) -> tuple[Brought, Upload | None]:
        if upload not in (None, "sync", "async"):
            raise ValueError(f"upload={upload!r}: give 'sync' or 'async'")
        if checkpoint is None:
            return Brought(), None
        if not isinstance(checkpoint, Checkpoint):
            raise ValueError(f"checkpoint={checkpoint!r}: give Checkpoint.from_directory(folder)")  # noqa: TRY004 - as above
        directory = checkpoint.directory
        if directory is None:  # a committed checkpoint is never taken apart: what is moved or stored again is a copy
            directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="prefect-torch-")))
            checkpoint.to_directory(directory)
        return Brought(directory, tuple(scan_files(directory)), checkpoint.get_metadata()), upload or "sync"

    def _choose_step(self, step: SupportsIndex | None, upload: Upload | None) -> int:
        if isinstance(step, bool):
            raise ValueError("step must be a whole number, not a bool")  # noqa: TRY004 - one error for a bad step
        try:
            chosen = self._last_step + 1 if step is None else operator.index(step)
        except TypeError as exc:
            raise ValueError(f"step={step!r}: give a whole number") from exc
        if not 0 <= chosen <= MAX_STEP:
            raise ValueError(f"step={chosen}: give a number from 0 to {MAX_STEP}")
        if upload is not None and chosen <= self._last_checkpoint_step:
            raise ValueError(
                f"step={chosen} does not come after the last checkpoint's step {self._last_checkpoint_step}; "
                "steps must grow from checkpoint to checkpoint, also after a resume"
            )
        return chosen

    def _withdraw(self, error: Exception) -> None:
        """Take part in the round without a report, or this rank's next one would be paired with this one of the others."""
        intent = Intent(self.context.world_rank, self._last_step, error=f"{type(error).__name__}: {error}")
        try:
            agreement = self._agree(intent)
        except CheckpointError:  # the ranks have parted, which `finish` raises; `error` comes first
            return
        if agreement.refusal is not None and agreement.ends_background:
            raise agreement.refusal.error() from error

    def _agree(self, intent: Intent) -> Agreement:
        """Return what rank 0 decides about this round; every rank goes through all rounds, whatever it reports."""
        topic, previous = f"report {self._rounds}", f"report {self._rounds - 1}"
        self._rounds += 1
        try:
            agreement = self._decide(topic, intent)
        except CheckpointError as exc:
            self._parted = exc
            raise
        self._peers.forget(previous)  # that everybody is in this round proves that the one before was read
        if agreement.ends_background:
            self._wait_for_in_flight()  # decided on rank 0, so it ends here within a moment
            self._take_failure()  # raised now, so not again later
        return agreement

    def _decide(self, topic: str, intent: Intent) -> Agreement:
        intents = self._peers.exchange(topic, intent.encode())
        if intents is None:
            return Agreement.decode(self._peers.decision(topic))
        agreement = agree([Intent.decode(data) for data in intents], self.context.attempt)
        failure = self._take_failure()
        if failure is not None:
            agreement = replace(agreement, refusal=Refusal.of(failure), ends_background=True)
        self._peers.decide(topic, agreement.encode())
        return agreement

    def _act(self, agreement: Agreement, brought: Brought, metrics: Metrics, progress: float | None) -> None:
        if agreement.checkpoint_id is not None:
            job = CommitJob(f"report {self._rounds - 1}", agreement, brought, metrics, self._parent)
            if agreement.upload == "sync":
                self._commit(job)
            else:
                self._before_in_flight = (self._last_checkpoint_step, self._parent)
                self._commit_in_background(job)
            self._last_checkpoint_step = agreement.step
            self._parent = agreement.checkpoint_id
        self._last_step = agreement.step
        self._reports += 1
        if self.context.world_rank == 0:
            record = MetricRecord(self.context.attempt, agreement.step, metrics, agreement.checkpoint_id, _now())
            self._events.send(ReportEvent(record, progress))

    def _commit(self, job: CommitJob) -> None:
        started_s = time.monotonic()
        manifest = commit(self.store, self._peers, job)
        if manifest is not None:
            duration_s = time.monotonic() - started_s
            self._events.send(CommitEvent(manifest.id, manifest.step, manifest.metrics, manifest.total_bytes, duration_s))

    def _commit_in_background(self, job: CommitJob) -> None:
        staged = job.brought
        if staged.directory is not None:
            try:
                staged = replace(staged, directory=take_over(staged.directory, staged.files))
            except OSError as exc:  # the other ranks already wait for this one's part: they must hear of it
                staged = replace(staged, directory=None, problem=exc)

        def work() -> None:
            try:
                self._commit(replace(job, brought=staged))
            finally:
                if staged.directory is not None:
                    shutil.rmtree(staged.directory, ignore_errors=True)

        if self._background is None:
            self._background = ThreadPoolExecutor(1, "prefect-torch-commit")
        self._in_flight = self._background.submit(work)

    def _wait_for_in_flight(self) -> None:
        if self._in_flight is not None:
            wait([self._in_flight])

    def _take_failure(self) -> CheckpointError | None:
        """Return the error of a background commit that ended, once."""
        if self._in_flight is None or not self._in_flight.done():
            return None
        failure = self._in_flight.exception()
        self._in_flight = None
        if failure is None:
            return None
        self._last_checkpoint_step, self._parent = self._before_in_flight  # the step may be reported again
        return Refusal.of(failure).error()


def _name_from(store: CheckpointStore, checkpoint: Checkpoint) -> str | None:
    """Return the checkpoint's id, or its path where that alone tells which run it belongs to."""
    own = checkpoint.store is not None and checkpoint.store.path == store.path
    return checkpoint.id if own else checkpoint.path


def _check_progress(progress: float | None) -> None:
    if progress is not None and not (isinstance(progress, (int, float)) and 0 <= progress <= 1):
        raise ValueError(f"progress={progress!r}: give a share of the training from 0 to 1")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat()
