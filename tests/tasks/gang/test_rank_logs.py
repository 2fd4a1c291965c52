"""The lines of one rank in Prefect's log."""

import json
import logging
import threading
from types import SimpleNamespace

import pytest
from prefect.logging.handlers import APILogWorker
from prefect_torch.ckpt import StorageError
from prefect_torch.tasks.gang import rank_logs
from prefect_torch.tasks.gang.rank_logs import RankLog
from prefect_torch.tasks.prefect_api import outage

LINES = ["DEBUG:x:1", "epoch 1", "WARNING:x:2", "Traceback (most recent call last):", "  at x", "ValueError: no"]


@pytest.fixture
def logged(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "run")
    monkeypatch.setattr(rank_logs, "get_run_logger", lambda: logging.getLogger("run"))
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_line_has_the_level_that_it_begins_with_and_none_is_below_prefects(logged):
    RankLog(0, prefix="rank 0: ").write(LINES)
    levels = ["INFO", "INFO", "WARNING", "ERROR", "ERROR", "ERROR"]
    assert logged() == [(level, f"rank 0: {line}") for level, line in zip(levels, LINES, strict=True)]


def test_lines_that_were_withheld_have_their_levels_once_they_are_shown(logged):
    log = RankLog(0, logging.CRITICAL + 1)
    log.write(LINES[:3])
    assert logged() == []
    log.write_all()
    log.write(["ERROR:x:3"])
    assert logged() == [("INFO", "DEBUG:x:1"), ("INFO", "epoch 1"), ("WARNING", "WARNING:x:2"), ("ERROR", "ERROR:x:3")]


def test_lines_that_prefects_api_does_not_take_do_not_fill_the_memory(logged, monkeypatch):
    monkeypatch.setattr(outage, "_MOST_WAITING", 10)
    monkeypatch.setattr(outage, "get_run_logger", lambda: logging.getLogger("run"))
    waits = APILogWorker()  # it is not started, and sends nothing
    monkeypatch.setattr(APILogWorker, "_instances", {0: waits})
    monkeypatch.setattr(RankLog, "_log", lambda self, level, line: waits.send({"message": line}))
    log = RankLog(0)
    for number in range(25):
        log.write([str(number)])
    waiting = [json.loads(item) if isinstance(item, bytes) else item for item in waits._queue.queue]  # bytes since Prefect 3.9
    assert [item["message"] for item in waiting] == [str(number) for number in range(18, 25)]
    assert [text.split()[0] for _, text in logged()] == ["6", "12", "18"]


@pytest.mark.parametrize(("lowest", "kept"), [(logging.INFO, []), (logging.WARNING, ["epoch 1"])])
def test_lines_that_prefect_drops_for_its_level_are_stored(logged, caplog, lowest, kept):
    class Files:
        num_lost = 0

        def __init__(self):
            self.lines = []

        def append(self, rank, lines):
            self.lines += lines

        def flush(self):
            pass

        close = flush

    caplog.set_level(lowest, "run")
    with rank_logs.rank_logs("all", None, files := Files()) as logs:
        logs.of(SimpleNamespace(rank=0, local_rank=0)).write(["epoch 1"])
    assert files.lines == kept


def test_lines_that_a_storage_refuses_each_time_cost_one_warning_and_one_at_the_end(logged, monkeypatch):
    """As where the log may not be stored; each refusal names its request, or how long it took."""
    monkeypatch.setattr(rank_logs, "_FLUSH_S", 0.0)
    flushed, enough = [], threading.Event()

    def flush():
        flushed.append(1)
        if len(flushed) == 6:
            enough.set()
        raise PermissionError("refused in 4 ms") if len(flushed) < 4 else StorageError(f"away {min(5, len(flushed))}")

    files = SimpleNamespace(num_lost=0, flush=flush, close=flush)
    with rank_logs.rank_logs("rank0", None, files):
        assert enough.wait(60)
    what = "lines of ranks could not be stored beside the run"
    again = ", and are tried again"
    refused, *away = [text for _, text in logged()]
    assert refused == f"{what}{again}: refused in 4 ms"
    assert away[:2] == [f"{what}{again}: away 4", f"{what}{again}: away 5"]
    assert away[-1] == f"{what}: away 5"
