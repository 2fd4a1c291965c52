"""A synced directory before a machine reads a run, and after its last write; does nothing for any other storage."""

from collections.abc import Callable, Iterable
from pathlib import Path

from prefect_torch.ckpt.storage.backends import open_spec
from prefect_torch.ckpt.storage.protocol import Storage, StorageSpec
from prefect_torch.ckpt.storage.retry import with_retries

from .storage import FOLDER, SyncedStorage
from .transport import Transport


def is_synced(spec: StorageSpec) -> bool:
    """Return whether a tool copies the storage to where other machines reach it."""
    return Transport.of(spec.options) is not None


def download_run(spec: StorageSpec, run: str, folder: str = "") -> None:
    """Copy a run to this machine, with the storage's retries.

    Args:
        spec: Its storage.
        run: Its name.
        folder: The prefix of the keys to copy, as `Layout.attempts`, of which some were uploaded before; empty for all.

    Raises:
        StorageError: If that failed: this machine's copy may be old or missing, and the training would lose work.

    """
    if not is_synced(spec):
        return
    with_retries(open_spec(spec), "syncing", folder or run, lambda opened: _download(opened, run, folder))


def download_missing(spec: StorageSpec, run: str, keys: Iterable[str], folder: str = "") -> None:
    """Copy a run to this machine, as `download_run` does, unless it has the objects `keys`; one process does so for all.

    `keys` is iterated only if the storage is a synced directory, up to the first that is missing.
    """
    download_unless(lambda: all((Path(spec.url) / key).exists() for key in keys), spec, run, folder)


def download_unless(is_here: Callable[[], bool], spec: StorageSpec, run: str, folder: str = "") -> None:
    """Copy a run to this machine, as `download_run` does, unless `is_here()`; one process of a machine does so for all.

    `is_here` is called only if the storage is a synced directory.
    """
    if not is_synced(spec):
        return
    from filelock import FileLock  # noqa: PLC0415 - for synced directories only

    root = Path(spec.url)
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    with FileLock(root / FOLDER / "download.lock"):
        if not is_here():
            download_run(spec, run, folder)


def upload_waiting(spec: StorageSpec) -> None:
    """Upload the small objects of this process that wait for others, with the storage's retries: no others may follow.

    Raises:
        StorageError: If that failed; the next process on this machine uploads them.

    """
    if is_synced(spec):
        with_retries(open_spec(spec), "syncing", "what waits", _upload_waiting)


def _upload_waiting(storage: Storage) -> None:
    assert isinstance(storage, SyncedStorage)
    storage.upload_waiting()


def _download(storage: Storage, run: str, folder: str) -> None:
    assert isinstance(storage, SyncedStorage)
    storage.download(run, folder)
