"""Downloads of checkpoint files to this machine, verified during the transfer, and kept for all readers on it."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.verification import VerifyLevel, check_entry, missing
from prefect_torch.ckpt.storage.confirmed_reads import confirm_damage
from prefect_torch.ckpt.storage.keys import check_key
from prefect_torch.ckpt.storage.local_files.names import find_kept_as_one
from prefect_torch.ckpt.storage.local_files.readers import reading
from prefect_torch.ckpt.storage.machine.scratch import scratch_folder
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.storage.retry import with_retries

from .folder import write_metadata
from .target_directory import move_all, plan_moves
from .verified_in_place import verify_in_place


def download(run: Run, manifest: Manifest, entries: Iterable[FileEntry], metadata: Mapping[str, Any], target: Path) -> None:
    """Write files of a checkpoint, and `metadata`, below `target`; return only if all files equal the committed ones.

    They are moved there when all are whole: after an error before that, nothing of the checkpoint is below `target`.

    Raises:
        FileExistsError: If a directory is in the place of a file, or a file in that of a directory, or if the filesystem takes
            two names for one.
        CheckpointCorruptError: If a file differs from the committed one.
        CheckpointNotFoundError: If the checkpoint was pruned meanwhile.

    """
    wanted = tuple(entries)
    with scratch_folder(target) as incoming:  # what a kill leaves of it is neither reported nor stays

        def fetch(entry: FileEntry) -> None:
            path = incoming / check_key(entry.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            download_file(run, manifest, entry, path)

        for_each(wanted, fetch)
        if (problem := find_kept_as_one(incoming, (entry.path for entry in wanted))) is not None:
            raise FileExistsError(f"the filesystem of {target} {problem}: give another directory")
        if metadata:
            write_metadata(incoming, metadata)
        move_all(plan_moves(incoming, target))


@contextmanager
def readable_files(run: Run, manifest: Manifest, files: Collection[FileEntry], level: VerifyLevel = "digest") -> Iterator[Path]:
    """Yield a local directory with `files` of a checkpoint: in place, verified at `level`, if this machine sees them.

    Otherwise they are downloaded, which always verifies every byte of them.

    Raises:
        CheckpointCorruptError: If a file differs from the committed one.
        CheckpointNotFoundError: If the checkpoint was pruned meanwhile.

    """
    local = run.storage.local_path(run.layout.data(manifest.id))
    if local is not None and manifest.files:  # without files there may be no directory
        with in_place(run, manifest, files):
            verify_in_place(run, manifest, files, level)
            yield local
        return
    with cached_files(run, manifest, files) as folder:
        yield folder


@contextmanager
def cached_files(run: Run, manifest: Manifest, files: Collection[FileEntry]) -> Iterator[Path]:
    """Yield a directory with `files` of a checkpoint, verified, among the downloads that this node's readers share.

    Raises:
        CheckpointCorruptError: If a file differs from the committed one.
        CheckpointNotFoundError: If the checkpoint was pruned meanwhile.

    """
    from .cache import downloaded, entry_name  # noqa: PLC0415 - a fifth of this package's import time, for remote storages only

    entries = {entry.path: entry for entry in files}

    def fetch(path: str, target: Path) -> None:
        download_file(run, manifest, entries[path], target)

    with downloaded(entry_name(run, manifest), entries, fetch) as folder:
        yield folder


@contextmanager
def found_files(run: Run, manifest: Manifest, files: Collection[FileEntry]) -> Iterator[Path | None]:
    """Yield the directory with `files` of a checkpoint if processes on this node have downloaded all of them, else None.

    Nothing is downloaded or verified.
    """
    from .cache import entry_name, found  # noqa: PLC0415 - a fifth of this package's import time, for remote storages only

    with found(entry_name(run, manifest), [entry.path for entry in files]) as folder:
        yield folder


@contextmanager
def in_place(run: Run, manifest: Manifest, files: Iterable[FileEntry]) -> Iterator[None]:
    """Keep `files` of a checkpoint in place while they are read there, despite any prune; do nothing for a bucket.

    Raises:
        CheckpointNotFoundError: If the checkpoint was pruned, or is pruned during the read if the filesystem has no locks.

    """
    folder = run.storage.local_path(run.layout.data(manifest.id))
    if folder is None:
        yield
        return
    with reading(run.storage, [run.layout.data(manifest.id, entry.path) for entry in files]):
        run.check_exists(manifest.id)
        try:
            yield
        except FileNotFoundError as exc:
            if exc.filename is not None and Path(str(exc.filename)).is_relative_to(folder):
                run.check_exists(manifest.id)
            raise


def download_file(run: Run, manifest: Manifest, entry: FileEntry, path: Path) -> None:
    """Write one file of a checkpoint to `path`, which after an error holds no file of the checkpoint.

    Raises:
        CheckpointCorruptError: If it differs from the committed one.
        CheckpointNotFoundError: If the checkpoint was pruned meanwhile.
        OSError: If `path` cannot be written, naming it.

    """
    key = run.layout.data(manifest.id, entry.path)

    def read_once(storage: Storage) -> None:
        check_entry(run, manifest, entry, storage.get_file(key, path, entry.bytes), storage)

    def read(storage: Storage) -> None:
        try:
            with_retries(storage, "reading", key, read_once)
        except FileNotFoundError as exc:
            if not path.parent.is_dir():  # somebody has cleaned the temporary directory: nothing of the checkpoint is missing
                raise
            raise missing(run, manifest, entry) from exc

    try:
        confirm_damage(run.storage, read)
    except OSError as exc:
        if exc.errno is not None and exc.filename is None:  # a write reports a full disk, but not which
            exc.filename = str(path)
        raise
