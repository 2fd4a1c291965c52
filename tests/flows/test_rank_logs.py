"""Which lines of ranks go to Prefect, and where the rest is."""

from pathlib import Path

import pytest
from forked_programs import started_as_usual
from prefect_torch.deployments.command_line.program import run as run_command
from prefect_torch.flows import FailureConfig, RankFailedError, RunConfig, ScalingConfig, train

PRINTED = ("WARNING:library:of rank", "detail of rank", "WARNING:train:of rank")


def test_lines_that_do_not_go_to_prefect_are_stored_and_those_of_a_failed_rank_are_shown(tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    storage = str(tmp_path / "store")
    run = RunConfig(name="run", storage=storage, log_ranks="local0", log_level="WARNING")
    failure = FailureConfig(max_infrastructure_failures=0)
    with started_as_usual(), pytest.raises(RankFailedError, match="rank 1 of attempt 1 failed"):
        train("trainings:print_and_die", {}, ScalingConfig(num_workers=2), run, failure=failure)
    logged = [(it.levelname, it.getMessage()) for it in caplog.records if "of rank" in it.getMessage()]
    assert sorted(logged) == [
        ("INFO", "detail of rank 1"),
        ("WARNING", "WARNING:library:of rank 0"),
        ("WARNING", "WARNING:library:of rank 1"),
        ("WARNING", "WARNING:train:of rank 0"),
        ("WARNING", "WARNING:train:of rank 1"),
    ]
    assert {it.name for it in Path(storage, "run/logs/000001").iterdir()} == {"rank-0.000000.log", "rank-1.000000.log"}
    capsys.readouterr()
    assert run_command(["logs", storage, "run"]) == 0
    printed = capsys.readouterr().out
    lines = [f"{line.split(': ')[0]} {line.split(' ', 2)[2]}" for line in printed.splitlines()]
    assert [line for line in lines if "of rank" in line] == [
        f"rank-{rank} {line} {rank}" for rank in range(2) for line in PRINTED
    ]
