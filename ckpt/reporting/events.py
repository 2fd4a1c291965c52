"""The events that rank 0 sends to the leader of the training: reports and commits, in order."""

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TypeAlias

from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.metrics import Metrics, from_json, to_json

from .key_value import KeyValue

_MOST_AT_ONCE = 64  # events that one request reads: some 20 KB


@dataclass(frozen=True, slots=True)
class ReportEvent:
    """Rank 0 reported.

    Attributes:
        record: The record for the metric history.
        progress: The share of the training that is done (0 to 1), where the training reports it.

    """

    record: MetricRecord
    progress: float | None = None


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """A checkpoint was committed.

    Attributes:
        id: Its id.
        step: Its step.
        metrics: Its metrics.
        bytes: The size of all its files.
        duration_s: From the ranks' agreement to the manifest, in seconds.
        stall_s: How long the slowest rank's training waited for the report.

    """

    id: str
    step: int
    metrics: Metrics
    bytes: int
    duration_s: float
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """The ranks wait for a decision on whether the training goes on after a report, whose checkpoint is durable.

    Attributes:
        number: The number of the request in the attempt.
        step: The step of the report.
        num_reports: The number of reports of the run up to this one.
        metrics: Its metrics.
        checkpoint: The id of its checkpoint, or None.

    """

    number: int
    step: int
    num_reports: int
    metrics: Metrics
    checkpoint: str | None


Sent: TypeAlias = ReportEvent | CommitEvent | DecisionRequest


class EventSender:
    """Rank 0's sender: numbers the events of its training thread and of background commits."""

    def __init__(self, key_value: KeyValue) -> None:
        self._key_value = key_value
        self._sent = 0
        self._one_sender = threading.Lock()

    def send(self, event: Sent) -> None:
        """Send `event` to the leader, without waiting for it."""
        body = to_json({"type": type(event).__name__, **asdict(event)})
        with self._one_sender:
            self._key_value.set(f"event/{self._sent}", json.dumps(body).encode())
            self._sent += 1


class EventReceiver:
    """The leader's receiver."""

    def __init__(self, key_value: KeyValue) -> None:
        self._key_value = key_value
        self._received = 0

    def drain(self) -> Iterator[Sent]:
        """Yield the events that arrived since the last call; those of a burst are read together."""
        count = 1
        while values := self._arrived(count):
            count = min(2 * count, _MOST_AT_ONCE)
            for value in values:
                self._key_value.delete(f"event/{self._received}")
                self._received += 1
                yield _decode(value)

    def _arrived(self, count: int) -> list[bytes]:
        """Return the next `count` events if all have arrived, else the next one, else none."""
        for wanted in sorted({count, 1}, reverse=True):
            keys = [f"event/{number}" for number in range(self._received, self._received + wanted)]
            if self._key_value.check(keys[-1]):  # sent in order, over one connection: those before it are there, too
                return self._key_value.get(keys, 1.0)
        return []


def _decode(value: bytes) -> Sent:
    fields = from_json(json.loads(value))
    assert isinstance(fields, dict)
    kind = fields.pop("type")
    if kind == CommitEvent.__name__:
        return CommitEvent(**fields)
    if kind == DecisionRequest.__name__:
        return DecisionRequest(**fields)
    return ReportEvent(MetricRecord(**fields["record"]), fields["progress"])
