"""The benchmark of checkpoints still measures, at its smallest, and judges what it measured."""

import importlib
import sys
from pathlib import Path

import pytest
from forked_programs import run_program

BENCHMARK = Path(__file__).parent / "benchmarks" / "state"


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    return importlib.import_module("table"), importlib.import_module("targets")


def one_round(*, stall, goes_on, after=1.0, cpu=0.5):
    times = {"stall": stall, "floor": 0.01, "before": 1.0, "after": after if goes_on else None, "durable": 0.2}
    return {**times, "cpu": None if goes_on else cpu, "goes_on": goes_on}


def row(tables, way, *, stall=0.01, resume=1.0, is_right=True):
    rounds = [one_round(stall=3.5 * stall, goes_on=True), one_round(stall=stall, goes_on=False)]
    ranks = [{"rounds": rounds, "bytes": 2**30, "memory": 2**30}] * 2
    return tables[0].summarize(64, "disk", way, [ranks], [[{"resume": resume, "cold": 1.0, "is_right": is_right}] * 2])


@pytest.mark.timeout(180)
def test_a_state_is_saved_resumed_and_judged_and_leaves_nothing(tmp_path):
    command = [sys.executable, str(BENCHMARK / "__main__.py"), "--quick", "--folder", str(tmp_path)]
    done = run_program(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.splitlines()[1].split()
    assert words[:5] == ["64", "disk", "ours:", "state,", "async"]
    assert len(words) == 5 + 11, done.stdout  # a number in each column, and no problem
    assert "-" not in words, done.stdout
    assert "a later stall / a warm memcpy of the owned bytes" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_slower_rank_counts_and_only_waiting_rounds_tell_of_the_cpu(tables):
    slow, fast = one_round(stall=0.3, goes_on=True, after=1.1), one_round(stall=0.1, goes_on=True)
    rounds = [[slow, one_round(stall=0.1, goes_on=False)], [fast, one_round(stall=0.2, goes_on=False, cpu=None)]]
    ranks = [{"rounds": of, "bytes": 2**30, "memory": 0} for of in rounds]
    summed = tables[0].summarize(64, "disk", "dcp.save", [ranks], [])
    assert (summed.first, summed.p50, summed.cpu) == (0.3, 0.2, 0.5)
    assert summed.next_steps == pytest.approx(0.1)


def test_a_missed_target_says_by_how_much(tables):
    rows = [row(tables, "ours: state, async", stall=0.02, resume=1.5), row(tables, "torch.save + copy", stall=0.05)]
    told = list(tables[1].judge(rows))
    assert any(
        "MISSED a later stall / a warm memcpy of the owned bytes: 2, at most 1.25, 1.60 x too much" in line for line in told
    )
    assert any("met    a later stall / that of the best peer, torch.save + copy: 0.4, at most 0.5" in line for line in told)
    assert any("MISSED the first stall / a later one: 3.5, at most 3, 1.17 x too much" in line for line in told)
    assert any("MISSED resume / with torch.load, torch.save + copy: 1.5, at most 1" in line for line in told)


def test_a_state_that_is_not_the_saved_one_is_called_wrong(tables):
    assert "WRONG" in row(tables, "dcp.save", is_right=False).text
    assert "WRONG" not in row(tables, "dcp.save").text
