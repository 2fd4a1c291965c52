"""Checks of the machine: backends as torch has them, connections over loopback, shared memory, temporary files, open files."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from prefect_torch.ckpt.text import show_bytes

from .findings import Finding

_ANSWER_TIMEOUT_S = 10.0
DOCKERS_SHM_BYTES = 64 * 2**20  # the default of a container
_FEW_FILES = 1024
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - this very directory


def check_torch() -> Iterator[Finding]:
    """Import torch."""
    import torch  # noqa: PLC0415 - seconds, for doctor only

    yield Finding("torch", "ok", torch.__version__)


def check_backends() -> Iterator[Finding]:
    """Check which backends of collectives this torch was built with."""
    import torch.distributed as dist  # noqa: PLC0415 - seconds, for doctor only
    from prefect_torch.tasks.rank.resources.device import gpu_type  # noqa: PLC0415 - imports torch

    if not dist.is_available():
        yield Finding("backends", "wrong", "torch was built without distributed", "install torch from PyPI or pytorch.org")
        return
    needed = dist.get_default_backend_for_device(gpu_type() or "cpu")
    names = dict.fromkeys(("gloo", "nccl", needed))
    found = ", ".join(name for name in names if dist.is_backend_available(name)) or "none"
    if dist.is_backend_available(needed):
        yield Finding("backends", "ok", found)
    else:
        yield Finding("backends", "wrong", f"{found}; {needed} is missing", f"install a torch with {needed}")


def check_loopback() -> Iterator[Finding]:
    """Check the rendezvous of a leader and a rank, as in a training."""
    from prefect_torch.tasks.rank.rendezvous import Rendezvous, connect  # noqa: PLC0415 - for doctor only

    started_s = time.monotonic()
    try:
        meeting = Rendezvous()
        leader = meeting.serve()
        rank = connect(meeting.address)
        rank.set("doctor", b"here")
        leader.get(["doctor"], _ANSWER_TIMEOUT_S)
    except (OSError, RuntimeError) as exc:
        advice = "allow connections to 127.0.0.1, and leave it out of proxies and firewalls"
        yield Finding("loopback", "wrong", f"ranks cannot reach their leader: {exc}", advice)
    else:
        yield Finding("loopback", "ok", f"a TCPStore answered in {(time.monotonic() - started_s) * 1000:.0f} ms")


def check_shared_memory(directory: Path = Path(SHARED_MEMORY)) -> Iterator[Finding]:
    """Check the size of shared memory, through which data loaders and NCCL move tensors."""
    if not sys.platform.startswith("linux"):
        return
    if not directory.is_dir():
        yield Finding(SHARED_MEMORY, "warning", "missing", "mount a tmpfs there, for data loaders and NCCL")
        return
    filesystem = os.statvfs(directory)
    size, free = filesystem.f_blocks * filesystem.f_frsize, filesystem.f_bavail * filesystem.f_frsize
    found = f"{show_bytes(size)}, {show_bytes(free)} free"
    if size and free <= DOCKERS_SHM_BYTES:
        advice = "give the container more (docker --shm-size=8g, a memory emptyDir in Kubernetes), for data loaders and NCCL"
        yield Finding(SHARED_MEMORY, "warning", found, advice)
    else:
        yield Finding(SHARED_MEMORY, "ok", found)


def check_temporary_files() -> Iterator[Finding]:
    """Check whether there is a directory for temporary files, without which torch cannot create an optimizer."""
    try:
        yield Finding("temporary files", "ok", tempfile.gettempdir())
    except FileNotFoundError as exc:
        advice = "set TMPDIR to a directory that can be written to, or mount one at /tmp (an emptyDir in Kubernetes)"
        yield Finding("temporary files", "wrong", str(exc.strerror), advice)


def check_open_files() -> Iterator[Finding]:
    """Check how many files and sockets a process may have open."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, most = (str(it) if it != resource.RLIM_INFINITY else "no limit" for it in (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        yield Finding("open files", "warning", f"{limit}, at most {most}", f"ulimit -n {_FEW_FILES} or more, for data loaders")
    else:
        yield Finding("open files", "ok", f"{limit}, at most {most}")
