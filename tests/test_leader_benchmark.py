"""The benchmark of a leader's memory still measures the leader."""

import importlib
import re
import sys
from pathlib import Path

from prefect_torch.tasks.training import retention_schedule


def test_the_memory_of_a_leader_that_prunes_is_measured(monkeypatch):
    rows = []
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "benchmarks"))
    program = importlib.import_module("leader_memory")
    monkeypatch.setattr(program, "write_results", lambda _name, _repeats, lines: rows.extend(lines))
    monkeypatch.setattr(retention_schedule, "prune_checkpoints", retention_schedule.prune_checkpoints)  # restored after it
    monkeypatch.setattr(sys, "argv", ["leader_memory.py", "--reports", "100"])
    program.main()
    held = [re.search(r"^ *(\d+) reports .* (\d+) of (\d+) checkpoints held", row).groups() for row in rows]
    assert [int(reports) for reports, _, _ in held] == [*range(10, 101, 10)]
    assert int(held[-1][1]) < 100, "its prunes delete"
