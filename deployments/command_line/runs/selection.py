"""Runs and checkpoints that a command is given as text."""

from dataclasses import replace

from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, Manifest
from prefect_torch.ckpt.runs.manifest import is_id
from prefect_torch.ckpt.runs.manifest_cache import ManifestMemory
from prefect_torch.ckpt.runs.retention import Order
from prefect_torch.ckpt.text import show_some
from prefect_torch.deployments.command_line.storages import open_existing_storage

from .score import best_first, resolve_score


def open_run(storage: str, run: str) -> CheckpointStore:
    """Open an existing run; a command reads each of its manifests once.

    Raises:
        FileNotFoundError: If there is no such run.

    """
    store = replace(CheckpointStore.open(open_existing_storage(storage), run), memory=ManifestMemory())
    layout = store.layout
    if not any(next(store.storage.list(prefix), None) for prefix in (layout.attempts, layout.manifests)):
        raise FileNotFoundError(f"there is no run {run!r} in {store.storage.url}; prefect-torch ls {storage} lists the runs")
    return store


def find_checkpoint(store: CheckpointStore, text: str, metric: str | None = None, order: Order | None = None) -> Manifest:
    """Return the checkpoint that `text` names: an id, the beginning of an id, "latest" or "best".

    Raises:
        CheckpointNotFoundError: If there is no such checkpoint.
        ValueError: If several ids begin with `text`.

    """
    if is_id(text):
        return store.get(text)
    if text == "latest":
        found = store.latest()
    elif text == "best":
        score = resolve_score(store, metric, order)
        found = next(iter(best_first(store.list(), score)), None)
    else:
        return store.get(_only_id(store, text))
    if found is None:
        raise CheckpointNotFoundError(f"run {store.run!r} in {store.storage.url} has no checkpoint yet")
    return found


def _only_id(store: CheckpointStore, beginning: str) -> str:
    matching = [checkpoint_id for checkpoint_id in store.ids() if checkpoint_id.startswith(beginning)]
    if not matching:
        raise CheckpointNotFoundError(
            f"run {store.run!r} in {store.storage.url} has no checkpoint whose id begins with {beginning!r}; "
            "give an id as listed by ls, latest or best"
        )
    if len(matching) > 1:
        raise ValueError(f"the ids of {len(matching)} checkpoints begin with {beginning!r}: {show_some(matching)}")
    return matching[0]
