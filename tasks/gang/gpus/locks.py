"""The locks of a machine's GPUs.

A GPU in use is a locked file (flock) in the machine's shared memory, named by the GPU's UUID. The process that leads the ranks
and the guard of each rank hold the lock, so the kernel releases it when both are gone, however they end: a flow that is started
again after a SIGKILL waits for the guards of its earlier process. Processes in other containers have locks of their own unless
they share /dev/shm.
"""

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect_torch.ckpt.storage.machine.forks import close_here, close_in_forks

_LOCKS = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())  # noqa: S108 - for all users
_PREFIX = "prefect-torch-gpu-"
_LONGEST_OWNER = 500  # bytes
LONGEST_TAKING_S = 5.0  # taking GPUs needs milliseconds, but the process that does it may be stopped


def open_lock(name: str) -> int:
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


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let no other process take GPUs of this machine during the block.

    Raises:
        BlockingIOError: If another one has been doing so for seconds.

    """
    lock = open_lock("all")
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
    deadline_s = time.monotonic() + LONGEST_TAKING_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.01)
        else:
            return


def read_owner(lock: int) -> str:
    """Return the owner of a lock, as it has written itself there."""
    return os.pread(lock, _LONGEST_OWNER, 0).decode(errors="replace") or "an unknown process"


def write_owner(lock: int, owner: str) -> None:
    """Write the owner of a lock there, for others that wait for it."""
    os.ftruncate(lock, 0)
    with suppress(OSError):  # the memory of the machine's files is full: the GPU is taken, and others do not see by whom
        os.pwrite(lock, owner.encode()[:_LONGEST_OWNER], 0)
