"""A committed checkpoint of any run, in a form that travels to other processes."""

from dataclasses import dataclass

from prefect_torch.ckpt import Checkpoint, CheckpointStore, StorageSpec


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Which checkpoint, of which run, in which storage.

    Attributes:
        storage: Where the run lies.
        run: The run's name.
        checkpoint_id: The checkpoint.

    """

    storage: StorageSpec
    run: str
    checkpoint_id: str

    def open(self) -> Checkpoint:
        """Return a handle, with its manifest read as it was committed: what is attached since may differ from rank to rank.

        Raises:
            CheckpointNotFoundError: If it does not exist (any more).

        """
        store = CheckpointStore.open(self.storage, self.run)
        return store.checkpoint(store.committed(self.checkpoint_id))
