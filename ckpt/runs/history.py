"""The metric history: every report of rank 0, in chunks beside the checkpoints and independent of them."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any

from prefect_torch.ckpt.runs.bulk import all_are, are_scalars
from prefect_torch.ckpt.runs.evaluations import ListedCheckpoint
from prefect_torch.ckpt.runs.index.reading import read_manifests
from prefect_torch.ckpt.runs.manifest import MAX_ATTEMPT, MAX_STEP, AttemptNumber, Manifest, StepNumber, attempt_of
from prefect_torch.ckpt.runs.metrics import Metrics, add_newest
from prefect_torch.ckpt.runs.records.fields import Time, is_moment
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.storage.records import fields_of

from .parts.merging import Merging
from .parts.metric_chunks import CHUNK_RECORDS, Chunk, encode_line, join_lines, list_chunks, new_chunk, read_chunk, read_records

CHUNK_AGE_S = 2.0
MOST_PARTS = 32
MOST_BYTES = 4 * 2**20  # after which a new object begins: each merge stores all of it again
_COLUMNS = itemgetter("attempt", "step", "metrics", "checkpoint", "reported_at", "is_logged")
_NO_TAGS = {int, float, bool, type(None)}  # values of these types cannot be the content of a tag


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """One report of rank 0, or metrics that it logged between two reports.

    Attributes:
        attempt: The attempt that reported.
        step: The step of the report.
        metrics: The reported metrics.
        checkpoint: The id of the checkpoint reported with it, or None.
        reported_at: The time of the report (UTC, ISO 8601, rank 0's clock).
        is_logged: Whether a logger recorded it between reports.

    """

    attempt: AttemptNumber
    step: StepNumber
    metrics: Metrics
    checkpoint: str | None
    reported_at: Time
    is_logged: bool = False

    @classmethod
    def quick(cls, fields: Sequence[Mapping[str, Any]]) -> "list[MetricRecord] | None":
        """Return the records with these stored fields as `decode` does, in less time; None if one is out of the ordinary."""
        try:
            columns = list(zip(*map(_COLUMNS, fields), strict=True))
            attempts, steps, metrics, checkpoints, moments, are_logged = columns
            are_moments = all(map(is_moment, map(datetime.fromisoformat, moments)))
        except (KeyError, TypeError, ValueError):
            return None
        are_ordinary = (
            all_are({int}, attempts)
            and 1 <= min(attempts) <= max(attempts) <= MAX_ATTEMPT
            and all_are({int}, steps)
            and 0 <= min(steps) <= max(steps) <= MAX_STEP
            and are_scalars(metrics, _NO_TAGS)
            and all_are({str, type(None)}, checkpoints)
            and are_moments
            and all_are({bool}, are_logged)
        )
        return list(map(cls, *columns)) if are_ordinary else None


class HistoryWriter:
    """Stores an attempt's records in chunks; one thread may append while another flushes.

    No object is overwritten, since that is not atomic on every storage: each flush stores a small object of its own.
    When these are many, or hold a thousand records or 4 MiB, one object replaces them, and is read back before they are
    deleted. So a run that reports for weeks has an object per thousand reports or 4 MiB, and 32 others at most.

    Args:
        run: The run.
        attempt: The attempt.
        before: The newest checkpoint of earlier attempts, or None.
        lost: The reports that their leaders failed to store, oldest first: the first records of this attempt.

    Attributes:
        recorded: The newest checkpoint up to which the reports of all are stored, or None.

    """

    def __init__(self, run: Run, attempt: int, before: str | None = None, lost: Sequence[MetricRecord] = ()) -> None:
        self._run = run
        self._attempt = attempt
        self._first = 0  # the number of the first of `_lines`
        self._lines: list[bytes] = []  # stored lines that are not yet merged into a full chunk
        self._parts: dict[Chunk, bool] = {}  # each part, and whether it certainly exists: after an error it may exist or not
        self._merging = Merging(run.storage, f"the metric history of run {run.name!r}")
        self._pending: list[MetricRecord] = []
        self._oldest_s = 0.0
        self._one_flush = threading.Lock()
        self._before = before
        self._num_lost = len(lost)
        self.recorded = None if lost else before
        for record in lost:
            self.append(record)

    def append(self, record: MetricRecord) -> None:
        """Add one record, to be stored by a later `flush`."""
        if not self._pending:
            self._oldest_s = time.monotonic()
        self._pending.append(record)

    def is_due(self) -> bool:
        """Return whether the pending records are two seconds old, or fill a chunk."""
        return len(self._pending) >= CHUNK_RECORDS or (bool(self._pending) and time.monotonic() - self._oldest_s >= CHUNK_AGE_S)

    @property
    def is_stored(self) -> bool:
        """Whether no record is pending."""
        return not self._pending

    def flush(self) -> None:
        """Store the pending records, usually by one request; after an error they stay pending, or are stored but unmerged."""
        with self._one_flush:
            left = len(self._pending)
            while left > 0:
                if self._is_full:  # an error occurred before the merge
                    self._merge()
                left -= self._store_some(left)
                if self._is_full or len(self._parts) >= MOST_PARTS:
                    self._merge()

    def close(self) -> None:
        """Store the pending records, and merge the small parts."""
        self.flush()
        with self._one_flush:
            self._merge()

    @property
    def _is_full(self) -> bool:
        return len(self._lines) == CHUNK_RECORDS or sum(map(len, self._lines)) >= MOST_BYTES

    def _store_some(self, most: int) -> int:
        taken = self._pending[: min(most, CHUNK_RECORDS - len(self._lines))]
        number = self._first + len(self._lines)
        lines = [encode_line(number + index, fields_of(record)) for index, record in enumerate(taken)]
        part = new_chunk(self._run.layout, self._attempt, number + len(lines) - 1, len(lines))
        self._parts[part] = False
        self._run.storage.put_bytes(part.key, join_lines(lines))
        self._parts[part] = True
        self._oldest_s = time.monotonic()
        del self._pending[: len(taken)]
        self._lines += lines
        self._num_lost = max(0, self._num_lost - len(taken))
        ids = (self.recorded, None if self._num_lost else self._before, *(record.checkpoint for record in taken))
        self.recorded = max((checkpoint_id for checkpoint_id in ids if checkpoint_id is not None), default=None)
        return len(taken)

    def _merge(self) -> None:
        """Replace all parts by one object; the next call completes a merge that an error interrupted."""
        if len(self._parts) > 1:
            whole = new_chunk(self._run.layout, self._attempt, self._first + len(self._lines) - 1, len(self._lines))
            is_stored = self._parts.setdefault(whole, False)  # true if all lines were stored in one put, after errors
            parts = [part.key for part in self._parts if part != whole]
            self._merging.replace(parts, whole.key, join_lines(self._lines), is_stored=is_stored)
            self._parts = {whole: True}
        if self._is_full:
            self._first, self._lines, self._parts = self._first + len(self._lines), [], {}
        self._merging.delete_replaced()


def read_history(run: Run, listed: Sequence[ListedCheckpoint] | None = None, *, since: int = 0) -> list[MetricRecord]:
    """Return the stored reports of attempt `since` and of all later ones, oldest first.

    Unreadable records are left out with a warning. A leader that was killed leaves up to two seconds of reports unstored; those
    with a committed checkpoint are filled in from its manifest.

    Args:
        run: The run.
        listed: All checkpoints of the run, if they were just listed; None lists them.
        since: The first attempt whose reports are read; those of earlier ones cost no read.

    """
    records: list[MetricRecord] = []
    late: list[MetricRecord] = []  # those that a later leader stored
    known: set[str] = set()
    for record in read_records(run.storage, run.layout, MetricRecord, since=since or None):
        if record.attempt < since:  # its leader failed to store it, and a later one did
            continue
        if record.checkpoint is None or record.checkpoint not in known:  # a leader may store a lost record twice
            (late if records and record.attempt < records[-1].attempt else records).append(record)
        if record.checkpoint is not None:
            known.add(record.checkpoint)
    existing = run.listed() if listed is None else listed
    unknown = [it for it in existing if attempt_of(it.id) >= since and it.id not in known]
    late += [_record_of(manifest) for manifest in read_manifests(run, unknown)]
    return _with_late(records, late) if late else records


def _with_late(records: Sequence[MetricRecord], late: Iterable[MetricRecord]) -> list[MetricRecord]:
    """Return `records`, in order, with each of `late` before the next report of its attempt.

    They are not sorted by step, since a logger may count steps differently between reports.
    """
    waiting = sorted(late, key=lambda record: (record.attempt, record.step))[::-1]
    found: list[MetricRecord] = []
    for record in records:
        while waiting and _comes_before(waiting[-1], record):
            found.append(waiting.pop())
        found.append(record)
    return found + waiting[::-1]


def _comes_before(report: MetricRecord, record: MetricRecord) -> bool:
    is_next = not record.is_logged and report.step < record.step
    return report.attempt < record.attempt or (report.attempt == record.attempt and is_next)


def newest_metrics(history: Sequence[MetricRecord]) -> Metrics:
    """Return the last report's metrics, with the newest of each that was logged since; empty without a record."""
    last_report = max((index for index, record in enumerate(history) if not record.is_logged), default=0)
    metrics = dict(history[last_report].metrics) if history else {}
    for record in history[last_report + 1 :]:
        add_newest(metrics, record.metrics)
    return metrics


def newest_of_each(history: Sequence[MetricRecord]) -> Metrics:
    """Return the newest value of each metric that any record has, nested or not; None is no value."""
    metrics: Metrics = {}
    for record in history:
        add_newest(metrics, record.metrics)
    return metrics


def lost_records(run: Run, listed: Sequence[ListedCheckpoint], attempt: int) -> list[MetricRecord]:
    """Return the reports of `listed` checkpoints that leaders before `attempt` failed to store.

    The leader of `attempt` stores them before anything is pruned: until then a manifest is their only record. Costs a listing,
    and a read for each attempt of `listed` and for each lost report. Completed attempts are checked, too: the last records may
    have failed to be stored just before the outcome was.
    """
    before = sorted({number for it in listed if (number := attempt_of(it.id)) < attempt})
    chunks: dict[int, list[Chunk]] = {number: [] for number in before}
    for chunk in list_chunks(run.storage, run.layout, since=before[0]) if before else ():
        if chunk.attempt in chunks:
            chunks[chunk.attempt].append(chunk)
    recorded = dict(zip(before, read_all(before, lambda number: _newest_in(run, chunks[number], number)), strict=True))
    lost = [it for it in listed if (newest := recorded.get(attempt_of(it.id))) is not None and it.id > newest]
    return [_record_of(manifest) for manifest in read_manifests(run, lost)]


def newest_recorded(run: Run) -> str:
    """Return the newest checkpoint whose report is stored; empty if none is."""
    return _newest_in(run, list_chunks(run.storage, run.layout))


def _newest_in(run: Run, chunks: Sequence[Chunk], attempt: int | None = None) -> str:
    """Return the newest checkpoint, of one attempt or of all, whose report is in `chunks`; empty if none is."""
    newest, is_found = "", False
    for chunk in reversed(chunks):
        records = read_chunk(run.storage, chunk, MetricRecord) or {}  # empty: it was merged with older ones
        known = [record for record in records.values() if record.checkpoint and attempt in (None, record.attempt)]
        newest = max([newest, *(record.checkpoint for record in known if record.checkpoint)])
        is_found |= any(record.attempt == chunk.attempt for record in known)  # not only lost ones of earlier attempts
        if is_found and (len(records) == chunk.count or not chunk.proves_itself):  # else others may hold its missing records
            break
    return newest


def _record_of(manifest: Manifest) -> MetricRecord:
    return MetricRecord(manifest.attempt, manifest.step, manifest.reported, manifest.id, manifest.created_at.isoformat())
