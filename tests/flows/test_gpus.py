"""Whole trainings on a machine whose GPUs torch only believes in; flows, ranks, guards and locks are real."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agents import WITHOUT_COMPILER
from forked_programs import Popen
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import newest_attempt
from prefect_torch.flows import (
    FailureConfig,
    Hosts,
    NotEnoughMachinesError,
    ScalingConfig,
    SearchConfig,
    evaluate,
    grid,
    sweep,
    train,
)
from prefect_torch.tasks.gang.gpus import allocation
from prefect_torch.tasks.gang.gpus.allocation import GpusBusyError
from prefect_torch.tasks.rank.resources import cpus
from pretended_gpus import pretended_machine

SUPPORT = Path(__file__).parents[1] / "support"
ONE, BOTH = (ScalingConfig(num_workers=number, use_gpu=True, wait_for_gpus_s=0) for number in (1, 2))


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with two GPUs."""
    with pretended_machine(monkeypatch, 2):
        yield


@pytest.fixture
def other(tmp_path):
    """Another flow's process, which trains on one GPU until a file appears; yields it and that file."""
    running, until = tmp_path / "running", tmp_path / "until"
    config = json.dumps({"running": str(running), "until": str(until)})
    arguments = [str(tmp_path / "other"), "gpu_trainings:tell_gpu", config, "{}", "{}"]
    command = [sys.executable, str(SUPPORT / "run_on_gpus.py"), *arguments]
    with Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not running.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield process, until
        finally:
            until.touch()


def test_each_rank_has_a_gpu_before_its_function_is_imported(run):
    scaling = ScalingConfig(num_workers=2, use_gpu=True, timeout_s=1234)
    ranks = train("gpu_trainings:tell_gpu", {}, scaling, run).return_value["ranks"]
    assert ranks == [
        {
            "device": f"fakegpu:{rank}",
            "at_import": rank,
            "visible": "0,1",
            "backend": "gloo",
            "interface": "=lo",
            "timeout_s": 1234.0,
        }
        for rank in range(2)
    ]


def test_ranks_of_another_machine_have_its_gpus_and_no_others(run):
    """The agent takes them; here it is one of this machine, started by `env`. The cluster's variables choose no others."""
    both = {"PYTHONPATH": f"{SUPPORT}:{WITHOUT_COMPILER['PYTHONPATH']}", "FAKEGPU_VISIBLE_DEVICES": "1"}
    cluster = Hosts(["here"], command="env", leader_address="127.0.0.1", wait_s=0, environment=both)
    two, three = (ScalingConfig(num_workers=number, use_gpu=True, cluster=cluster) for number in (2, 3))
    ranks = train("gpu_trainings:tell_gpu", {}, two, run).return_value["ranks"]
    assert [(rank["visible"], rank["device"]) for rank in ranks] == [("0,1", "fakegpu:0"), ("0,1", "fakegpu:1")]
    advice = r"give num_workers=\(fewest, most\), or give the cluster a longer wait_s"
    with pytest.raises(NotEnoughMachinesError, match=rf"^3 ranks wanted, the cluster has room for 2: here: 2; {advice}$"):
        train("gpu_trainings:tell_gpu", {}, three, run, failure=FailureConfig(max_infrastructure_failures=0))


def test_trainings_and_evaluations_of_one_machine_never_share_a_gpu(other, run, tmp_path):
    process, until = other
    with pytest.raises(GpusBusyError, match=rf"needs 2 free GPUs.*GPU 0 by flow run .* \(process {process.pid}\)"):
        train("gpu_trainings:tell_gpu", {}, BOTH, run)
    told = train("gpu_trainings:tell_gpu", {"fail": True}, ONE, run, failure=FailureConfig(max_failures=1)).return_value
    assert [rank["visible"] for rank in told["ranks"]] == ["1"]
    (evaluated,) = evaluate("gpu_trainings:evaluate_on_gpu", str(tmp_path / "other"), "run", scaling=ONE).values()
    assert evaluated == {"gpu": "1"}
    until.touch()
    assert json.loads(process.communicate(timeout=60)[0].splitlines()[-1])["ranks"][0]["visible"] == "0"


