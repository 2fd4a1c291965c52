"""Whole checkpoints to a local folder, verified on the way."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from .keys import check_key, temporary_name
from .manifest import FileEntry, Manifest
from .verification import check_entry, missing

if TYPE_CHECKING:
    from .store import CheckpointStore

_PARALLEL_FILES = 8


def download(store: "CheckpointStore", manifest: Manifest, target: Path) -> None:
    """Write every file of a checkpoint below `target`; returns only if all are what was committed.

    Raises:
        CheckpointCorruptError: If a file differs from what was committed.
        CheckpointNotFoundError: If the checkpoint was pruned meanwhile.

    """

    def fetch(entry: FileEntry) -> None:
        path = target / check_key(entry.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(temporary_name())
        try:
            moved = store.storage.get_file(store.layout.data(manifest.id, entry.path), partial)
        except FileNotFoundError as exc:
            raise missing(store, manifest, entry) from exc
        check_entry(store, manifest, entry, moved)
        partial.replace(path)

    with ThreadPoolExecutor(_PARALLEL_FILES, "prefect-torch-download") as pool:
        list(pool.map(fetch, manifest.files))


def copy_directory(source: Path, target: Path) -> None:
    """Copy a plain folder of files."""
    shutil.copytree(source, target, dirs_exist_ok=True)
