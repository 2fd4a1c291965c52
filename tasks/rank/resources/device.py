"""The accelerators that torch finds on this machine, and the one that a rank computes on.

Most are GPUs, and are called so. Nothing here is specific to CUDA: torch's module of the device type is used.
"""

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from prefect_torch.ckpt.text import show_bytes

from .cpus import stay_near

if TYPE_CHECKING:
    import torch

# The context of a process, NCCL's buffers and the like, which no allocator counts.
_BESIDES_TENSORS_BYTES = 2 << 30
_LONGEST_WAIT_S = 30.0
_STEADY_S = 3.0
_POLL_S = 0.2


def gpu_type() -> str | None:
    """Return the type of the GPUs of this machine, such as "cuda" (ROCm's, too); None if torch finds none for ranks."""
    import torch  # noqa: PLC0415 - after the environment is set

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Apple's GPU cannot be chosen among several.
    has_several = accelerator is not None and hasattr(torch.get_device_module(accelerator), "set_device")
    return accelerator.type if accelerator is not None and has_several else None


def print_gpus() -> None:
    """Print the GPUs that this process may use, as JSON: their type, whether they are ROCm's, and each one's UUID and name."""
    import torch  # noqa: PLC0415 - in a separate process

    kind = gpu_type()
    gpus = []
    if kind is not None:
        module: Any = torch.get_device_module(kind)
        properties = [module.get_device_properties(index) for index in range(module.device_count())]
        gpus = [{"uuid": _unique_name(each), "name": each.name} for each in properties]
    print(json.dumps({"type": kind, "is_rocm": torch.version.hip is not None, "gpus": gpus}))  # noqa: T201 - for its parent


def _unique_name(properties: Any) -> str:
    """Return a GPU's UUID; with its PCI address for ROCm, which gives the same UUID, GPU-XX, to all GPUs that have none."""
    import torch  # noqa: PLC0415 - imported by now

    has_address = torch.version.hip is not None and hasattr(properties, "pci_bus_id")
    return f"{properties.uuid}-{_pci_address(properties)}" if has_address else str(properties.uuid)


def take_device(local_rank: int) -> "torch.device":
    """Make the GPU number `local_rank` the current device of this rank, and return it once its memory is free.

    The driver may free the memory of a killed process seconds after the process is gone.

    Raises:
        RuntimeError: If torch finds no GPU.

    """
    import torch  # noqa: PLC0415 - after the environment is set

    kind = gpu_type()
    if kind is None:
        raise RuntimeError(
            "torch finds no GPU in this rank's process, though the flow's process found one: run `prefect-torch doctor` on "
            "this machine"
        )
    device = torch.device(kind, local_rank)
    module: Any = torch.get_device_module(device)
    module.set_device(device)
    _wait_for_memory(module, device)
    _stay_near([module.get_device_properties(index) for index in range(module.device_count())], local_rank)
    return device


def wait_for_kernels(local_rank: int) -> None:
    """Return when the GPU number `local_rank` has done what this process has launched; an error of it is logged."""
    import torch  # noqa: PLC0415 - imported by now

    try:
        torch.get_device_module(gpu_type()).synchronize(local_rank)
    except Exception as exc:  # noqa: BLE001 - the function has returned
        _log(f"WARNING: what the function has launched last has failed on the GPU: {exc}")


def is_memory_held_by_others() -> bool:
    """Return whether other processes hold memory of this rank's GPU, such as killed ones that the driver still cleans up.

    False, with a line in the rank's log, if that is unknown.
    """
    import torch  # noqa: PLC0415 - imported by now

    try:
        kind = gpu_type()
        if kind is None:
            return False
        module: Any = torch.get_device_module(kind)
        if _shares_memory(module, module.current_device()):
            return False
        free, total = module.mem_get_info()
        return bool(total - free - module.memory_reserved() > _BESIDES_TENSORS_BYTES)
    except Exception as exc:  # noqa: BLE001 - torch's, or the driver's; the error that this is about must not be lost
        _log(f"whether other processes hold memory of the GPU cannot be told: {exc}")
        return False


def _wait_for_memory(module: Any, device: "torch.device") -> None:
    if _shares_memory(module, device.index):
        return
    started_s = rose_s = time.monotonic()
    most_free = 0
    while True:
        free, total = module.mem_get_info(device)
        now_s = time.monotonic()
        if total - free <= _BESIDES_TENSORS_BYTES:
            return
        if free > most_free:
            most_free, rose_s = free, now_s
        if now_s >= min(rose_s + _STEADY_S, started_s + _LONGEST_WAIT_S):
            break
        time.sleep(_POLL_S)
    free_of_all = f"{show_bytes(free)} of {show_bytes(total)} free"
    _log(f"{device} has {free_of_all}; other processes hold the rest. {_holders(module, device)}")


def _shares_memory(module: Any, index: int) -> bool:
    """Return whether the GPU's memory is the machine's, most of which any process may hold."""
    properties = module.get_device_properties(index)
    return any(bool(getattr(properties, name, False)) for name in ("is_integrated", "is_integrated_gpu"))  # CUDA's, Intel's


def _holders(module: Any, device: "torch.device") -> str:
    if not hasattr(module, "list_gpu_processes"):
        return ""
    try:
        return str(module.list_gpu_processes(device))
    except Exception as exc:  # noqa: BLE001 - NVML's own, and torch's where NVML does not know all (WSL, vGPU, MIG)
        return f"Which ones cannot be told ({type(exc).__name__}: {exc})."


def _stay_near(devices: list[Any], own: int) -> None:
    """Run on the CPUs of the GPU's NUMA node: copies across sockets are slower."""
    if not all(hasattr(device, "pci_bus_id") for device in devices):
        return
    if (cpus := stay_near([_pci_address(device) for device in devices], own)) is not None:
        _log(f"this rank runs on CPUs {cpus}, those beside its GPU")


def _pci_address(properties: Any) -> str:
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _log(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - the rank's log
