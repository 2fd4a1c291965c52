"""From what a person writes to what they mean: a run, a checkpoint."""

from prefect_torch.ckpt import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointStore,
    Manifest,
    UnsupportedFormatError,
)
from prefect_torch.ckpt.evaluations import ListedCheckpoint
from prefect_torch.ckpt.manifest import is_id
from prefect_torch.ckpt.parallel_reads import read_all
from prefect_torch.ckpt.retention import Order
from prefect_torch.ckpt.wording import show_some
from prefect_torch.deployments.command_line.storages import open_existing_storage
from prefect_torch.deployments.command_line.terminal import note

from .ranking import rank, settle_ranking


def open_run(storage: str, run: str) -> CheckpointStore:
    """Open a run that is there.

    Raises:
        FileNotFoundError: If it is not.

    """
    store = CheckpointStore.open(open_existing_storage(storage), run)
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