def test_a_range_of_ranks_has_as_many_as_there_are_free_gpus(other, run):
    process, until = other
    scaling = ScalingConfig(num_workers=(1, 4), use_gpu=True, wait_for_gpus_s=0)
    told = train("gpu_trainings:tell_gpu", {}, scaling, run).return_value
    assert [rank["visible"] for rank in told["ranks"]] == ["1"]
    until.touch()
    assert process.wait(60) == 0
    told = train("gpu_trainings:tell_gpu", {}, scaling, run.model_copy(update={"name": "next"})).return_value
    assert [rank["device"] for rank in told["ranks"]] == ["fakegpu:0", "fakegpu:1"]
    sizes = {name: newest_attempt(CheckpointStore.open(run.storage, name)).world_size for name in ("run", "next")}
    assert sizes == {"run": 1, "next": 2}
    with pytest.raises(ValueError, match=r"num_workers=\(3, 4\) with use_gpu=True needs 3 GPUs, and this machine has 2"):
        train("gpu_trainings:tell_gpu", {}, ScalingConfig(num_workers=(3, 4), use_gpu=True), run)


def test_a_training_waits_for_the_gpus_of_another(other, run, caplog):
    process, until = other

    def end_the_other(record):
        return "waiting for GPUs" not in record.getMessage() or until.touch() is None

    with caplog.filtering(end_the_other):
        told = train("gpu_trainings:tell_gpu", {}, ScalingConfig(num_workers=2, use_gpu=True), run).return_value
    assert [rank["visible"] for rank in told["ranks"]] == ["0,1", "0,1"]
    assert process.wait(60) == 0


def test_trials_at_once_have_a_gpu_each_and_one_too_many_waits(run, tmp_path, monkeypatch):
    """The GPUs are listed once for all of them, which takes seconds."""
    listings, list_gpus = [], allocation.list_gpus
    monkeypatch.setattr(allocation, "list_gpus", lambda wait: listings.append(list_gpus(wait)) or listings[-1])
    (folder := tmp_path / "held").mkdir()
    search = SearchConfig(metric="loss", max_concurrent=3)
    scaling = ScalingConfig(num_workers=1, use_gpu=True)
    found = sweep("gpu_trainings:hold_gpu", {"x": grid([1, 2, 3, 4])}, {"folder": str(folder)}, search, scaling, run)
    assert found.errors == {}
    assert {trial.metrics["gpu"] for trial in found.trials} == {0, 1}
    assert len(listings) == 1


@pytest.mark.parametrize("num_workers", [1, (1, 2), 2], ids=str)
def test_trials_share_the_cpus_by_the_ranks_that_have_gpus_at_once(run, monkeypatch, num_workers):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cpus, "count_cpus", lambda: 16)
    search = SearchConfig(metric="loss", max_concurrent=3)
    scaling = ScalingConfig(num_workers=num_workers, use_gpu=True)
    found = sweep("sweep_trainings:tell_threads", {"x": grid([1, 2, 3])}, {}, search, scaling, run)
    assert [trial.metrics["loss"] for trial in found.trials] == [8, 8, 8]


def test_a_gpu_whose_memory_others_hold_is_no_fault_of_the_function(run, monkeypatch, tmp_path):
    (tmp_path / "free").write_text("10")
    monkeypatch.setenv("PRETENDED_MEMORY", str(tmp_path / "free"))
    train("gpu_trainings:run_out_of_memory", {}, ONE, run, failure=FailureConfig(max_infrastructure_failures=1))
    (tmp_path / "free").write_text("79")
    again = run.model_copy(update={"name": "again"})
    with pytest.raises(Exception, match="CUDA out of memory"):
        train("gpu_trainings:run_out_of_memory", {}, ONE, again, failure=FailureConfig(max_infrastructure_failures=1))
    broken = run.model_copy(update={"name": "broken"})
    with pytest.raises(Exception, match="CUDA out of memory"):
        train("gpu_trainings:run_out_of_memory", {"breaks": str(tmp_path / "free")}, ONE, broken)


def test_a_broken_gpu_is_left_out_of_the_next_attempt(run, monkeypatch):
    monkeypatch.setenv("PRETENDED_GPUS", "3")
    result = train("gpu_trainings:break_gpu", {}, BOTH, run, failure=FailureConfig(max_infrastructure_failures=1))
    assert (result.return_value, result.attempts) == ("1,2", 2)
