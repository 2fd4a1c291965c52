"""The level of a printed line."""

import logging
import time

import pytest
from prefect_torch.tasks.gang.log_levels import LineLevels


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("WARNING:root:slow", logging.WARNING),
        ("2026-01-31 23:59:59,123 - my.module - ERROR - broken", logging.ERROR),
        ("2026-01-31T23:59:59Z DEBUG seen", logging.DEBUG),
        ("[INFO] begun", logging.INFO),
        ("[2026-01-31 10:00:00,000][train][CRITICAL] - out", logging.CRITICAL),
        ("20:41:00 | WARNING | train:f:1 - slow", logging.WARNING),
        ("[rank1]:[W1122 20:41:00.123456 ProcessGroup.cpp:1] late", logging.WARNING),
        ("E1122 20:41:00.123456 4711 torch/x.py:1] broken", logging.ERROR),
        ("UserWarning: an error is no level", logging.INFO),
        ("the ERROR rate is 0.1", logging.INFO),
        ("epoch 3 loss 0.1", logging.INFO),
        ("Error rate: 3", logging.INFO),
        ("", logging.INFO),
    ],
)
def test_a_line_has_the_level_that_it_begins_with(line, level):
    assert LineLevels().level_of(line) == level


@pytest.mark.parametrize(
    "line", [" ".join(["1" * 200] * 3), " ".join(["1," * 2000] * 2), f"1{' ' * 8000}", ",".join(["0"] * 4096)]
)
def test_a_line_of_numbers_costs_next_to_nothing(line):
    started_s = time.process_time()
    assert LineLevels().level_of(f"{line} x") == logging.INFO
    assert time.process_time() - started_s < 0.1


def test_a_traceback_is_an_error_up_to_its_exception():
    lines = [
        "begun",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        "    f()",
        "ValueError: no",
        "epoch 3",
    ]
    levels = LineLevels()
    assert [levels.level_of(line) for line in lines] == [logging.INFO, *[logging.ERROR] * 4, logging.INFO]
