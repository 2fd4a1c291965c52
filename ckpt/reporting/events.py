"""The events that rank 0 sends to the leader of the training: reports and commits, in order."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.metrics import Metrics, add_newest, parse_json, to_json
from prefect_torch.ckpt.storage.records import fields_of

_MOST_AT_ONCE = 64  # events that one request reads: some 20 KB
_SLOTS = 4096  # events that may wait for a leader that is stopped, or busy
_RECEIVED = "events received"
_POLL_S = 0.01
_ENCODER = json.JSONEncoder(separators=(",", ":"))


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
        earlier: The newest value of each metric of the reports before it, which the leader adds.

    """

    number: int
    step: int
    num_reports: int
    metrics: Metrics
    checkpoint: str | None
    earlier: Metrics = field(default_factory=dict)

    @property
    def newest(self) -> Metrics:
        """The newest value of each metric, of this report or an earlier one."""
        newest = dict(self.earlier)
        add_newest(newest, self.metrics)
        return newest


Sent: TypeAlias = ReportEvent | CommitEvent | DecisionRequest


class EventSender:
    """Rank 0's sender: numbers the events of its training thread and of background commits."""

    def __init__(self, key_value: KeyValue) -> None:
        self._key_value = key_value
        self._sent = 0
        self._received = 0  # the number that the leader had received, as last read
        self._one_sender = threading.Lock()

    def send(self, event: Sent) -> None:
        """Send `event` to the leader, without waiting for it, unless thousands of events wait."""
        body = _encode(event)
        with self._one_sender:
            self._wait_for_slot()
            self._key_value.set(_slot(self._sent), body)
            self._sent += 1

    def _wait_for_slot(self) -> None:
        """Return once the leader has received the event that is in the slot of the next one."""
        while self._sent - self._received >= _SLOTS:
            if self._key_value.check(_RECEIVED):
                self._received = int(self._key_value.get([_RECEIVED], 1.0)[0])
            if self._sent - self._received >= _SLOTS:
                time.sleep(_POLL_S)


class EventReceiver:
    """The leader's receiver. It empties slots and deletes none: that would take a request for each event."""

    def __init__(self, key_value: KeyValue) -> None:
        self._key_value = key_value
        self._received = 0
        self._read: deque[bytes] = deque()  # events that no `drain` has yielded yet

    def drain(self) -> Iterator[Sent]:
        """Yield the events that arrived since the last call; those of a burst are read together.

        Of those that arrive meanwhile, it yields a limited number: a rank may send without a pause.
        """
        count, left = 1, _SLOTS  # as many as may wait, so that it yields all once nobody sends
        while self._read or (left > 0 and self._receive(count)):
            count = min(2 * max(count, len(self._read)), _MOST_AT_ONCE)
            left -= len(self._read)
            while self._read:
                yield _decode(self._read.popleft())

    def _receive(self, count: int) -> bool:
        """Read the next `count` events, or fewer if not all have arrived, and return whether there was any."""
        while not self._is_full(self._received + count - 1):  # sent in order, over one connection: if the last is set, all are
            count //= 2
            if count == 0:
                return False
        slots = [_slot(number) for number in range(self._received, self._received + count)]
        self._read.extend(self._key_value.get(slots, 1.0))
        self._received += count
        self._key_value.set_all({**dict.fromkeys(slots, b""), _RECEIVED: str(self._received).encode()})
        return True

    def _is_full(self, number: int) -> bool:
        slot = _slot(number)
        was_used = number >= _SLOTS  # so its key is set, perhaps to an empty value, and needs no request to check that
        return (was_used or self._key_value.check(slot)) and self._key_value.get([slot], 1.0)[0] != b""


def _slot(number: int) -> str:
    """Return the key of an event, which a later one uses again."""
    return f"event/{number % _SLOTS}"


def _encode(event: Sent) -> bytes:
    fields = fields_of(event)
    if isinstance(event, ReportEvent):
        fields["record"] = fields_of(event.record)
    return _ENCODER.encode(to_json({"type": type(event).__name__, **fields})).encode()


def _decode(value: bytes) -> Sent:
    fields = parse_json(value.decode())
    assert isinstance(fields, dict)
    kind = fields.pop("type")
    if kind == CommitEvent.__name__:
        return CommitEvent(**fields)
    if kind == DecisionRequest.__name__:
        return DecisionRequest(**fields)
    return ReportEvent(MetricRecord(**fields["record"]), fields["progress"])
