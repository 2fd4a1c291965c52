"""Files that are read in place: of the processes of a machine that need a file at a time, one reads it to verify it.

The others compare the file's state: its device, inode, size and times. A write, a truncation or a replacement alters it, so a
file in the state in which it was verified has not been changed since. This holds only once the clock of the filesystem has
gone on after the file's last change: a second change within the same step of that clock, up to 2 s on FAT, would leave the
state as it is. Files that changed within the last seconds are therefore read by everybody. A state proves nothing of the disk,
which may lose bits that nobody wrote: it counts only until the last process that reads the checkpoint, or is to restore it, has
done so, as a copy among the node's downloads does. It proves nothing either of a program that sets the time of its change back
on a filesystem without a time of its own for that (sshfs).
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.verification import VerifyLevel, verify

_SETTLED_NS = 10 * 10**9  # a file server's clock may be some seconds behind this machine's


def verify_in_place(run: Run, manifest: Manifest, files: Collection[FileEntry], level: VerifyLevel) -> None:
    """Verify `files` in place as `verify` does; at level "digest", one process of this machine reads each that nobody changes.

    Raises:
        CheckpointCorruptError: Naming the first file that is missing, short, long or changed.
        CheckpointNotFoundError: If the checkpoint is being pruned.

    """
    wanted = replace(manifest, files=tuple(files))
    if level != "digest":
        verify(run, wanted, level)
        return
    with known_states(run, manifest) as known:
        if known is None:
            verify(run, wanted, level)
        else:
            verify(run, wanted, level, known.once)


@contextmanager
def known_states(run: Run, manifest: Manifest) -> Iterator["KnownStates | None"]:
    """Yield, and keep until the block ends, the states in which this machine's processes have verified files in place.

    Yields None for a bucket, and where the directory for temporary files cannot be used: a read in place does not need it.
    """
    from .cache import entry_name, reading_entry  # noqa: PLC0415 - a fifth of this package's import time

    folder = run.storage.local_path(run.layout.data(manifest.id))
    with ExitStack() as held:
        known: KnownStates | None = None
        if folder is not None:
            with suppress(OSError):
                records = held.enter_context(reading_entry(entry_name(run, manifest))) / "verified"
                records.mkdir(exist_ok=True)
                known = KnownStates(folder, records)
        yield known


@dataclass(frozen=True, slots=True)
class KnownStates:
    """The states in which files of a checkpoint were verified on this machine.

    Attributes:
        folder: The directory of the files.
        records: The directory that holds the state of each, which only this user can write to.

    """

    folder: Path
    records: Path

    def once(self, entry: FileEntry, read: Callable[[], None]) -> None:
        """Call `read`, which returns only if the file is whole, unless it is known to be; others wait for it meanwhile."""
        state = _settled_state(self.folder / entry.path)
        record = None if state is None else self._open_record(entry)
        if state is None or record is None:
            read()
            return
        with _locked(record):
            if os.pread(record, len(state), 0) != state:
                read()
                with suppress(OSError):  # a full disk: the next one reads the file, too
                    os.pwrite(record, state, 0)

    def _open_record(self, entry: FileEntry) -> int | None:
        path = self.records / f"{xxhash.xxh3_128_hexdigest(entry.path.encode())}.lock"
        with suppress(OSError):  # a full disk, or something has cleaned it
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return None


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Hold the lock of an open file, and close it; the kernel releases the lock of a killed process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing it does not unlock it while a forked process has it, too
    finally:
        os.close(descriptor)


def _settled_state(path: Path) -> bytes | None:
    """Return values that distinguish a file from the same one after any later change; None while they may not.

    The file is opened: a client of a file server requests the values then, and otherwise knows those of some seconds ago.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the read raises it
        return None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not 0 < found.st_ctime_ns < time.time_ns() - _SETTLED_NS:  # 0 where a filesystem has no such time
        return None
    return struct.pack("=3Q2q", found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
