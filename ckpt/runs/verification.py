"""Verification: whether the stored files are the committed ones."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from prefect_torch.ckpt.errors import CheckpointCorruptError
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.confirmed_reads import confirm_damage
from prefect_torch.ckpt.storage.machine.mounts import shared_mount_of
from prefect_torch.ckpt.storage.parallel import for_each
from prefect_torch.ckpt.storage.protocol import Storage, Transfer
from prefect_torch.ckpt.storage.retry import with_retries
from prefect_torch.ckpt.storage.sizes import find_other_size, refuse_part

VerifyLevel: TypeAlias = Literal["digest", "size", "none"]
Once: TypeAlias = Callable[[FileEntry, Callable[[], None]], None]


def _always(_: FileEntry, read: Callable[[], None]) -> None:
    read()


def verify(run: Run, manifest: Manifest, level: VerifyLevel, once: Once = _always) -> None:
    """Return only if every file exists with the size, and at level "digest" the content, of the manifest.

    Args:
        run: The run.
        manifest: The checkpoint.
        level: The level of verification.
        once: Receives each file with a function that reads it to compare its content, and calls that unless the content is
            known to be the committed one.

    Raises:
        CheckpointCorruptError: Naming the first file that differs in two reads.
        CheckpointNotFoundError: If the checkpoint is being pruned.
        ValueError: If there is no such level.

    """
    try:
        verify_uncommitted(run, manifest, level, once)
    except CheckpointCorruptError:
        run.committed(manifest.id)  # a prune deletes the manifest first: files missing then are no damage
        raise


def verify_uncommitted(run: Run, manifest: Manifest, level: VerifyLevel, once: Once = _always) -> None:
    """Verify a checkpoint whose manifest is not in the run, as `verify` does.

    Raises:
        CheckpointCorruptError: Naming the first file that differs in two reads.
        ValueError: If there is no such level.

    """
    if level not in get_args(VerifyLevel):  # a misspelled one would compare sizes alone
        raise ValueError(f"the level {level!r} is unknown: give 'digest', 'size' or 'none'")
    if level == "none":
        return
    confirm_damage(run.storage, partial(_verify_sizes, run, manifest))
    if level == "digest":
        for_each(manifest.files, lambda entry: once(entry, partial(_read_and_verify, run, manifest, entry)))


def check_entry(run: Run, manifest: Manifest, entry: FileEntry, got: Transfer, storage: Storage) -> None:
    """Compare the bytes that were read with those that were committed.

    Args:
        run: The run.
        manifest: The manifest of the checkpoint.
        entry: The file's entry in it.
        got: What was read.
        storage: The storage that it was read from, without retries.

    Raises:
        CheckpointCorruptError: If they differ.
        StorageError: If the number of bytes differs, though the storage has as many as were committed.

    """
    refuse_part(storage, run.layout.data(manifest.id, entry.path), got.bytes, entry.bytes)
    _check_size(run, manifest, entry, got.bytes)
    if got.digest != entry.digest:
        raise CheckpointCorruptError(
            f"{run.path_of(manifest.id)}/{entry.path} differs from what rank {entry.rank} committed: "
            f"xxh3-128 {got.digest} instead of {entry.digest}"
        )


def missing(run: Run, manifest: Manifest, entry: FileEntry) -> CheckpointCorruptError:
    """Return the error for a file that is missing although its checkpoint exists.

    Raises:
        CheckpointNotFoundError: If the checkpoint does not exist either; a prune deletes its manifest first.

    """
    run.committed(manifest.id)
    return _missing(run, manifest, entry)


def _missing(run: Run, manifest: Manifest, entry: FileEntry) -> CheckpointCorruptError:
    path = f"{run.path_of(manifest.id)}/{entry.path}"
    is_folder = run.storage.local_path(run.layout.data(manifest.id)) is not None
    mount = shared_mount_of(Path(run.storage.url)) if is_folder else None
    may_be_late = "" if mount is None else f" here; another machine may see it, if this mount ({mount}) shows old listings"
    return CheckpointCorruptError(f"{path} is missing{may_be_late}")


def _verify_sizes(run: Run, manifest: Manifest, storage: Storage) -> None:
    entries = {run.layout.data(manifest.id, entry.path): entry for entry in manifest.files}
    other = find_other_size(storage, run.layout.data(manifest.id), {key: entry.bytes for key, entry in entries.items()})
    if other is not None:
        key, found = other
        if found is None:
            raise _missing(run, manifest, entries[key])
        _check_size(run, manifest, entries[key], found)


def _check_size(run: Run, manifest: Manifest, entry: FileEntry, size: int) -> None:
    if size != entry.bytes:
        raise CheckpointCorruptError(f"{run.path_of(manifest.id)}/{entry.path} has {size} bytes instead of {entry.bytes}")


def _read_and_verify(run: Run, manifest: Manifest, entry: FileEntry) -> None:
    confirm_damage(run.storage, partial(_verify_digest, run, manifest, entry))


def _verify_digest(run: Run, manifest: Manifest, entry: FileEntry, storage: Storage) -> None:
    key = run.layout.data(manifest.id, entry.path)
    try:
        with_retries(storage, "reading", key, lambda it: check_entry(run, manifest, entry, it.digest(key), it))
    except FileNotFoundError as exc:
        raise _missing(run, manifest, entry) from exc
