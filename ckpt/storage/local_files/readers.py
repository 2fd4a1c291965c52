"""Readers of a checkpoint in place: a shared lock on one of its files, which the kernel releases however the reader ends.

A prune deletes the manifest, then tests the locks; a reader takes its lock, then looks for the manifest. So either the
reader finds the checkpoint gone, or the data stay until it has finished, and garbage collection removes them then.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from prefect_torch.ckpt.storage.protocol import Storage


@contextmanager
def reading(storage: Storage, keys: Iterable[str]) -> Iterator[None]:
    """Keep the checkpoint that `keys` belong to from being deleted; do nothing if the filesystem has no locks."""
    descriptor = _open(storage, min(keys, default=None), os.O_RDONLY)
    try:
        if descriptor is not None:
            with suppress(OSError):  # no locks here; or a prune holds the lock, and then the manifest is gone
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_read(storage: Storage, keys: Iterable[str]) -> bool:
    """Return whether a process reads one of `keys` in place."""
    return any(_is_locked(storage, key) for key in keys)


def _is_locked(storage: Storage, key: str) -> bool:
    descriptor = _open(storage, key, os.O_RDWR)  # NFS takes an exclusive lock only on a file that is open for writing
    if descriptor is None:
        descriptor = _open(storage, key, os.O_RDONLY)
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return False
    finally:
        with suppress(OSError):  # nothing was written: rclone's mounts refuse a file open for writing only at its close
            os.close(descriptor)
    return False


def _open(storage: Storage, key: str | None, mode: int) -> int | None:
    with suppress(OSError):  # it is gone, another user's, or a link that leads out of the storage
        path = None if key is None else storage.local_path(key)
        if path is not None:
            return os.open(path, mode | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe of that name must not block this process
    return None
