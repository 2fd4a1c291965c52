import pytest
import torch
from prefect_torch.ckpt.reporting.api import log_metrics
from prefect_torch.ckpt.runs.history import MetricRecord, newest_metrics, read_history
from ranks import Attempt
from torch.utils._python_dispatch import TorchDispatchMode


def test_rank_0_logs_alone_at_any_step_and_counts_no_report(store):
    attempt = Attempt(store, 2)

    def train(session, rank):
        session.report({"loss": 3.0}, step=10)
        if rank == 0:
            session.log_metrics({"loss": 1.0}, step=4)
            session.log_metrics({"speed": 2.0})
        session.report({"loss": 2.0})

    assert attempt.run(train) == [None, None]
    told = [(event.record.step, event.record.metrics, event.record.is_logged) for event in attempt.events()]
    assert told == [
        (10, {"loss": 3.0}, False),
        (4, {"loss": 1.0}, True),
        (11, {"speed": 2.0}, True),
        (11, {"loss": 2.0}, False),
    ]


def test_other_ranks_are_checked_and_not_recorded(store):
    attempt = Attempt(store, 2)

    def train(session, rank):
        if rank == 1:
            session.log_metrics({"loss": 1.0})
            with pytest.raises(ValueError, match="metric 'loss'"):
                session.log_metrics({"loss": [1.0]})

    assert attempt.run(train) == [None, None]
    assert attempt.events() == []


def test_only_rank_0_reads_what_a_tensor_holds(store):
    """Reading a tensor of a GPU waits for the computations before it."""
    attempt, read = Attempt(store, 2), {}

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return read[self.rank].append(function.__name__) or function(*args, **(kwargs or {}))

    def train(session, rank):
        loss, mode = torch.ones(()), Reads()
        read[rank], mode.rank = [], rank
        with mode:
            session.log_metrics({"loss": loss, "nested": {"loss": loss}})
            session.report({"loss": loss, "nested": {"loss": loss}})

    assert attempt.run(train) == [None, None]
    assert read == {0: ["_local_scalar_dense.default"] * 4, 1: []}
    assert [event.record.metrics for event in attempt.events()] == [{"loss": 1.0, "nested": {"loss": 1.0}}] * 2


def test_the_newest_metrics_are_the_last_reports_and_what_was_logged_since():
    def record(metrics, *, is_logged):
        return MetricRecord(1, 0, metrics, None, "2026-11-21T00:00:00+00:00", is_logged=is_logged)

    logged, reported = record({"a": 1, "b": 1}, is_logged=True), record({"a": 2, "c": 2}, is_logged=False)
    assert newest_metrics([]) == {}
    assert newest_metrics([logged]) == {"a": 1, "b": 1}
    assert newest_metrics([logged, reported]) == {"a": 2, "c": 2}
    assert newest_metrics([logged, reported, logged, record({"b": 3}, is_logged=True)]) == {"a": 1, "b": 3, "c": 2}
    nested, more = record({"val": {"loss": 1, "f1": None}}, is_logged=False), record({"val": {"lr": 2}}, is_logged=True)
    assert newest_metrics([logged, nested, more]) == {"val": {"loss": 1, "f1": None, "lr": 2}}
    assert nested.metrics == {"val": {"loss": 1, "f1": None}}


def test_a_history_written_before_there_were_logged_records_is_read(store):
    line = (
        b'{"attempt": 1, "step": 0, "metrics": {"loss": 1.0}, "checkpoint": null, "reported_at": "2026-11-21T00:00:00+00:00"}'
    )
    store.storage.put_bytes(f"{store.layout.metrics}000001-000000.jsonl", line)
    assert [record.is_logged for record in read_history(store)] == [False]


def test_outside_of_a_training_nothing_can_be_logged():
    with pytest.raises(RuntimeError, match=r"log_metrics\(\) may be called only inside"):
        log_metrics({})
