"""Every report of rank 0, kept in chunks beside the checkpoints and independent of them."""

import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, cast

from .layout import stem
from .metrics import Metrics, from_json, to_json
from .store import CheckpointStore

CHUNK_RECORDS = 1000
CHUNK_AGE_S = 2.0


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """One report of rank 0.

    Attributes:
        attempt: The attempt that reported.
        step: The step of the report.
        metrics: What it reported.
        checkpoint: The id of the checkpoint reported with it, or None.
        reported_at: When (UTC, ISO 8601, rank 0's clock).

    """

    attempt: int
    step: int
    metrics: Metrics
    checkpoint: str | None
    reported_at: str


class HistoryWriter:
    """Collects an attempt's records and stores them as immutable chunks; one thread may append while another flushes."""

    def __init__(self, store: CheckpointStore, attempt: int) -> None:
        self._store = store
        self._attempt = attempt
        self._chunk = 0
        self._pending: list[MetricRecord] = []
        self._oldest_s = 0.0
        self._one_flush = threading.Lock()

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
            records = tuple(self._pending)
            if not records:
                return
            lines = [json.dumps(to_json(asdict(record)), allow_nan=False) for record in records]
            key = self._store.layout.metrics_chunk(self._attempt, self._chunk)
            self._store.storage.put_bytes(key, "\n".join(lines).encode())
            self._chunk += 1
            self._oldest_s = time.monotonic()
            del self._pending[: len(records)]


def read_history(store: CheckpointStore) -> list[MetricRecord]:
    """Return every stored report, oldest first.

    A leader that was killed leaves up to two seconds of reports unstored; those that came with a committed checkpoint
    are filled in from its manifest.
    """
    records: list[MetricRecord] = []
    for info in store.storage.list(store.layout.metrics):
        if stem(info.key):
            lines = store.storage.get_bytes(info.key).splitlines()
            records.extend(MetricRecord(**cast("dict[str, Any]", from_json(json.loads(line)))) for line in lines)
    known = {record.checkpoint for record in records}
    lost = [
        MetricRecord(manifest.attempt, manifest.step, manifest.metrics, manifest.id, manifest.created_at.isoformat())
        for manifest in store.list()
        if manifest.id not in known
    ]
    # Stable: within an attempt the reports stay in order, and a filled-in one goes after those with a smaller step.
    return sorted(records + lost, key=lambda record: (record.attempt, record.step)) if lost else records
