"""Temporary directories: the downloads, and those of this process, which the next one removes if this is killed."""

import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import xxhash
from prefect_torch.ckpt.storage.local_files.walk import remove_tree

from .mounts import is_local

_PREFIX = ".prefect-torch-scratch-"
_OF = "of-"  # before the name of the other directory that is removed with one
_held: dict[Path, int] = {}  # the descriptor by which this process holds each, until it ends
_companions: dict[Path, Path] = {}  # of directories that another machine's process has named
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LEAST_AGE_S = 24 * 3600.0


def make_scratch(parent: Path | None = None) -> Path:
    """Return a new, empty directory in `parent` (None: the temporary directory) that exists no longer than this process.

    The first call for a `parent` in a process removes directories of killed processes, if the filesystem has locks: those of
    this machine since its boot and of its earlier boots. Another machine's are left, since its locks may be invisible here.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    sweep_scratch(parent)
    return _make(parent)


def is_scratch(name: str) -> bool:
    """Return whether a directory of that name is one of `make_scratch`, of whatever process or machine."""
    return name.startswith(_PREFIX)


def _make(parent: Path, name: str | None = None) -> Path:
    made = Path(tempfile.mkdtemp(prefix=".prefect-torch-making-", dir=parent))  # no process sweeps it before it is held
    descriptor = _hold(made)
    folder = made.replace(parent / f"{_own_prefix()}{name or made.name.rpartition('-')[2]}")
    _held[folder] = descriptor
    return folder


def hold_scratch(folder: Path) -> None:
    """Hold a directory that another machine's process has named; do nothing if it is held already.

    If this process is killed, the next one here removes it, although its name has the other machine's mark: a companion says
    so. A directory that the other machine may have made itself gets none.
    """
    if folder in _held:
        return
    _held[folder] = _hold(folder)
    if is_local(folder) and not folder.name.startswith(_own_prefix()):
        _companions[folder] = _make(folder.parent, f"{_OF}{folder.name}")


def remove_scratch(folder: Path) -> None:
    """Delete a directory of this process."""
    remove_tree(folder, ignore_errors=True)
    os.close(_held.pop(folder))
    if (companion := _companions.pop(folder, None)) is not None:
        remove_scratch(companion)


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a directory made by `make_scratch`, and delete it."""
    folder = make_scratch(parent)
    try:
        yield folder
    finally:
        remove_scratch(folder)


@cache
def sweep_scratch(parent: Path) -> None:
    """Remove the directories of killed processes in `parent`, as `make_scratch` does; nothing in further calls for it."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is held, another user's, gone by now, or on a filesystem without locks
            if folder.name.startswith(_own_prefix()) or is_of_earlier_boot(folder):
                _remove_unheld(folder)


def _remove_unheld(folder: Path) -> None:
    """Delete one of this user's directories; others may put anything by such a name into a directory that they share."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # a FIFO would be waited for
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _, _, other = folder.name.partition(f"-{_OF}")
        if other.startswith(_PREFIX):
            with suppress(FileNotFoundError):
                _remove_unheld(folder.with_name(other))
        remove_tree(folder)
    finally:
        os.close(descriptor)


def downloads_folder() -> Path:
    """Return the path of the directory of this user's downloads, which may not exist."""
    return Path(tempfile.gettempdir()) / f"prefect-torch-{os.geteuid()}"  # a container's user may have no name


def lies_in_downloads(path: Path) -> bool:
    """Return whether a local directory is one that the readers of a checkpoint on this node share."""
    return path.resolve().is_relative_to(downloads_folder().resolve())


def own_mark() -> str:
    """Return this kernel's mark, which is in the names of directories that only its processes use."""
    return xxhash.xxh3_64_hexdigest(kernel_id().encode())


def _own_prefix() -> str:
    return f"{_PREFIX}{own_mark()}-"


def _hold(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # without locks no process sweeps either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


@cache
def kernel_id() -> str:
    """Return an id of the running kernel that differs from every other boot's; outside of Linux the machine's name.

    Containers of one machine share it, and its file locks.
    """
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()


def is_of_earlier_boot(folder: Path) -> bool:
    """Return whether a directory with another kernel's mark is one that this machine left before its last boot.

    Such a directory is older than the boot, and than a day, and on a local filesystem. The filesystem alone proves nothing:
    this machine may export it by NFS, whose clients' locks on a directory are unknown here.
    """
    if not is_local(folder):
        return False
    now_s = time.time()
    started_s = now_s - time.clock_gettime(time.CLOCK_BOOTTIME)
    return folder.stat().st_mtime < min(started_s, now_s - _LEAST_AGE_S)
