"""Checks of the machine: its GPUs and backends as torch has them, connections over loopback, shared memory, open files."""

import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from prefect_torch.ckpt.text import show_bytes

from .findings import Finding

_ANSWER_TIMEOUT_S = 10.0
_DOCKERS_SHM_BYTES = 64 * 2**20  # the default of a container
_FEW_FILES = 1024
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - this very directory


def check_torch() -> Iterator[Finding]:
    """Import torch and count its GPUs."""
    import torch  # noqa: PLC0415 - seconds, for doctor only

    yield Finding("torch", "ok", torch.__version__)
    with warnings.catch_warnings(record=True) as caught:  # torch warns there about an unsuitable driver
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        devices = [torch.cuda.get_device_properties(index) for index in range(count)]
        names = ", ".join(f"{device.name} ({show_bytes(device.total_memory)})" for device in devices)
        version = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}"
        yield Finding("gpus", "ok", f"{count}: {names}; {version}")
    elif Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():  # the latter in the Linux of Windows
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


def check_backends() -> Iterator[Finding]:
    """Check which backends of collectives this torch was built with."""
    import torch  # noqa: PLC0415 - seconds, for doctor only
    import torch.distributed as dist  # noqa: PLC0415 - seconds, for doctor only

    if not dist.is_available():
        yield Finding("backends", "wrong", "torch was built without distributed", "install torch from PyPI or pytorch.org")
        return
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    found = ", ".join(name for name, available in backends.items() if available) or "none"
    needed = "nccl" if torch.cuda.is_available() else "gloo"
    if backends[needed]:
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
    if size and free <= _DOCKERS_SHM_BYTES:
        advice = "give the container more (docker --shm-size=8g, a memory emptyDir in Kubernetes), for data loaders and NCCL"
        yield Finding(SHARED_MEMORY, "warning", found, advice)
    else:
        yield Finding(SHARED_MEMORY, "ok", found)


def check_open_files() -> Iterator[Finding]:
    """Check how many files and sockets a process may have open."""
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
