"""A rank's GPU before and after its function: memory that the driver frees late, and memory that others hold."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from prefect_torch.tasks.rank.resources import device
from prefect_torch.tasks.rank.resources.device import gpu_type, is_memory_held_by_others

GIB = 1 << 30
GPU = torch.device("cpu")  # only named


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(device, "time", clock)
    return clock


def gpu_with(clock, free_at, list_processes=lambda _: "process 7 uses 40 GiB", **properties):
    return SimpleNamespace(
        mem_get_info=lambda _: (free_at(clock.now_s), 80 * GIB),
        list_gpu_processes=list_processes,
        get_device_properties=lambda _: SimpleNamespace(**properties),
    )


def test_a_free_gpu_is_not_waited_for(clock):
    device._wait_for_memory(gpu_with(clock, lambda _: 79 * GIB), GPU)
    assert clock.now_s == 0.0


def test_memory_that_the_driver_frees_late_is_waited_for(clock, capsys):
    device._wait_for_memory(gpu_with(clock, lambda now_s: int(min(79, 10 + 5 * now_s) * GIB)), GPU)
    assert 13 <= clock.now_s <= 15
    assert capsys.readouterr().err == ""


def test_memory_that_stays_taken_is_told_with_who_holds_it(clock, capsys):
    device._wait_for_memory(gpu_with(clock, lambda _: 40 * GIB), GPU)
    assert 3 <= clock.now_s <= 4
    assert capsys.readouterr().err == (
        "cpu has 40.0 GiB of 80.0 GiB free; other processes hold the rest. process 7 uses 40 GiB\n"
    )


class NVMLError(Exception):
    """As pynvml's."""


def refuse(_):
    raise NVMLError("Not Supported")


@pytest.mark.parametrize(
    ("list_running", "visible", "told"),
    [
        (lambda _: [SimpleNamespace(pid=7, usedGpuMemory=40 * GIB)], "0", "process          7 uses    40960.000 MB GPU memory"),
        (lambda _: [SimpleNamespace(pid=7, usedGpuMemory=None)], "0", r"Which ones cannot be told \(TypeError: "),  # WSL, vGPU
        (refuse, "0", r"Which ones cannot be told \(NVMLError: Not Supported\)"),
        (refuse, "MIG-2ff1dc37-3b50-5c44-9b4e-6b1f8f0c8d3a", r"Which ones cannot be told \("),
    ],
)
def test_a_driver_that_does_not_name_the_processes_costs_a_rank_nothing(
    clock, capsys, monkeypatch, list_running, visible, told
):
    """By torch's own function, on a pynvml that only its answers are made for."""
    nvml = SimpleNamespace(
        NVMLError_DriverNotLoaded=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=list_running,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = gpu_with(clock, lambda _: 40 * GIB, torch.cuda.list_gpu_processes)
    device._wait_for_memory(gpu, torch.device("cuda", 0))
    assert re.search(
        rf"cuda:0 has 40.0 GiB of 80.0 GiB free; other processes hold the rest. .*{told}", capsys.readouterr().err, re.DOTALL
    )


@pytest.mark.parametrize("name", ["is_integrated", "is_integrated_gpu"])
def test_the_memory_of_a_gpu_that_has_none_of_its_own_is_neither_awaited_nor_of_others(name, clock, capsys, monkeypatch):
    """As of Jetson and DGX Spark, where the page cache fills it."""
    gpu = gpu_with(clock, lambda _: 5 * GIB, **{name: 1})
    device._wait_for_memory(gpu, GPU)
    assert (clock.now_s, capsys.readouterr().err) == (0.0, "")
    gpu.mem_get_info, gpu.memory_reserved, gpu.current_device = lambda: (5 * GIB, 80 * GIB), lambda: 0, lambda: 0
    monkeypatch.setattr(device, "gpu_type", lambda: "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpu)
    assert not is_memory_held_by_others()


def test_memory_that_becomes_free_for_ever_is_not_waited_for_that_long(clock, capsys):
    device._wait_for_memory(gpu_with(clock, lambda now_s: int(now_s * GIB)), GPU)
    assert 30 <= clock.now_s <= 31
    assert "cpu has 30" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("free", "reserved", "by_others"), [(1, 78, False), (30, 0, True), (30, 49, False), (30, 20, True)]
)  # GiB of 80, of which a context and NCCL take some
def test_memory_that_is_neither_free_nor_this_ranks_is_that_of_others(free, reserved, by_others, monkeypatch):
    gpu = SimpleNamespace(
        mem_get_info=lambda: (free * GIB, 80 * GIB),
        memory_reserved=lambda: reserved * GIB,
        current_device=lambda: 0,
        get_device_properties=lambda _: SimpleNamespace(is_integrated=0),
    )
    monkeypatch.setattr(device, "gpu_type", lambda: "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpu)
    assert is_memory_held_by_others() == by_others


def test_a_rank_takes_its_gpu_waits_for_its_memory_and_stays_on_the_cpus_beside_it(monkeypatch, clock):
    told = []
    properties = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in (0x17, 0xCA)]
    gpus = SimpleNamespace(
        set_device=told.append,
        mem_get_info=lambda device: told.append(f"memory of {device}") or (80 * GIB, 80 * GIB),
        device_count=lambda: 2,
        get_device_properties=properties.__getitem__,
    )
    monkeypatch.setattr(device, "gpu_type", lambda: "cuda")
    monkeypatch.setattr(device, "stay_near", lambda addresses, own: told.append((addresses, own)))
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpus)
    assert device.take_device(1) == torch.device("cuda", 1)
    assert told == [torch.device("cuda", 1), "memory of cuda:1", (["0000:17:00.0", "0000:ca:00.0"], 1)]


def test_gpus_of_rocm_that_have_no_uuid_are_told_apart(monkeypatch, capsys):
    address = {"pci_domain_id": 0, "pci_device_id": 0}
    properties = [SimpleNamespace(uuid="58580000", name="AMD", pci_bus_id=bus, **address) for bus in (0x17, 0xCA)]
    module = SimpleNamespace(device_count=lambda: 2, get_device_properties=properties.__getitem__)
    monkeypatch.setattr(device, "gpu_type", lambda: "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.version, "hip", "6.4.2")
    device.print_gpus()
    listed = json.loads(capsys.readouterr().out)["gpus"]
    assert [gpu["uuid"] for gpu in listed] == ["58580000-0000:17:00.0", "58580000-0000:ca:00.0"]


def test_what_the_function_has_launched_is_awaited_and_its_error_is_logged(monkeypatch, capsys):
    def synchronize(index):
        raise torch.AcceleratorError(f"CUDA error: uncorrectable ECC error encountered on {index}")

    monkeypatch.setattr(device, "gpu_type", lambda: "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(synchronize=synchronize))
    device.wait_for_kernels(3)
    assert "has failed on the GPU: CUDA error: uncorrectable ECC error encountered on 3" in capsys.readouterr().err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has one")
def test_a_machine_without_a_gpu_has_none():
    assert gpu_type() is None
    assert not is_memory_held_by_others()
    with pytest.raises(RuntimeError, match=r"torch finds no GPU in this rank's process.*: run `prefect-torch doctor` on this"):
        device.take_device(0)
