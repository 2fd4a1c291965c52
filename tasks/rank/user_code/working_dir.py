"""The working directory and the search path of a rank: those of the flow's process, or a copy of the user's directory.

A copy is unpacked once per machine, and shared by the ranks there.
"""

import hashlib
import os
import shutil
import stat
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock
from prefect_torch.ckpt import CheckpointCorruptError
from prefect_torch.ckpt.errors import is_of_full_disk
from prefect_torch.ckpt.files.cache import downloaded
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.confirmed_reads import confirm_damage
from prefect_torch.ckpt.storage.protocol import Storage

from .function import PackedFunction

_ARCHIVE = "code.zip"
_PERMISSIONS = 0o777
_PIECE_BYTES = 1 << 20


def enter_paths(function: PackedFunction, *, is_elsewhere: bool) -> None:
    """Take the working directory and the search path of the flow's process; on another machine, as far as they exist there.

    Another machine has its own Python environment, which comes first there.
    """
    if not is_elsewhere:
        os.chdir(function.cwd)
        sys.path[:] = function.sys_path
        return
    if Path(function.cwd).is_dir():
        os.chdir(function.cwd)
    sys.path.extend(path for path in function.sys_path if path not in sys.path and Path(path).exists())


@dataclass(frozen=True, slots=True)
class StoredDirectory:
    """A working directory as an archive in a run's storage.

    Attributes:
        root: The directory on the flow's machine.
        bytes: The size of the archive.
        digest: xxh3-128 of the archive, as of all that is transferred.
        sha256: SHA-256 of the archive, by which it is named. Only what the leader has packed is executed, whoever may write to
            the storage: data of a wanted xxh3 are easily made.
        evaluation: The name of the evaluation that it belongs to; None for a training, whose archives are stored apart: each
            deletes its former ones, and both may run at the same time.
        run: The name of the run that has it, in the same storage; None for the ranks' own.

    """

    root: str
    bytes: int
    digest: str
    sha256: str
    evaluation: str | None = None
    run: str | None = None

    def key_for(self, run: Run) -> str:
        """Return the archive's key for the ranks of `run`."""
        return (run if self.run is None else run.beside(self.run)).layout.code(self.sha256, self.evaluation)


@contextmanager
def unpacked(directory: StoredDirectory, run: Run) -> Iterator[Path]:
    """Yield a directory with the files of the archive, which is kept while any process of this machine is in this context.

    The first rank of a machine downloads and unpacks it, and the others wait for that.

    Args:
        directory: The archive.
        run: The run of the ranks.

    Raises:
        CheckpointCorruptError: If the stored archive is another one.
        OSError: If there is no space for it below TMPDIR, which the error names.

    """
    entry = FileEntry(_ARCHIVE, directory.bytes, directory.digest, 0)

    key = directory.key_for(run)

    def download(_: str, path: Path) -> None:
        def download_once(storage: Storage) -> None:
            with _full_disk_explained(path):
                got = storage.get_file(key, path, directory.bytes)
            if (got.bytes, got.digest) != (directory.bytes, directory.digest) or _sha256_of(path) != directory.sha256:
                found = f"{got.bytes} bytes of {directory.bytes}, with digest {got.digest}"
                raise CheckpointCorruptError(
                    f"the archive of working_dir in {storage.url}/{key} is not what was stored: {found}"
                )

        confirm_damage(run.storage, download_once)

    with downloaded(f"code {directory.sha256}", {_ARCHIVE: entry}, download) as files:
        target = files.parent / "unpacked"
        with FileLock(files.parent / "unpacked.lock", thread_local=False):
            if not target.exists():
                with _full_disk_explained(target):
                    _unpack(files / _ARCHIVE, files.parent / "unpacking")
                (files.parent / "unpacking").rename(target)
        yield target


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def within(function: PackedFunction, root: str, copy: Path) -> PackedFunction:
    """Return `function` with its file, its search path and its working directory in the copy, as far as they are part of it.

    Args:
        function: The function.
        root: The directory that was copied.
        copy: The copy.

    """

    def moved(path: str) -> str:
        relative = Path(path).relative_to(root) if Path(path).is_relative_to(root) else None
        return str(copy / relative) if relative is not None and (copy / relative).exists() else path

    cwd = moved(function.cwd)
    place, _, name = (function.reference or "").rpartition(":")
    return replace(
        function,
        reference=f"{moved(place)}:{name}" if place.endswith(".py") else function.reference,
        sys_path=tuple(dict.fromkeys([str(copy), *map(moved, function.sys_path)])),
        cwd=str(copy) if cwd == function.cwd else cwd,
    )


@contextmanager
def _full_disk_explained(path: Path) -> Iterator[None]:
    """Add to the error of a full disk what is written where: the error of a write names neither."""
    try:
        yield
    except OSError as exc:
        if not is_of_full_disk(exc):
            raise
        text = f"{os.strerror(exc.errno or 0)} for the machine's copy of working_dir: free some, or set TMPDIR to another disk"
        raise OSError(exc.errno, text, str(path)) from exc


def _unpack(archive: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)  # of a process that was killed
    with zipfile.ZipFile(archive) as packed:
        for info in packed.infolist():
            path = Path(packed.extract(info, target))
            path.chmod(stat.S_IMODE(info.external_attr >> 16) & _PERMISSIONS)
    target.mkdir(exist_ok=True)  # of an empty archive
