"""Directories that a process holds by a lock, which the kernel releases however the process ends.

Containers that share a volume share its locks. A process id would mean nothing in the other container: it may be that of
another live process there, or of none.
"""

import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefect_torch.ckpt.storage.machine.forks import close_here, close_in_forks


@dataclass(frozen=True, slots=True)
class HeldFolder:
    """A directory that no other process removes or takes over while this one holds it.

    Attributes:
        path: Its path.
        descriptor: The descriptor with the lock.

    """

    path: Path
    descriptor: int

    @classmethod
    def make(cls, parent: Path) -> "HeldFolder":
        """Create and hold a new directory in `parent`, which is made if it is missing; without locks it is not held."""
        token = secrets.token_hex(8)
        made = parent / f".making.{token}"  # `take` leaves such a name alone until the directory is held
        made.mkdir(parents=True)
        held = cls(made.with_name(f"{os.getpid()}-{token}"), _open(made))
        with suppress(OSError):  # without locks no process takes it either
            _lock(held.descriptor)
        made.rename(held.path)
        return held

    @classmethod
    def take(cls, path: Path) -> "HeldFolder | None":
        """Hold a directory that its process has left; None while one holds it, if it is gone or no such directory."""
        if not path.name.partition("-")[0].isdecimal():
            return None
        with suppress(OSError):
            taken = cls(path, _open(path))
            try:
                _lock(taken.descriptor)
            except OSError:
                taken.release()
                return None
            return taken
        return None

    def release(self) -> None:
        """Leave the directory to whoever takes it."""
        close_here(self.descriptor)

    def remove(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


def _open(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    close_in_forks(descriptor)
    return descriptor


def _lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
