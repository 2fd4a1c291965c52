"""From what a person writes to what they mean: a storage, a run, a checkpoint."""

from dataclasses import replace
from pathlib import Path

from prefect_torch.ckpt import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointStore,
    Manifest,
    Storage,
    StorageError,
    UnsupportedFormatError,
)
from prefect_torch.ckpt.runs.evaluations import ListedCheckpoint
from prefect_torch.ckpt.runs.manifest import is_id
from prefect_torch.ckpt.runs.retention import Order
from prefect_torch.ckpt.storage.location import is_block_slug
from prefect_torch.ckpt.storage.opening import open_storage, parse_storage
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.text import show_some

from .ranking import rank, settle_ranking
from .terminal import note

_PATIENCE = RetryPolicy(deadline_s=20.0)  # somebody waits at a terminal; a training has two minutes


def open_place(text: str) -> Storage:
    """Open the storage that `text` means, which must be there.

    Raises:
        ValueError: If it means none.
        FileNotFoundError: If it is a folder that does not exist.

    """
    storage = open_new_place(text)
    if "://" not in storage.url and not Path(storage.url).is_dir():
        raise FileNotFoundError(f"there is no folder {storage.url}; give the storage that a training was given")
    return storage


def open_new_place(text: str) -> Storage:
    """Open the storage that `text` means, which a training may yet have to make; only a block's name imports prefect.

    Raises:
        ValueError: If it means none.
        StorageError: If its block cannot be loaded.

    """
    try:
        spec = parse_storage(text)
    except ValueError:
        raise
    except Exception as exc:
        if not is_block_slug(text):
            raise
        raise StorageError(f"the block {text} could not be loaded: {exc}; is PREFECT_API_URL the server that has it?") from exc
    return open_storage(replace(spec, retry=_PATIENCE))


def open_run(storage: str, run: str) -> CheckpointStore:
    """Open a run that is there.

    Raises:
        FileNotFoundError: If it is not.

    """
    store = CheckpointStore.open(open_place(storage), run)
    layout = store.layout
    if not any(next(store.storage.list(prefix), None) for prefix in (layout.attempts, layout.manifests)):
        raise FileNotFoundError(
            f"there is no run {run!r} in {store.storage.url}; prefect-torch ls {storage} shows those there are"
        )
    return store


def read_manifests(store: CheckpointStore) -> list[Manifest]:
    """Return every readable manifest, oldest first: a small read each, many at once; of others, stderr tells why."""

    def read(listed: ListedCheckpoint) -> Manifest | None:
        try:
            return store.read(listed)
        except CheckpointNotFoundError:  # pruned since it was listed
            return None
        except CheckpointCorruptError as exc:
            note(f"left out, damaged: {exc}")
            return None
        except UnsupportedFormatError as exc:
            note(f"left out: {exc}")
            return None

    return [manifest for manifest in read_all(store.listed(), read) if manifest is not None]


def find_checkpoint(store: CheckpointStore, text: str, metric: str | None = None, order: Order | None = None) -> Manifest:
    """Return the checkpoint that `text` means: an id, the beginning of one, "latest" or "best".

    Raises:
        CheckpointNotFoundError: If there is none.
        ValueError: If several begin so.

    """
    if is_id(text):
        return store.get(text)
    if text == "latest":
        found = store.latest()
    elif text == "best":
        ranking = settle_ranking(store, metric, order)
        found = next(iter(rank(read_manifests(store), ranking)), None)
    else:
        return store.get(_only_id(store, text))
    if found is None:
        raise CheckpointNotFoundError(f"run {store.run!r} in {store.storage.url} has no checkpoint yet")
    return found


def _only_id(store: CheckpointStore, beginning: str) -> str:
    matching = [checkpoint_id for checkpoint_id in store.ids() if checkpoint_id.startswith(beginning)]
    if not matching:
        raise CheckpointNotFoundError(
            f"run {store.run!r} in {store.storage.url} has no checkpoint that begins with {beginning!r}; "
            "give an id as ls shows it, latest or best"
        )
    if len(matching) > 1:
        raise ValueError(f"{len(matching)} checkpoints begin with {beginning!r}: {show_some(matching)}")
    return matching[0]
