"""Where a rank computes: its device, and its place among the ranks. Imports torch, never prefect: ranks use it."""

import torch
import torch.distributed as dist


def get_device() -> torch.device:
    """Return the device that this rank computes on: the one its process group is bound to, else the CPU.

    Without a process group, in a script on its own, it is the current GPU where there is one.
    """
    if dist.is_initialized():
        # Not torch.cuda.is_available(): a training with use_gpu=False may run on a machine that has GPUs.
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        return torch.device("cpu") if bound is None else torch.device(bound)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def get_place() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
