"""Every report of rank 0, kept in chunks beside the checkpoints and independent of them."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from .attempts import read_outcome
from .evaluations import ListedCheckpoint
from .manifest import Manifest, attempt_of
from .metrics import Metrics, from_json, to_json
from .parallel_reads import read_all
from .store import CheckpointStore

CHUNK_RECORDS = 1000
CHUNK_AGE_S = 2.0


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """One report of rank 0, or what it logged between two.

    Attributes:
        attempt: The attempt that reported.
        step: The step of the report.
        metrics: What it reported.
        checkpoint: The id of the checkpoint reported with it, or None.
        reported_at: When (UTC, ISO 8601, rank 0's clock).
        is_logged: Whether a logger recorded it between reports.

    """

    attempt: int
    step: int
    metrics: Metrics
    checkpoint: str | None
    reported_at: str
    is_logged: bool = False


class HistoryWriter:
    """Stores an attempt's records in chunks; one thread may append while another flushes.

    The newest chunk is written again with what has come since, until it is full: a run that reports for weeks has an object
    per thousand reports.

    Attributes:
        recorded: The newest checkpoint whose report is stored, or None.

    """

    def __init__(self, store: CheckpointStore, attempt: int, recorded: str | None = None) -> None:
        self._store = store
        self._attempt = attempt
        self._chunk = 0
        self._lines: list[str] = []  # of the newest chunk
        self._pending: list[MetricRecord] = []
        self._oldest_s = 0.0
        self._one_flush = threading.Lock()
        self.recorded = recorded

    def append(self, record: MetricRecord) -> None:
        """Take one record, to be stored by a later `flush`."""
        if not self._pending:
            self._oldest_s = time.monotonic()
        self._pending.append(record)

    def is_due(self) -> bool:
        """Say whether what is pending is two seconds old, or a chunk."""
        return len(self._pending) >= CHUNK_RECORDS or (bool(self._pending) and time.monotonic() - self._oldest_s >= CHUNK_AGE_S)

    def flush(self) -> None:
        """Store what is pending; after an error it stays pending."""
        with self._one_flush:
            left = len(self._pending)
            while left > 0:
                taken = self._pending[: min(left, CHUNK_RECORDS - len(self._lines))]
                lines = [*self._lines, *(json.dumps(to_json(asdict(record)), allow_nan=False) for record in taken)]
                key = self._store.layout.metrics_chunk(self._attempt, self._chunk)
                self._store.storage.put_bytes(key, "\n".join(lines).encode())
                self._oldest_s = time.monotonic()
                del self._pending[: len(taken)]
                left -= len(taken)
                self._chunk, self._lines = (self._chunk, lines) if len(lines) < CHUNK_RECORDS else (self._chunk + 1, [])
                ids = (self.recorded, *(record.checkpoint for record in taken))
                self.recorded = max((checkpoint_id for checkpoint_id in ids if checkpoint_id is not None), default=None)


def read_history(store: CheckpointStore) -> list[MetricRecord]:
    """Return every stored report, oldest first.

    A leader that was killed leaves up to two seconds of reports unstored; those that came with a committed checkpoint
    are filled in from its manifest.
    """
    records: list[MetricRecord] = []
    known: set[str] = set()
    for info in store.storage.list(store.layout.metrics):
        for record in _read_chunk(store, info.key):
            if record.checkpoint is None or record.checkpoint not in known:  # a leader may make up for one twice
                records.append(record)
            if record.checkpoint is not None:
                known.add(record.checkpoint)
    filled_in = [_record_of(manifest) for manifest in store.readable(it for it in store.listed() if it.id not in known)]
    attempts = [record.attempt for record in records]
    if not filled_in and attempts == sorted(attempts):
        return records
    # Stable: within an attempt the reports stay in order, and a filled-in one goes after those with a smaller step.
    return sorted(records + filled_in, key=lambda record: (record.attempt, record.step))


def newest_metrics(history: Sequence[MetricRecord]) -> Metrics:
    """Return the last report's metrics, with the newest of each that was logged since; empty without a record."""
    last_report = max((place for place, record in enumerate(history) if not record.is_logged), default=0)
    metrics: Metrics = {}
    for record in history[last_report:]:
        metrics.update(record.metrics)
    return metrics


def lost_records(store: CheckpointStore, listed: Sequence[ListedCheckpoint], attempt: int) -> list[MetricRecord]:
    """Return the reports of `listed` checkpoints that leaders before `attempt` were killed too early to store.

    Who leads `attempt` stores them before anything is pruned: then a manifest is all that remembers them. Costs a small read
    for each attempt that `listed` are of, a listing and a read for each of those that left no outcome, and a read for each
    lost report.
    """
    before = sorted({number for it in listed if (number := attempt_of(it.id)) < attempt})

    def newest_of_killed(number: int) -> str | None:
        return newest_recorded(store, number) if read_outcome(store, number) is None else None

    recorded = dict(zip(before, read_all(before, newest_of_killed), strict=True))
    lost = [it for it in listed if (newest := recorded.get(attempt_of(it.id))) is not None and it.id > newest]
    return [_record_of(manifest) for manifest in store.readable(lost)]


def newest_recorded(store: CheckpointStore, attempt: int | None = None) -> str:
    """Return the newest checkpoint whose report is stored, of one attempt or of all; empty if none is."""
    first = "" if attempt is None else store.layout.metrics_chunk(attempt, 0).rpartition("-")[0]
    keys = [info.key for info in store.storage.list(store.layout.metrics, after=first or None) if info.key.startswith(first)]
    for key in reversed(keys):
        records = (record for record in _read_chunk(store, key) if attempt in (None, record.attempt))
        if ids := [record.checkpoint for record in records if record.checkpoint]:
            return max(ids)
    return ""


def _read_chunk(store: CheckpointStore, key: str) -> list[MetricRecord]:
    lines = store.storage.get_bytes(key).splitlines()
    return [MetricRecord(**cast("dict[str, Any]", from_json(json.loads(line)))) for line in lines]


def _record_of(manifest: Manifest) -> MetricRecord:
    return MetricRecord(manifest.attempt, manifest.step, manifest.reported, manifest.id, manifest.created_at.isoformat())
