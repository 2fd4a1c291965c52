"""The GPUs of a machine, each of which one training or evaluation at a time has for itself.

A GPU in use is a locked file (flock) in the machine's shared memory, named by the GPU's UUID. The process that leads the ranks
and the guard of each rank hold the lock, so the kernel releases it when both are gone, however they end: a flow that is started
again after a SIGKILL waits for the guards of its earlier process. Processes in other containers have locks of their own unless
they share /dev/shm.
"""

import errno
import fcntl
import json
import math
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_torch.ckpt.storage.machine.forks import close_here, close_in_forks
from prefect_torch.ckpt.text import show_count, show_some

from .driver_programs import ask_driver

# Not "-m", which looks in the working directory first.
_PRINT_GPUS = (
    "import sys; sys.path[:] = filter(None, sys.path); import prefect_torch.tasks.rank.resources.device as it; it.print_gpus()"
)
_LOCKS = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())  # noqa: S108 - for all users
_PREFIX = "prefect-torch-gpu-"
_POLL_S = 1.0
_REMIND_S = 600.0
_LONGEST_OWNER = 500  # bytes
_SLOW_LISTING_S = 30.0
_LONGEST_LISTING_S = 600.0
_TRY_DRIVER = (
    "their driver may hang, so try nvidia-smi (rocm-smi, xpu-smi), and restart the machine if it does not answer either"
)
_LONGEST_TAKING_S = 5.0  # taking GPUs needs milliseconds, but the process that does it may be stopped


