"""Whether the machine gives a training what it needs besides."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from prefect_torch.ckpt.text import show_bytes

from .findings import Finding

_DOCKERS_SHM_BYTES = 64 * 2**20  # what a container gets that nobody asked more for
_FEW_FILES = 1024
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the very place


def check_shared_memory(folder: Path = Path(SHARED_MEMORY)) -> Iterator[Finding]:
    """Look how much memory processes can share: data loaders and NCCL move tensors through it."""
    if not sys.platform.startswith("linux"):
        return
    if not folder.is_dir():
        yield Finding(SHARED_MEMORY, "warning", "missing", "mount a tmpfs there, for data loaders and NCCL")
        return
    filesystem = os.statvfs(folder)
    size, free = filesystem.f_blocks * filesystem.f_frsize, filesystem.f_bavail * filesystem.f_frsize
    found = f"{show_bytes(size)}, {show_bytes(free)} free"
    if size and free <= _DOCKERS_SHM_BYTES:
        advice = "give the container more (docker --shm-size=8g, a memory emptyDir in Kubernetes), for data loaders and NCCL"
        yield Finding(SHARED_MEMORY, "warning", found, advice)
    else:
        yield Finding(SHARED_MEMORY, "ok", found)


def check_open_files() -> Iterator[Finding]:
    """Look how many files and sockets a process may have open."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, most = (str(it) if it != resource.RLIM_INFINITY else "no limit" for it in (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        yield Finding("open files", "warning", f"{limit}, at most {most}", f"ulimit -n {_FEW_FILES} or more, for many ranks")
    else:
        yield Finding("open files", "ok", f"{limit}, at most {most}")
