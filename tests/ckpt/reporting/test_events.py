"""The events of rank 0 on their way to the leader."""

import threading
import time
from collections import Counter

from prefect_servers import wait_until
from prefect_torch.ckpt.reporting.events import EventReceiver, EventSender, ReportEvent
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.runs.history import MetricRecord


class CountingKeyValue(MemoryKeyValue):
    def __init__(self):
        super().__init__()
        self.requests = Counter()

    def get(self, keys, timeout_s):
        self.requests["get"] += 1
        return super().get(keys, timeout_s)

    def set_all(self, values):
        self.requests["set_all"] += 1
        super().set_all(values)

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
    assert sum(key_value.requests.values()) < 150
    assert not any(value for key, value in key_value._values.items() if key.startswith("event/"))


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


def test_events_beyond_the_slots_wait_for_the_leader_and_use_the_same_slots_again():
    key_value = CountingKeyValue()
    receiver, sent = EventReceiver(key_value), []
    rank_0 = threading.Thread(target=lambda: sent.extend(send_reports(key_value, 10_000)), daemon=True)
    rank_0.start()
    wait_until(lambda: key_value.check("event/4095"), "all slots are used")
    time.sleep(0.05)  # in which rank 0 could overwrite the first one
    received = []
    while len(received) < 10_000:
        received += receiver.drain()
    rank_0.join(10)
    assert received == sent
    assert len(key_value._values) == 4096 + 1
    key_value.requests.clear()
    assert [*receiver.drain()] == []
    assert key_value.requests == {"get": 1}


def test_a_rank_that_sends_without_a_pause_does_not_keep_the_leader():
    key_value = MemoryKeyValue()
    sender, receiver = EventSender(key_value), EventReceiver(key_value)
    event = ReportEvent(MetricRecord(1, 0, {"loss": 0.5}, None, "2026-01-01T00:00:00+00:00"))
    sender.send(event)
    for number, _ in enumerate(receiver.drain()):
        assert number < 5000
        sender.send(event)
    assert [*receiver.drain()] == [event]