class GpusBusyError(RuntimeError):
    """Others use the GPUs that a training or an evaluation needs, and it waits for them no longer.

    Attributes:
        in_use: How many GPUs are needed, and which are in use by whom.

    """

    def __init__(self, message: str, in_use: str = "") -> None:
        super().__init__(message)
        self.in_use = in_use


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a slice of one (MIG).

    Attributes:
        uuid: Its UUID, the same in every process of the machine.
        name: Its name, such as "NVIDIA H100 80GB HBM3".
        variable: The variable that chooses among GPUs of its type.
        choice: Its name in that variable.

    """

    uuid: str
    name: str
    variable: str
    choice: str


def list_gpus(wait: Callable[[float], None] = lambda _: None) -> list[Gpu]:
    """Return the GPUs that this process may use, in the order of torch's numbers.

    Costs the seconds of an import of torch, in another process: this one gets no context on a GPU, and may still fork.

    Args:
        wait: Called once a second meanwhile, with the seconds so far.

    Raises:
        RuntimeError: If torch cannot list them, or has not done so after ten minutes.

    """
    try:
        listed = ask_driver([sys.executable, "-c", _PRINT_GPUS], _LONGEST_LISTING_S, wait)
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"torch has not listed the GPUs of this machine after {_LONGEST_LISTING_S:g} s: {_TRY_DRIVER}"
        ) from None
    if listed.returncode != 0:
        raise RuntimeError(
            f"torch cannot list the GPUs of this machine, which `prefect-torch doctor` checks:\n{listed.stderr[-4000:]}"
        )
    found = json.loads(listed.stdout.splitlines()[-1])
    variable = _variable(found["type"], is_rocm=found["is_rocm"])
    visible = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    choices = visible or [str(index) for index in range(len(found["gpus"]))]
    return [
        # The UUID that CUDA gives for a slice may be that of its GPU.
        Gpu(choice if choice.startswith("MIG-") else gpu["uuid"], gpu["name"], variable, choice)
        for gpu, choice in zip(found["gpus"], choices, strict=False)  # a driver ignores what is behind an invalid name
    ]


def _variable(gpu_type: str | None, *, is_rocm: bool) -> str:
    if gpu_type == "xpu":
        return "ZE_AFFINITY_MASK"
    if is_rocm and "HIP_VISIBLE_DEVICES" in os.environ:  # has precedence there
        return "HIP_VISIBLE_DEVICES"
    return "CUDA_VISIBLE_DEVICES" if gpu_type is None else f"{gpu_type.upper()}_VISIBLE_DEVICES"


class GpuAllocation:
    """The GPUs of this machine that the ranks of one training or evaluation have, from `take` to `release`.

    The GPUs that this process sees are the pool. A training keeps what it has from attempt to attempt.

    Args:
        count: The number of GPUs; 0 for ranks without a GPU.
        wait_s: How long to wait until enough are free; None for unlimited.
        owner: The name shown to others that wait for them, such as the name of the flow run.
        pool: The GPUs of this machine; None to list them when they are needed.
        fewest: The number that is enough if no more are free; `count` if None.

    """

    def __init__(
        self, count: int, wait_s: float | None, owner: str, pool: list[Gpu] | None = None, *, fewest: int | None = None
    ) -> None:
        self._count = count
        self._fewest = count if fewest is None else fewest
        self._wait_s = wait_s
        self._owner = f"{owner} (process {os.getpid()})"
        self._pool = pool
        self._taken: dict[int, Gpu] = {}
        self._failed: set[str] = set()  # UUIDs

    @property
    def locks(self) -> tuple[int, ...]:
        """The descriptors of the locks, in the order of the ranks; a GPU is taken as long as any process has its lock open."""
        return tuple(self._taken)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs, in the order of the ranks."""
        return tuple(gpu.uuid for gpu in self._taken.values())

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process sees these GPUs, in the order of the ranks, and no others."""
        return {gpu.variable: ",".join(it.choice for it in self._taken.values()) for gpu in self._taken.values()}

    def check(self) -> None:
        """Raise ValueError unless this machine has enough GPUs, free or not, and RuntimeError if torch cannot list them."""
        pool = self._gpus()
        if len(pool) < self._fewest:
            given = self._count if self._fewest == self._count else (self._fewest, self._count)
            is_sliced = any("MIG" in gpu.name for gpu in pool)
            why = " (a process sees one slice of a GPU in MIG mode)" if is_sliced else ""
            raise ValueError(
                f"num_workers={given} with use_gpu=True needs {show_count(self._fewest, 'GPU')}, "
                f"and this machine has {len(pool)}{why}; "
                "lower num_workers or give use_gpu=False"
            )

    def take(self, raise_if_requested: Callable[[], None]) -> None:
        """Wait until enough GPUs are free, then take all of them together; those that are taken already stay so.

        Args:
            raise_if_requested: Called once a second while this waits.

        Raises:
            GpusBusyError: If others still use them after `wait_s`.
            ValueError: If this machine has fewer GPUs.
            RuntimeError: If torch cannot list them.

        """
        if len(self._taken) == self._count and self._failed.isdisjoint(self.uuids):
            return
        self.check()
        started_s = time.monotonic()
        remind_s = -math.inf
        while (users := self._try()) is not None:
            raise_if_requested()
            in_use = (
                f"needs {show_count(self._fewest, 'free GPU')}, and of {len(self._gpus())} these are in use: {show_some(users)}"
            )
            now_s = time.monotonic()
            if self._wait_s is not None and now_s - started_s >= self._wait_s:
                raise GpusBusyError(
                    f"{in_use}; wait_for_gpus_s={self._wait_s:g} is over: give more seconds, or end one of them", in_use
                )
            if now_s >= remind_s:
                get_run_logger().warning("waiting for GPUs: %s", in_use)
                remind_s = now_s + _REMIND_S
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Release the GPUs; those of ranks that still run stay taken until their guards exit."""
        for lock in self._taken:
            close_here(lock)
        self._taken = {}

    def keep(self, count: int) -> None:
        """Release the GPUs that are taken beyond the first `count`."""
        for lock in self.locks[count:]:
            close_here(lock)
            del self._taken[lock]
        self._count = self._fewest = len(self._taken)

    def leave_out(self, rank: int) -> None:
        """Have the next `take` release the GPU of a rank, unless too few others are free; no effect on a rank without one."""
        if rank < len(self._taken):
            gpu = list(self._taken.values())[rank]
            self._failed.add(gpu.uuid)
            get_run_logger().warning("GPU %s has failed: it is left out as long as enough others are free", gpu.choice)

    def _gpus(self) -> list[Gpu]:
        warn_s = _SLOW_LISTING_S

        def wait(waited_s: float) -> None:
            nonlocal warn_s
            if waited_s >= warn_s:
                warn_s = math.inf
                get_run_logger().warning(
                    "torch has not listed the GPUs of this machine after %.0f s: %s", waited_s, _TRY_DRIVER
                )

        if self._pool is None:
            self._pool = list_gpus(wait) if self._count else []
        return self._pool

    def _try(self) -> list[str] | None:
        """Take the GPUs and return None, or take none and return which are in use, and by whom."""
        try:
            return self._take()
        except BlockingIOError:
            return [f"all, by a process that has been taking some for {_LONGEST_TAKING_S:g} s"]

    def _take(self) -> list[str] | None:
        failed = {gpu: lock for lock, gpu in self._taken.items() if gpu.uuid in self._failed}  # kept until there are others
        taken = {lock: gpu for lock, gpu in self._taken.items() if gpu not in failed}
        with _one_at_a_time():  # else two could wait for each other, each with a half of what it needs
            try:
                users = self._lock_free(taken, failed)
                if len(taken) < self._fewest:
                    return users
                for lock in taken.keys() - self._taken.keys():
                    _write_owner(lock, self._owner)
                self._taken = taken
            finally:
                for lock in taken.keys() - self._taken.keys():  # too few are free, or an error occurred
                    close_here(lock)
            for lock in failed.values():
                close_here(lock)
        return None

    def _lock_free(self, taken: dict[int, Gpu], failed: dict[Gpu, int]) -> list[str]:
        """Add free GPUs to `taken`, those that have failed last; return which others are in use, and by whom."""
        users: list[str] = []
        for gpu in sorted(self._gpus(), key=lambda it: it.uuid in self._failed):
            if len(taken) >= (self._fewest if gpu.uuid in self._failed else self._count):
                break
            if gpu in taken.values():
                continue
            if gpu in failed:
                taken[failed.pop(gpu)] = gpu
                continue
            lock = _open(gpu.uuid)
            taken[lock] = gpu
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                users.append(f"GPU {gpu.choice} by {_read_owner(lock)}")
                del taken[lock]
                close_here(lock)
        return users


