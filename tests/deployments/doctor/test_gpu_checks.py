"""Doctor's checks of GPUs, on the simulated one, and on what torch says of others."""

import resource
import sys
from types import SimpleNamespace

import pytest
import simulated_gpu as gpu
import torch
from forked_programs import run_program
from prefect_torch.deployments.command_line.doctor import gpu_checks
from simulated_processes import on_simulated_gpu

GIB = 2**30
H200 = SimpleNamespace(name="H200", total_memory=139 * GIB)


@pytest.mark.parametrize("driver", ["/dev/nvidiactl", "/dev/dxg"])
def test_a_driver_that_torch_cannot_use_is_a_warning(monkeypatch, driver):
    monkeypatch.setattr("prefect_torch.tasks.rank.resources.device.gpu_type", lambda: None)
    monkeypatch.setattr(gpu_checks.Path, "exists", lambda path: str(path) == driver)
    (finding,) = gpu_checks.check_gpus()
    assert finding.status == "warning"
    assert finding.found.startswith("NVIDIA's driver is installed, but torch sees no GPU: torch ")


@pytest.mark.parametrize(
    ("kind", "hip", "library"),
    [("cuda", None, f"CUDA {torch.version.cuda}"), ("cuda", "6.4", "ROCm 6.4"), ("xpu", None, "XPU")],
)
def test_gpus_of_any_type_are_named(monkeypatch, kind, hip, library):
    module = SimpleNamespace(device_count=lambda: 2, get_device_properties=lambda index: H200)
    monkeypatch.setattr("prefect_torch.tasks.rank.resources.device.gpu_type", lambda: kind)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr("torch.version.hip", hip)
    (finding,) = gpu_checks.check_gpus()
    assert finding.found == f"2: H200 (139.0 GiB), H200 (139.0 GiB); {library}"


@on_simulated_gpu
def test_copies_are_timed_from_page_locked_memory():
    gpu_checks._COPIED_BYTES = 3 * gpu.PAGE_BYTES
    (finding,) = gpu_checks.check_copies()
    assert (finding.check, finding.status) == ("copies", "ok")
    assert finding.found.startswith("to the host: simgpu:0 ")
    assert gpu.host.locked_peak_bytes == 3 * gpu.PAGE_BYTES
    assert not gpu.host.ranges


@on_simulated_gpu
def test_a_driver_that_page_locks_nothing_is_a_warning():
    gpu_checks._COPIED_BYTES, gpu.host.refuse_from = gpu.PAGE_BYTES, 0
    (finding,) = gpu_checks.check_copies()
    assert finding.status == "warning"
    assert finding.found.endswith("; the driver page-locks no memory")
    assert "ulimit -l" in finding.advice


def test_a_machine_without_gpus_is_asked_for_neither():
    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU: tests/gpu")
    assert [*gpu_checks.check_copies(), *gpu_checks.check_collective()] == []


def test_an_all_reduce_of_one_rank_says_its_backend(capsys):
    program = gpu_checks._TRY_COLLECTIVE.format(module=gpu_checks.__name__, device="cpu")
    ended = run_program([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("gloo: an all-reduce of one rank on cpu in ")


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (
            "raise RuntimeError('NCCL error: unhandled system error')",
            "failed: RuntimeError: NCCL error: unhandled system error",
        ),
        ("import os; os.abort()", "failed: the process exited with -6"),
        ("import signal; signal.pause()", "has not ended in 1 s"),
    ],
)
def test_a_collective_that_fails_or_hangs_is_wrong(monkeypatch, program, found):
    monkeypatch.setattr(gpu_checks, "_TRY_COLLECTIVE", program)
    if "pause" in program:
        monkeypatch.setattr(gpu_checks, "_COLLECTIVE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(gpu_checks, "_gpus", lambda: [torch.device("cuda:0")])
    (finding,) = gpu_checks.check_collective()
    assert finding.status == "wrong"
    assert finding.found.endswith(found)


@pytest.mark.parametrize(("limit", "status"), [(64 * 2**20, "warning"), (resource.RLIM_INFINITY, "ok")])
def test_infiniband_needs_locked_memory_without_limit(monkeypatch, tmp_path, limit, status):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert [finding.status for finding in gpu_checks.check_locked_memory(tmp_path)] == [status]
    assert [*gpu_checks.check_locked_memory(tmp_path / "none")] == []
