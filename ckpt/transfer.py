"""Files of checkpoints to a local folder, verified on the way."""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .keys import check_key, temporary_name
from .manifest import FileEntry, Manifest
from .verification import check_entry, missing

if TYPE_CHECKING:
    from .store import CheckpointStore

T = TypeVar("T")
_PARALLEL_FILES = 8


def download(store: "CheckpointStore", manifest: Manifest, entries: Iterable[FileEntry], target: Path) -> None:
    """Write files of a checkpoint below `target`; returns only if all are what was committed.

    Raises:
        CheckpointCorruptError: If a file differs from what was committed.
        CheckpointNotFoundError: If the checkpoint was pruned meanwhile.

    """

    def fetch(entry: FileEntry) -> None:
        path = target / check_key(entry.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(temporary_name())
        download_file(store, manifest, entry, partial)
        partial.replace(path)

    each_file(entries, fetch)


@contextmanager
def readable_files(store: "CheckpointStore", manifest: Manifest, files: Collection[FileEntry]) -> Iterator[Path]:
    """Yield a folder of this machine with `files` of a checkpoint, verified: in place where it sees them, else downloaded.

    Raises:
        CheckpointCorruptError: If a file differs from what was committed.
        CheckpointNotFoundError: If the checkpoint was pruned meanwhile.

    """
    local = store.storage.local_path(store.layout.data(manifest.id))
    if local is not None and manifest.files:  # without any there may be no folder
        store.verify(replace(manifest, files=tuple(files)))
        yield local
        return
    from .cache import downloaded  # noqa: PLC0415 - a fifth of this package's import time, for remote storages only

    entries = {entry.path: entry for entry in files}
    # The manifest holds every digest: equal names are equal bytes, wherever they come from.
    name = f"{store.path_of(manifest.id)} {manifest.encode().decode()}"
    with downloaded(name, entries, lambda path, target: download_file(store, manifest, entries[path], target)) as folder:
        yield folder


def download_file(store: "CheckpointStore", manifest: Manifest, entry: FileEntry, path: Path) -> None:
    """Write one file of a checkpoint to `path`; what is there after an error is no file of it.

    Raises:
        CheckpointCorruptError: If it differs from what was committed.
        CheckpointNotFoundError: If the checkpoint was pruned meanwhile.
        OSError: If `path` cannot be written, naming it.

    """
    try:
        moved = store.storage.get_file(store.layout.data(manifest.id, entry.path), path)
    except FileNotFoundError as exc:
        raise missing(store, manifest, entry) from exc
    except OSError as exc:
        if exc.errno is not None and exc.filename is None:  # a write tells of a full disk, but not of which
            exc.filename = str(path)
        raise
    check_entry(store, manifest, entry, moved)


def each_file(files: Iterable[T], work: Callable[[T], None]) -> None:
    """Do `work` for each of `files`, several at a time; the first error is raised, and what has not begun is left."""
    with ThreadPoolExecutor(_PARALLEL_FILES, "prefect-torch-download") as pool:
        list(pool.map(work, files))


def copy_folder(source: Path, target: Path, paths: Iterable[str] | None) -> None:
    """Copy a plain folder, or the files of it at `paths`, into another one."""
    if paths is None:
        shutil.copytree(source, target, dirs_exist_ok=True)
        return
    for path in paths:
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, place)
