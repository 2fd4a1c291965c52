"""The GPUs that the ranks of a training or an evaluation have: taken together or not at all, kept from attempt to attempt."""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from prefect_torch.ckpt.text import show_count, show_some

from .listing import TRY_DRIVER, Gpu, list_gpus
from .locks import LONGEST_TAKING_S, GpuLock, one_at_a_time

_POLL_S = 1.0
_REMIND_S = 600.0
_SLOW_LISTING_S = 30.0


class GpusBusyError(RuntimeError):
    """Others use the GPUs that a training or an evaluation needs, and it waits for them no longer.

    Attributes:
        in_use: How many GPUs are needed, and which are in use by whom.

    """

    def __init__(self, message: str, in_use: str = "") -> None:
        super().__init__(message)
        self.in_use = in_use


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
        self._taken: dict[GpuLock, Gpu] = {}
        self._failed: set[str] = set()  # UUIDs

    @property
    def locks(self) -> tuple[int, ...]:
        """The descriptors of the locks, in the order of the ranks; a GPU is taken as long as any process has its lock open."""
        return tuple(lock.descriptor for lock in self._taken)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs, in the order of the ranks."""
        return tuple(gpu.uuid for gpu in self._taken.values())

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process sees these GPUs, in the order of the ranks, and no others."""
        return {gpu.variable: ",".join(it.choice for it in self._taken.values()) for gpu in self._taken.values()}

    def check(self) -> list[Gpu]:
        """Return the GPUs of this machine if it has enough of them, free or not.

        Raises:
            ValueError: If it has fewer.
            RuntimeError: If torch cannot list them.

        """
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
        return pool

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
                _run_logger().warning("waiting for GPUs: %s", in_use)
                remind_s = now_s + _REMIND_S
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Release the GPUs; those of ranks that still run stay taken until their guards exit."""
        for lock in self._taken:
            lock.close()
        self._taken = {}

    def keep(self, count: int) -> None:
        """Release the GPUs that are taken beyond the first `count`."""
        for lock in list(self._taken)[count:]:
            lock.close()
            del self._taken[lock]
        self._count = self._fewest = len(self._taken)

    def leave_out(self, rank: int) -> None:
        """Have the next `take` release the GPU of a rank, unless too few others are free; no effect on a rank without one."""
        if rank < len(self._taken):
            gpu = list(self._taken.values())[rank]
            self._failed.add(gpu.uuid)
            _run_logger().warning("GPU %s has failed: it is left out as long as enough others are free", gpu.choice)

    def _gpus(self) -> list[Gpu]:
        warn_s = _SLOW_LISTING_S

        def wait(waited_s: float) -> None:
            nonlocal warn_s
            if waited_s >= warn_s:
                warn_s = math.inf
                _run_logger().warning("torch has not listed the GPUs of this machine after %.0f s: %s", waited_s, TRY_DRIVER)

        if self._pool is None:
            self._pool = list_gpus(wait) if self._count else []
        return self._pool

    def _try(self) -> list[str] | None:
        """Take the GPUs and return None, or take none and return which are in use, and by whom."""
        try:
            return self._take()
        except BlockingIOError:
            return [f"all, by a process that has been taking some for {LONGEST_TAKING_S:g} s"]

    def _take(self) -> list[str] | None:
        failed = {gpu: lock for lock, gpu in self._taken.items() if gpu.uuid in self._failed}  # kept until there are others
        taken = {lock: gpu for lock, gpu in self._taken.items() if gpu not in failed}
        with one_at_a_time():  # else two could wait for each other, each with a half of what it needs
            try:
                users = self._lock_free(taken, failed)
                if len(taken) < self._fewest:
                    return users
                for lock in taken.keys() - self._taken.keys():
                    lock.write_owner(self._owner)
                self._taken = taken
            finally:
                for lock in taken.keys() - self._taken.keys():  # too few are free, or an error occurred
                    lock.close()
            for lock in failed.values():
                lock.close()
        return None

    def _lock_free(self, taken: dict[GpuLock, Gpu], failed: dict[Gpu, GpuLock]) -> list[str]:
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
            lock = GpuLock(gpu.uuid)
            taken[lock] = gpu
            if (user := lock.take()) is not None:
                users.append(f"GPU {gpu.choice} by {user}")
                del taken[lock]
                lock.close()
        return users


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


def _run_logger() -> Any:
    """Return the log of the current run; an agent, which never waits for GPUs, does not import prefect."""
    from prefect_torch.tasks.run_logs import get_run_logger  # noqa: PLC0415

    return get_run_logger()
