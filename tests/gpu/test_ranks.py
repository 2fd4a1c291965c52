"""Whole trainings on GPUs: which rank has which, and how trainings end and start again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import read_outcomes
from prefect_torch.deployments.command_line.doctor import gpu_checks
from prefect_torch.flows import FailureConfig, ScalingConfig, train
from prefect_torch.tasks.gang.gpus.allocation import GpusBusyError

SUPPORT = Path(__file__).parents[1] / "support"
ONCE = FailureConfig(max_failures=1)


def ranks(number, **more):
    return ScalingConfig(num_workers=number, use_gpu=True, **more)


def returned(name, scaling, run, config=None, **more):
    return train(f"gpu_rank_trainings:{name}", config or {}, scaling, run, **more).return_value


class Flow:
    """A flow in a process of its own, in whose output to look."""

    def __init__(self, name, config, storage, scaling, failure=None):
        arguments = [storage, f"gpu_rank_trainings:{name}", *map(json.dumps, (config, scaling, failure or {}))]
        command = [sys.executable, str(SUPPORT / "run_on_gpus.py"), *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait_for(self, folder, pattern, longest_s=120):
        deadline = time.monotonic() + longest_s
        while not (found := list(folder.glob(pattern))):
            assert self.process.poll() is None, self.process.communicate()[0][-4000:]
            assert time.monotonic() < deadline, f"no {pattern}"
            time.sleep(0.05)
        return found[0]


@pytest.fixture
def told(tmp_path):
    folder = tmp_path / "told"
    folder.mkdir()
    return folder


@pytest.mark.gpus(2)
def test_each_rank_has_its_gpu_when_its_module_is_imported(run):
    everybody = returned("tell_devices", ranks(2), run)
    assert everybody == [(rank, rank, rank, "nccl") for rank in range(2)]


@pytest.mark.gpus(1)
def test_the_flows_process_touches_no_gpu_whatever_ranks_return(run):
    value = returned("return_tensors", ranks(1), run)
    assert {tensor.device.type for tensor in (*value["state"].values(), *value["parameters"])} == {"cpu"}
    with pytest.raises(ValueError, match="with a tensor") as caught:
        returned("raise_with_tensors", ranks(1), run.model_copy(update={"name": "other"}))
    assert caught.value.args[1].device.type == "cpu"
    program = (
        "import json, subprocess, sys; sys.path.insert(0, sys.argv[2])\n"
        "from prefect_torch.flows import *\n"
        "run = RunConfig(name='third', storage=sys.argv[1])\n"
        "train('gpu_rank_trainings:return_tensors', {}, ScalingConfig(use_gpu=True), run)\n"
        "import os, torch; assert not torch.cuda.is_initialized()\n"
        "listed = subprocess.run(['nvidia-smi', '--query-compute-apps=pid', '--format=csv,noheader'], capture_output=True)\n"
        "assert str(os.getpid()) not in listed.stdout.decode().split(), listed\n"
    )
    subprocess.run([sys.executable, "-c", program, run.storage, str(SUPPORT)], check=True)


@pytest.mark.gpus(1)
def test_two_trainings_never_share_a_gpu(run, told):
    everything = torch.cuda.device_count()
    until = told / "until"
    config = {"running": str(told), "until": str(until)}
    other = Flow("fill_most_of_memory", config, run.storage, {"num_workers": everything})
    other.wait_for(told, "1-*")
    with pytest.raises(GpusBusyError, match=f"by flow run .* \\(process {other.process.pid}\\)"):
        returned("tell_devices", ranks(1, wait_for_gpus_s=0), run.model_copy(update={"name": "mine"}))
    until.touch()
    assert other.process.wait(120) == 0


@pytest.mark.gpus(1)
def test_a_flow_that_is_killed_and_started_again_finds_its_gpu_free(run, told, figure):
    until = told / "until"
    config = {"running": str(told), "until": str(until)}
    killed = Flow("fill_most_of_memory", config, run.storage, {})
    killed.wait_for(told, "1-*")
    time.sleep(2)  # a report or two
    killed.process.kill()
    started_s = time.monotonic()
    again = Flow("fill_most_of_memory", config, run.storage, {}, {"max_infrastructure_failures": 0})
    again.wait_for(told, "2-*")
    figure("from SIGKILL of the flow to the ranks' memory", time.monotonic() - started_s, "s")
    until.touch()
    assert again.process.wait(120) == 0, again.process.communicate()[0][-4000:]
    killed.process.wait()


@pytest.mark.gpus(2)
def test_a_rank_that_is_killed_in_a_collective_is_followed_by_the_next_attempt(run, told, figure):
    returned("die_in_a_collective", ranks(2), run, {"told": str(told)})
    lost_s = float((told / "began-2").read_text()) - float((told / "killed").read_text())
    figure("from SIGKILL of a rank to the next attempt's first all_reduce", lost_s, "s")
    assert lost_s < 30


@pytest.mark.gpus(2)
def test_a_training_completes_while_a_cuda_graph_holds_a_collective(run, told, figure):
    started_s = time.monotonic()
    assert returned("keep_a_graph_with_a_collective", ranks(2), run, {"told": str(told)}).item() == 4
    figure("a training that leaves a graph with a collective", time.monotonic() - started_s, "s")
    assert {path.name for path in told.iterdir()} == {"atexit-0", "atexit-1"}


@pytest.mark.gpus(2)
def test_a_flow_that_is_terminated_ends_in_time_though_a_collective_hangs(run, told, figure):
    flow = Flow("hang_in_a_collective", {"told": str(told), "always": True}, run.storage, {"num_workers": 2}, {"grace_s": 5})
    for rank in range(2):
        flow.wait_for(told, f"hangs-1-{rank}")
    time.sleep(2)
    started_s = time.monotonic()
    flow.process.send_signal(signal.SIGTERM)
    flow.process.wait(60)
    figure("from SIGTERM to the end, with 5 s of grace", time.monotonic() - started_s, "s")
    assert time.monotonic() - started_s < 5 + 4 + 10  # Prefect's own end included


@pytest.mark.gpus(2)
def test_a_training_that_hangs_shows_stacks_and_nccls_record(run, told):
    failure = {"hang_timeout_s": 20, "max_infrastructure_failures": 1}
    flow = Flow("hang_in_a_collective", {"told": str(told)}, run.storage, {"num_workers": 2}, failure)
    output = flow.process.communicate(timeout=170)[0]
    assert "no report came for 20 s" in output
    assert "in hang_in_a_collective" in output  # faulthandler's stacks
    records = {
        line.rpartition("are in ")[2].partition(":")[0] for line in output.splitlines() if "last collectives are in" in line
    }
    assert len(records) == 2
    assert all(Path(record).stat().st_size > 0 for record in records)


@pytest.mark.gpus(2)
def test_a_model_larger_than_a_gpu_is_sharded_without_ever_being_whole(run, figure):
    value = returned("shard_more_than_a_gpu_holds", ranks(2), run)
    figure("peak of a GPU's memory", value["peak"], "of all")
    assert value["is_finite"]
    assert value["share"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.gpus(2)
def test_what_fully_shard_leaves_alone_is_on_the_gpu(run):
    assert returned("ignore_a_parameter", ranks(2), run) == (False, "cuda:0")


@pytest.mark.parametrize(
    ("number", "tensor_parallel"),
    [pytest.param(2, False, marks=pytest.mark.gpus(2)), pytest.param(4, True, marks=pytest.mark.gpus(4))],
)
def test_what_some_ranks_stored_fewer_load(run, number, tensor_parallel):
    first = returned("train_sharded", ranks(number), run, {"tensor_parallel": tensor_parallel})
    alone = returned("train_sharded", ranks(1), run)
    assert torch.equal(alone["restored"], first["trained"])


@pytest.mark.gpus(2)
def test_tensors_of_the_cpu_and_of_gpus_have_a_backend_each(run):
    assert returned("train_on_both_backends", ranks(2, backend="cpu:gloo,cuda:nccl"), run, failure=ONCE) == 0


@pytest.mark.gpus(2)
@pytest.mark.parametrize("framework", ["lightning", "transformers", "accelerate"])
def test_frameworks_train_report_and_resume_on_the_ranks_gpus(run, framework, tmp_path):
    value = returned(f"train_with_{framework}", ranks(2), run, {"output": str(tmp_path / "output")}, failure=ONCE)
    assert value == {"devices": ["cuda:0", "cuda:1"], "resumed": True}


@pytest.mark.gpus(8)
def test_eight_ranks_copy_report_and_load_at_once(run, figure):
    value = returned("measure_all_at_once", ranks(8), run, failure=ONCE)
    assert value["is_equal"] == [True] * 8
    for rank, seconds in enumerate(value["seconds"]):
        for name, taken_s in seconds.items():
            figure(f"{name}, rank {rank}", taken_s, "s")


@pytest.mark.gpus(1)
def test_running_out_of_memory_alone_is_the_functions_failure(run):
    with pytest.raises(torch.OutOfMemoryError):
        returned("take_too_much", ranks(1), run)
    (outcome,) = read_outcomes(CheckpointStore.open(run.storage, "run"))
    assert outcome.kind == "out_of_memory"


@pytest.mark.gpus(1)
def test_doctor_finds_copies_from_page_locked_memory_and_a_collective_that_works(figure):
    findings = [*gpu_checks.check_gpus(), *gpu_checks.check_copies(), *gpu_checks.check_collective()]
    speed, _ = gpu_checks._bytes_per_s(torch.device("cuda:0"))
    figure("copy to the host", speed / 1e9, "GB/s")
    assert [(finding.check, finding.status) for finding in findings] == [("gpus", "ok"), ("copies", "ok"), ("collective", "ok")]
