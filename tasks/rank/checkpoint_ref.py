"""A committed checkpoint of any run, in a form that travels to other processes."""

from dataclasses import dataclass, field, replace

from prefect_torch.ckpt import Checkpoint, CheckpointStore, Manifest, StorageSpec


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Which checkpoint, of which run, in which storage.

    Attributes:
        storage: Where the run lies.
        run: The run's name.
        checkpoint_id: The checkpoint.
        manifest: Its manifest as `Manifest.encode` writes it, where whoever chose it has read that; None has each process read
            it. Bytes, since Prefect walks through what is handed to a task.

    """

    storage: StorageSpec
    run: str
    checkpoint_id: str
    manifest: bytes | None = field(default=None, compare=False, repr=False)

    def open(self) -> Checkpoint:
        """Return a handle, with its manifest as it was committed: what is attached since may differ from rank to rank.

        Raises:
            CheckpointNotFoundError: If the manifest is to be read, and the checkpoint does not exist (any more).

        """
        store = CheckpointStore.open(self.storage, self.run)
        if self.manifest is not None:
            return store.checkpoint(Manifest.decode(self.manifest, store.path_of(self.checkpoint_id)))
        return store.checkpoint(store.committed(self.checkpoint_id))

    def with_manifest(self, manifest: Manifest) -> "CheckpointRef":
        """Return the same with its manifest, so that nobody who opens it reads that again."""
        return replace(self, manifest=manifest.encode())
