"""What the tests on GPUs share."""

import resource
from pathlib import Path

import torch
from torch import nn

GIB = 1 << 30
SLEEP = 200_000_000  # cycles, about a tenth of a second


class Holder(nn.Module):
    """A module that holds certain tensors."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def resident_bytes():
    """Return how much of the machine's memory this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def pinned_bytes():
    """Return how much memory torch's own allocator has pinned, which it never gives back."""
    stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return stats.get("allocated_bytes.current", 0)
