"""The device and the number of a rank."""

import torch
import torch.distributed as dist
from prefect_torch.tasks.rank.resources.device import gpu_type


def get_device() -> torch.device:
    """Return the device of this rank: the one that its process group is bound to, else the CPU.

    Without a process group, such as in a script, it is the current GPU, CUDA's, ROCm's or Intel's, if there is one.
    """
    if dist.is_initialized():
        # Not torch.cuda.is_available(): a training with use_gpu=False may run on a machine that has GPUs.
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        return torch.device("cpu") if bound is None else torch.device(bound)
    if (kind := gpu_type()) is None:
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def get_rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
