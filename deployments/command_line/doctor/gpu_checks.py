"""Checks of the GPUs by what a training does with them: copies of its state to the host, and a collective.

An error here would also fail trainings, so `doctor` reports it as wrong.
"""

import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_torch.ckpt.text import show_bytes

from .findings import Finding

if TYPE_CHECKING:
    import torch

_COPIED_BYTES = 2**30
_COLLECTIVE_TIMEOUT_S = 60.0
_INFINIBAND = Path("/dev/infiniband")
# Not "-m", which looks in the working directory first.
_TRY_COLLECTIVE = "import sys; sys.path[:] = filter(None, sys.path); import {module} as it; it.print_collective({device!r})"


def check_gpus() -> Iterator[Finding]:
    """Name the GPUs that torch finds for ranks."""
    import torch  # noqa: PLC0415 - seconds, for doctor only
    from prefect_torch.tasks.rank.resources.device import gpu_type  # noqa: PLC0415 - imports torch

    with warnings.catch_warnings(record=True) as caught:  # torch warns there about an unsuitable driver
        warnings.simplefilter("always")
        kind = gpu_type()
    if kind is not None:
        module: Any = torch.get_device_module(kind)
        devices = [module.get_device_properties(index) for index in range(module.device_count())]
        names = ", ".join(f"{device.name} ({show_bytes(device.total_memory)})" for device in devices)
        yield Finding("gpus", "ok", f"{len(devices)}: {names}; {_library(kind)}")
    elif Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():  # the latter in WSL
        why = (
            "; ".join(str(warning.message) for warning in caught)
            or f"torch {torch.__version__} was built for CUDA {torch.version.cuda}"
        )
        yield Finding(
            "gpus",
            "warning",
            f"NVIDIA's driver is installed, but torch sees no GPU: {why}",
            "install a torch for this driver's CUDA",
        )
    else:
        yield Finding("gpus", "ok", "none: trainings run on CPUs, with gloo")


def check_copies() -> Iterator[Finding]:
    """Time a copy from each GPU to page-locked memory of the host, as every report of a state makes."""
    devices = _gpus()
    if not devices:
        return
    speeds = [_bytes_per_s(device) for device in devices]
    found = ", ".join(f"{device} {show_bytes(round(speed))}/s" for device, (speed, _) in zip(devices, speeds, strict=True))
    if all(is_locked for _, is_locked in speeds):
        yield Finding("copies", "ok", f"to the host: {found}")
    else:
        advice = "allow more locked memory (ulimit -l; docker --ulimit memlock=-1), or leave more memory free"
        yield Finding("copies", "warning", f"to the host: {found}; the driver page-locks no memory", advice)


def check_collective() -> Iterator[Finding]:
    """Run an all-reduce of one rank on the first GPU, in a process of its own: NCCL may abort it, or wait for ever."""
    devices = _gpus()
    if not devices:
        return
    command = [sys.executable, "-c", _TRY_COLLECTIVE.format(module=__name__, device=str(devices[0]))]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_COLLECTIVE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        found = f"an all-reduce of one rank on {devices[0]} has not ended in {_COLLECTIVE_TIMEOUT_S:.0f} s"
        yield Finding("collective", "wrong", found, "see NCCL's own lines: NCCL_DEBUG=INFO")
        return
    if ended.returncode == 0:
        yield Finding("collective", "ok", ended.stdout.strip())
    else:
        found = (ended.stderr.strip().splitlines() or [f"the process exited with {ended.returncode}"])[-1]
        yield Finding("collective", "wrong", f"an all-reduce on {devices[0]} failed: {found}", "NCCL_DEBUG=INFO says more")


def check_locked_memory(infiniband: Path = _INFINIBAND) -> Iterator[Finding]:
    """Check that memory can be page-locked without limit where InfiniBand's driver needs that."""
    if not infiniband.is_dir():
        return
    import resource  # noqa: PLC0415 - not on Windows, which has no such directory

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("locked memory", "ok", "no limit")
    else:
        advice = "ulimit -l unlimited (docker --ulimit memlock=-1), or NCCL cannot use InfiniBand"
        yield Finding("locked memory", "warning", f"at most {show_bytes(soft)}", advice)


def print_collective(device: str) -> None:
    """Run an all-reduce of one rank on `device`, and print with which backend and how long it took.

    Args:
        device: The name of a device, such as "cuda:0".

    """
    import torch  # noqa: PLC0415 - in a process of its own
    import torch.distributed as dist  # noqa: PLC0415 - in a process of its own

    chosen, started_s = torch.device(device), time.monotonic()
    backend = dist.get_default_backend_for_device(chosen)
    bound = None if chosen.type == "cpu" else chosen
    store = vars(dist)["TCPStore"]("127.0.0.1", 0, 1, is_master=True)  # torch's stubs do not export it
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=bound)
    tensor = torch.ones(1, device=chosen)
    dist.all_reduce(tensor)
    if tensor.item() != 1:
        raise RuntimeError(f"{backend}: the sum over one rank of 1 is {tensor.item()}")
    dist.destroy_process_group()
    print(f"{backend}: an all-reduce of one rank on {device} in {time.monotonic() - started_s:.1f} s")  # noqa: T201 - for its parent


def _gpus() -> list["torch.device"]:
    import torch  # noqa: PLC0415 - seconds, for doctor only
    from prefect_torch.tasks.rank.resources.device import gpu_type  # noqa: PLC0415 - imports torch

    kind = gpu_type()
    return [] if kind is None else [torch.device(kind, index) for index in range(torch.get_device_module(kind).device_count())]


def _library(kind: str) -> str:
    import torch  # noqa: PLC0415 - seconds, for doctor only

    if kind != "cuda":
        return kind.upper()
    return f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}"


def _bytes_per_s(device: "torch.device") -> tuple[float, bool]:
    """Return the speed of a device's second copy to the host, and whether the host's memory was page-locked."""
    import torch  # noqa: PLC0415 - seconds, for doctor only
    from prefect_torch.ckpt.state.staging.host_memory import HostMemory  # noqa: PLC0415 - imports torch

    module: Any = torch.get_device_module(device)
    source = torch.zeros(min(_COPIED_BYTES, module.mem_get_info(device)[0] // 2), dtype=torch.uint8, device=device)
    memory = HostMemory(len(source))
    memory.register(device)
    try:
        memory.tensor.copy_(source)  # touches the pages
        module.synchronize(device)
        started_s = time.perf_counter()
        memory.tensor.copy_(source, non_blocking=True)
        module.synchronize(device)
        return len(source) / (time.perf_counter() - started_s), memory.is_page_locked
    finally:
        memory.release()
