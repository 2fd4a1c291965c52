"""The lines of one rank in Prefect's log."""

import logging

import pytest
from prefect_torch.tasks.gang import rank_logs
from prefect_torch.tasks.gang.rank_logs import RankLog

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
