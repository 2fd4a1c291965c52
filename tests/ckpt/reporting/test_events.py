"""The events of rank 0 on their way to the leader."""

from collections import Counter

from prefect_torch.ckpt.reporting.events import EventReceiver, EventSender, ReportEvent
from prefect_torch.ckpt.reporting.key_value import MemoryKeyValue
from prefect_torch.ckpt.runs.history import MetricRecord


class CountingKeyValue(MemoryKeyValue):
    def __init__(self):
        super().__init__()
        self.requests = Counter()

    def get(self, keys, timeout_s):
        self.requests["get"] += 1
        return super().get(keys, timeout_s)

    def check(self, key):
        self.requests["check"] += 1
        return super().check(key)


def send_reports(key_value, count):
    sender = EventSender(key_value)
    sent = [ReportEvent(MetricRecord(1, step, {"loss": 0.5}, None, "2026-01-01T00:00:00+00:00")) for step in range(count)]
    for event in sent:
        sender.send(event)
    return sent


def test_a_burst_of_reports_is_read_by_few_requests_in_its_order():
    key_value = CountingKeyValue()
    sent = send_reports(key_value, 1000)
    assert [*EventReceiver(key_value).drain()] == sent
    assert sum(key_value.requests.values()) < 250
    assert not key_value._values, "what was received is still stored"


def test_a_receiver_that_stops_in_a_burst_goes_on_with_the_next_event():
    key_value = MemoryKeyValue()
    sent = send_reports(key_value, 20)
    receiver = EventReceiver(key_value)
    draining = receiver.drain()
    first = [next(draining) for _ in range(5)]
    draining.close()
    assert [*first, *receiver.drain()] == sent


def test_no_event_costs_one_request():
    key_value = CountingKeyValue()
    assert [*EventReceiver(key_value).drain()] == []
    assert key_value.requests == {"check": 1}
