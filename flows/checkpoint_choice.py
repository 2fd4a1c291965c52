"""Which checkpoints a flow is about: those that a person names, or those that no evaluation has looked at yet."""

from collections.abc import Iterator

from prefect_torch.ckpt import Checkpoint, CheckpointStore, StorageSpec
from prefect_torch.ckpt.runs.layout import check_run_name
from prefect_torch.ckpt.runs.manifest import is_id
from prefect_torch.tasks.options.settings import configured_storage
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef


def find_named(checkpoint: str, storage: StorageSpec, run: str | None = None) -> CheckpointRef:
    """Return the checkpoint that `checkpoint` names; asks the storage nothing.

    Args:
        checkpoint: An id in `run`, "run/id", or a path or URL.
        storage: Where it lies, unless it is a path or URL elsewhere; one in this storage is read with its credentials.
        run: The run of an id, where it is given without.

    Raises:
        ValueError: If it names none.

    """
    if is_id(checkpoint):
        if run is None:
            raise ValueError(f"checkpoint {checkpoint}: give its run, or its path or URL")
        return CheckpointRef(storage, check_run_name(run), checkpoint)
    folder, _, name = checkpoint.partition("/")
    if is_id(name):
        return CheckpointRef(storage, check_run_name(folder), name)
    named = Checkpoint(checkpoint)
    if named.store is None or named.id is None:
        raise ValueError(f"checkpoint {checkpoint!r}: give a committed checkpoint's id, its path or URL, or 'run/id'")
    is_here = named.store.spec.url == storage.url
    return CheckpointRef(storage if is_here else configured_storage(named.store.spec.url), named.store.run, named.id)


class Unevaluated:
    """The checkpoints of a run that have no evaluation of a name, each told once; one that is damaged counts as none.

    Args:
        store: The run.
        name: The evaluation's name.

    """

    def __init__(self, store: CheckpointStore, name: str) -> None:
        self._store = store
        self._name = name
        self._seen: set[str] = set()

    def find(self) -> Iterator[CheckpointRef]:
        """Yield those that have come since, oldest first; costs a listing, and a small read for each object of a new one."""
        new = [listed for listed in self._store.listed() if listed.id not in self._seen]
        self._seen.update(listed.id for listed in new)
        for manifest in self._store.readable(new):
            if self._name not in manifest.evaluations:
                yield CheckpointRef(self._store.spec, self._store.run, manifest.id)
