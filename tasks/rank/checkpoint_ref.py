"""A committed checkpoint of any run, in a form that pickles."""

from dataclasses import dataclass, field, replace

from prefect_torch.ckpt import Checkpoint, CheckpointStore, Manifest, StorageSpec
from prefect_torch.ckpt.storage.protocol import RetryPolicy


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A reference to a checkpoint by its storage, its run and its id.

    Attributes:
        storage: The storage of the run.
        run: The run's name.
        checkpoint_id: The id of the checkpoint.
        manifest: Its manifest as `Manifest.encode` writes it; None if each process is to read that. Bytes, since Prefect walks
            through the parameters of a task.

    """

    storage: StorageSpec
    run: str
    checkpoint_id: str
    manifest: bytes | None = field(default=None, compare=False, repr=False)

    def open(self, opened: CheckpointStore | None = None) -> Checkpoint:
        """Return a handle, with its manifest as it was committed: metrics that are attached later may differ between ranks.

        Args:
            opened: A run; one in the same storage lends its connections.

        Raises:
            CheckpointNotFoundError: If the manifest is to be read, and there is no such checkpoint (any more).

        """
        store = self.open_run(opened)
        if self.manifest is not None:
            return store.checkpoint(Manifest.decode(self.manifest, store.path_of(self.checkpoint_id)))
        return store.checkpoint(store.committed(self.checkpoint_id))

    def open_run(self, opened: CheckpointStore | None = None, *, retry: RetryPolicy | None = None) -> CheckpointStore:
        """Return the run that the checkpoint is of.

        Args:
            opened: A run; one in the same storage lends its connections.
            retry: The retry policy of another storage; None for its own.

        Raises:
            ValueError: If the storage cannot be opened.

        """
        if opened is None or opened.spec != self.storage:
            return CheckpointStore.open(self.storage, self.run, retry=retry)
        return opened.beside(self.run)

    def with_manifest(self, manifest: Manifest) -> "CheckpointRef":
        """Return a copy with its manifest, so that `open` does not read that again."""
        return replace(self, manifest=manifest.encode())
