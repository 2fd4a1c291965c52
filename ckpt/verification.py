"""Whether what is stored is what was committed."""

from pathlib import Path
from typing import TYPE_CHECKING

from .digest import digest_file
from .errors import CheckpointCorruptError
from .manifest import FileEntry, Manifest
from .scratch import scratch_folder
from .storage import Transfer

if TYPE_CHECKING:
    from .store import CheckpointStore, VerifyLevel


def verify(store: "CheckpointStore", manifest: Manifest, level: "VerifyLevel") -> None:
    """Return only if every file is there with the size, and at level "digest" the content, of the manifest.

    Raises:
        CheckpointCorruptError: Naming the first file that differs.
        CheckpointNotFoundError: If the checkpoint is being pruned.

    """
    if level == "none":
        return
    _verify_sizes(store, manifest)
    if level == "digest":
        with scratch_folder() as scratch:
            for entry in manifest.files:
                check_entry(store, manifest, entry, _read(store, manifest, entry, scratch))


def check_entry(store: "CheckpointStore", manifest: Manifest, entry: FileEntry, got: Transfer) -> None:
    """Compare what was read with what was committed.

    Raises:
        CheckpointCorruptError: If it differs.

    """
    if (got.bytes, got.digest) != (entry.bytes, entry.digest):
        raise CheckpointCorruptError(
            f"{store.path_of(manifest.id)}/{entry.path} differs from what rank {entry.rank} committed: "
            f"{got.bytes} bytes with xxh3-128 {got.digest} instead of {entry.bytes} bytes with {entry.digest}"
        )


def _verify_sizes(store: "CheckpointStore", manifest: Manifest) -> None:
    prefix = store.layout.data(manifest.id)
    sizes = {info.key.removeprefix(prefix): info.bytes for info in store.storage.list(prefix)}
    for entry in manifest.files:
        size = sizes.get(entry.path)
        if size is None:
            raise missing(store, manifest, entry)
        if size != entry.bytes:
            raise CheckpointCorruptError(f"{store.path_of(manifest.id)}/{entry.path} has {size} bytes instead of {entry.bytes}")


def missing(store: "CheckpointStore", manifest: Manifest, entry: FileEntry) -> CheckpointCorruptError:
    """Return the error for a file that is not there although its checkpoint is.

    Raises:
        CheckpointNotFoundError: If the checkpoint is not there either; who prunes deletes its manifest first.

    """
    store.committed(manifest.id)
    return CheckpointCorruptError(f"{store.path_of(manifest.id)}/{entry.path} is missing")


def _read(store: "CheckpointStore", manifest: Manifest, entry: FileEntry, scratch: Path) -> Transfer:
    key = store.layout.data(manifest.id, entry.path)
    local = store.storage.local_path(key)
    target = scratch / "object"
    try:
        return store.storage.get_file(key, target) if local is None else digest_file(local)
    except FileNotFoundError as exc:
        raise missing(store, manifest, entry) from exc
    finally:
        target.unlink(missing_ok=True)
