"""The locks of a machine's GPUs.

A GPU in use is a locked file (flock) in the machine's shared memory, named by the GPU's UUID. The process that leads the ranks
and the guard of each rank hold the lock, so the kernel releases it when both are gone, however they end: a flow that is started
again after a SIGKILL waits for the guards of its earlier process. Processes in other containers have locks of their own unless
they share /dev/shm.

The leading process locks a second file in /var/tmp: when a user has logged out, systemd deletes the files that the user
has in shared memory (RemoveIPC of logind.conf), also those that a service, or another user, has locked.
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
from prefect_torch.ckpt.text import printable

_SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()  # noqa: S108 - for all users
_LOCKS = tuple(dict.fromkeys(Path(it).resolve() for it in (_SHARED_MEMORY, "/var/tmp")))  # noqa: S108 - same
_PREFIX = "prefect-torch-gpu-"
_LONGEST_OWNER = 500  # bytes
LONGEST_TAKING_S = 5.0  # taking GPUs needs milliseconds, but the process that does it may be stopped


class GpuLock:
    """The lock of a GPU, from `take` to `close`.

    Args:
        uuid: The UUID of the GPU.

    Attributes:
        descriptor: The descriptor of its file in shared memory, for the guards of ranks.

    """

    def __init__(self, uuid: str) -> None:
        self.descriptor = _open(_LOCKS[0], uuid)
        self._descriptors = [self.descriptor]
        for folder in _LOCKS[1:]:
            with suppress(OSError):  # it is missing, or cannot be written to
                self._descriptors.append(_open(folder, uuid))

    def take(self) -> str | None:
        """Take the lock, and return None; if others have it, return by whom the GPU is used."""
        for descriptor in self._descriptors:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(descriptor, _LONGEST_OWNER, 0).decode(errors="replace")  # which any user may write
                return printable(owner) or "an unknown process"
            except OSError:
                if descriptor == self.descriptor:
                    raise  # /var/tmp may be on a filesystem without locks
        return None

    def write_owner(self, owner: str) -> None:
        """Write there who uses the GPU, for others that wait for it."""
        for descriptor in self._descriptors:
            os.ftruncate(descriptor, 0)
            with suppress(OSError):  # no space is left: the GPU is taken, and others do not see by whom
                os.pwrite(descriptor, owner.encode()[:_LONGEST_OWNER], 0)

    def close(self) -> None:
        """Release the lock here; no effect on the guards that have it."""
        for descriptor in self._descriptors:
            close_here(descriptor)


def _open(folder: Path, name: str) -> int:
    """Return a descriptor of a file that every user of this machine may lock; a link is refused, which may lead anywhere."""
    path = folder / f"{_PREFIX}{name.replace('/', '-')}"  # a slice may be MIG-GPU-<UUID>/<GPU instance>/<compute instance>
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
    lock = _open(_LOCKS[0], "all")
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
