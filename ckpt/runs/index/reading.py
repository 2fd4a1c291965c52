"""Many manifests at a time: from this process's memory, else from the index, else each from its own object."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from prefect_torch.ckpt.errors import CheckpointNotFoundError, StorageError
from prefect_torch.ckpt.runs.bulk import no_collection
from prefect_torch.ckpt.runs.evaluations import ListedCheckpoint, read_listing, with_evaluations
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.parallel import AT_ONCE, read_all

from .segments import FEW, Entry, read_index

_PAGE = 1000  # objects in one answer to a listing
_MOST_SLOW = 3  # manifests that a storage cannot give, each after minutes of retries


def list_manifests(run: Run) -> tuple[list[ListedCheckpoint], list[Manifest]]:
    """Return all checkpoints, oldest first, and the manifests of those that can be read, as `read_manifests` does.

    The parts of a long listing are requested concurrently, divided between checkpoints that are remembered or indexed.
    """
    index: dict[str, Entry] = {}

    def splits() -> list[str]:
        known = [] if run.memory is None else run.memory.ids()
        if len(known) < _PAGE:
            index.update(index or read_index(run.storage, run.layout))
            known = list(index)
        part = max(_PAGE, -(-len(known) // AT_ONCE))
        return [f"{run.layout.manifests}{it[:-1]}" for it in sorted(known)[part::part]]

    with no_collection():
        listed = read_listing(run.layout, run.storage.list(run.layout.manifests, splits=splits))
        return listed, read_manifests(run, listed, index or None)


def read_manifests(run: Run, listed: Iterable[ListedCheckpoint], index: Mapping[str, Entry] | None = None) -> list[Manifest]:
    """Return the manifests of listed checkpoints, with attached metrics; unreadable ones are left out with a warning.

    Many are read from the run's index, as far as it has them; the others cost a small read each. A manifest that the storage
    refuses, or cannot give, while it gives others, counts as unreadable.

    Args:
        run: The run.
        listed: The checkpoints.
        index: The run's index, if it has just been read.

    Raises:
        StorageError: If the storage does not answer, or cannot give several of them.
        OSError: If it refuses every request.

    """
    wanted = list(listed)
    indexed = _indexed(run, wanted, index)
    read = [it for it in wanted if it.evaluations or it.id not in indexed]
    slow: list[str] = []
    found = dict(zip((it.id for it in read), read_all(read, partial(_read, run, indexed, slow)), strict=True))
    manifests = (found[it.id] if it.id in found else indexed[it.id] for it in wanted)
    return [manifest for manifest in manifests if manifest is not None]


def _indexed(run: Run, listed: Sequence[ListedCheckpoint], index: Mapping[str, Entry] | None) -> dict[str, Manifest]:
    """Return the manifests that are remembered or indexed, as they were committed; for a few, the index is not read."""
    known = {} if run.memory is None else run.memory.recall_all(it.id for it in listed)
    unknown = {it.id: it.bytes for it in listed if it.id not in known and it.bytes is not None}
    if index is None and len(unknown) > FEW:
        index = read_index(run.storage, run.layout)
    for checkpoint_id, size in unknown.items():
        entry = None if index is None else index.get(checkpoint_id)
        if entry is not None and entry.bytes == size:
            known[checkpoint_id] = entry.manifest
            if run.memory is not None:
                run.memory.remember(entry.manifest)
    return known


def _read(run: Run, indexed: Mapping[str, Manifest], slow: list[str], listed: ListedCheckpoint) -> Manifest | None:
    try:
        if (manifest := indexed.get(listed.id)) is not None:
            return with_evaluations(run.storage, run.layout, manifest, listed.evaluations)
        return run.read_or_leave_out(listed)
    except CheckpointNotFoundError:  # pruned after the listing
        return None
    except (StorageError, OSError) as exc:
        if isinstance(exc, StorageError):
            slow.append(listed.id)  # its retries took minutes
        if len(slow) > _MOST_SLOW or not run.is_served():
            raise
        run.leave_out(listed.id, exc)
        return None
