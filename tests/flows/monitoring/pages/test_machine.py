"""What a page says of GPUs, from what the driver's program prints."""

import logging
import os
import signal
import subprocess

import pytest
from prefect_torch.flows.monitoring.pages import machine
from prefect_torch.flows.monitoring.pages.machine import GpuMonitor, GpuSample, parse_sample, read_gpus

LINE = "1, GPU-1f2e, NVIDIA H200, 93, 61234, 143771"


def test_a_line_of_the_driver_is_a_sample():
    assert parse_sample(LINE) == GpuSample(1, "GPU-1f2e", "NVIDIA H200", 0.93, 61234 << 20, 143771 << 20)


def test_what_the_driver_does_not_know_is_none_and_other_lines_are_no_samples():
    assert parse_sample("0, GPU-a, NVIDIA A100, [N/A], [N/A], 40960") == GpuSample(
        0, "GPU-a", "NVIDIA A100", None, None, 40960 << 20
    )
    assert parse_sample("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") is None
    assert parse_sample("") is None


def test_the_driver_s_program_is_asked_for_the_fields_that_are_parsed(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$1" in --query-gpu=index,uuid,name,utilization.gpu,memory.used,memory.total)\n'
                       f'echo "{LINE}"; echo "0, GPU-0, NVIDIA H200, 0, 4, 143771";; esac\n')  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert [sample.uuid for sample in read_gpus()] == ["GPU-1f2e", "GPU-0"]
    program.unlink()
    assert read_gpus() == []


def test_only_the_gpus_of_the_ranks_are_sampled_whatever_form_their_uuids_have():
    shares = iter([0.5, 1.0, None])

    def read():
        share = next(shares)
        return [GpuSample(index, f"GPU-{index}", "H200", share, 1, 2) for index in (1, 0, 2)]

    wanted = []
    monitor = GpuMonitor(lambda: wanted, read)
    monitor.sample()  # no rank has a GPU yet, so nothing is read
    wanted += ["0", "GPU-1"]
    for _ in range(3):
        monitor.sample()
    assert [(use.newest.uuid, use.newest.utilization, use.mean_utilization) for use in monitor.uses] == [
        ("GPU-0", None, 0.75),
        ("GPU-1", None, 0.75),
    ]


@pytest.mark.parametrize(("is_killable", "times"), [(True, 2), (False, 1)])
def test_a_driver_that_hangs_is_asked_again_only_if_its_program_could_be_ended(
    tmp_path, monkeypatch, caplog, is_killable, times
):
    left: list[subprocess.Popen[str]] = []

    def kill(process):
        left.append(process)

    if not is_killable:
        monkeypatch.setattr(subprocess.Popen, "kill", kill)
    asked = tmp_path / "asked"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho once >> {asked}\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(machine, "_LONGEST_S", 2.0)
    monkeypatch.setattr(machine, "get_run_logger", logging.getLogger)
    monitor = GpuMonitor(lambda: ["GPU-0"])
    try:
        monitor.sample()
        monitor.sample()
    finally:
        for process in left:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert asked.read_text().split() == ["once"] * times
    assert ["the driver of the GPUs hangs" in it.getMessage() for it in caplog.records] == [True] * (not is_killable)
    assert monitor.uses == []