def _read_owner(lock: int) -> str:
    return os.pread(lock, _LONGEST_OWNER, 0).decode(errors="replace") or "an unknown process"


def _write_owner(lock: int, owner: str) -> None:
    os.ftruncate(lock, 0)
    with suppress(OSError):  # the memory of the machine's files is full: the GPU is taken, and others do not see by whom
        os.pwrite(lock, owner.encode()[:_LONGEST_OWNER], 0)


def take_free(most: int | None, owner: str) -> GpuAllocation:
    """Take the GPUs of this machine that are free, without waiting for others.

    Args:
        most: How many at most; all if None.
        owner: As for a GpuAllocation.

    """
    pool = list_gpus()
    for count in range(len(pool) if most is None else min(most, len(pool)), 0, -1):
        gpus = GpuAllocation(count, 0.0, owner, pool)
        with suppress(GpusBusyError):
            gpus.take(lambda: None)
            return gpus
    return GpuAllocation(0, 0.0, owner)


def get_run_logger() -> Any:
    """Return the log of the current run; an agent, which never waits for GPUs, does not import prefect."""
    from prefect_torch.tasks.run_logs import get_run_logger as of_prefect  # noqa: PLC0415

    return of_prefect()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    lock = _open("all")
    try:
        _lock_soon(lock)
        yield
    finally:
        close_here(lock)


def _lock_soon(lock: int) -> None:
    """Lock a file that others hold only for a moment.

    Raises:
        BlockingIOError: If somebody holds it for seconds.

    """
    deadline_s = time.monotonic() + _LONGEST_TAKING_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.01)
        else:
            return


def _open(name: str) -> int:
    """Return a descriptor of a file that every user of this machine may lock; a link is refused, which may lead anywhere."""
    path = _LOCKS / f"{_PREFIX}{name.replace('/', '-')}"  # a slice may be MIG-GPU-<UUID>/<GPU instance>/<compute instance>
    while True:
        try:  # without O_CREAT, which the kernel denies for another user's file (fs.protected_regular)
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                close_in_forks(descriptor)
                return descriptor
            os.close(descriptor)
            raise OSError(errno.EINVAL, "the lock of a GPU must be a file", str(path))
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except FileExistsError:
            continue
        os.fchmod(descriptor, 0o666)  # whatever the umask
        close_in_forks(descriptor)
        return descriptor
