"""The pin of another run's checkpoint that a training starts from, until the training has its own checkpoint."""

import xxhash
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, StorageError
from prefect_torch.ckpt.storage.protocol import INTERACTIVE_RETRY_POLICY
from prefect_torch.ckpt.storage.specs.location import canonical
from prefect_torch.ckpt.text import as_command
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.run_logs import get_run_logger


class SourcePin:
    """The pin of a checkpoint that a run starts from.

    All attempts of a run set and remove the same pin, so a later attempt removes the pin of one that was killed.

    Args:
        source: The checkpoint.
        run: The path or URL of the run that starts from it.

    """

    def __init__(self, source: CheckpointRef, run: str) -> None:
        self._source = source
        self._store = CheckpointStore.open(source.storage, source.run)
        self._token = xxhash.xxh32_hexdigest(canonical(run).encode(errors="surrogatepass"))
        self._may_exist = True

    def set(self) -> None:
        """Pin the checkpoint; costs five requests. No effect on a storage that cannot be written to.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint, or a prune is deleting it at this moment.
            CheckpointCorruptError: If its manifest is damaged.

        """
        try:
            self._store.pin(self._source.checkpoint_id, self._token)
        except CheckpointNotFoundError:
            raise
        except (OSError, StorageError, NotImplementedError) as exc:
            get_run_logger().info("%s is not pinned meanwhile, so a prune may delete it: %s", self._path, exc)

    def remove(self) -> None:
        """Remove the pin, once; harmless if there is none. A storage that does not answer is given up after 20 seconds."""
        if not self._may_exist:
            return
        self._may_exist = False
        try:
            store = CheckpointStore.open(self._source.storage, self._source.run, retry=INTERACTIVE_RETRY_POLICY)
            store.unpin(self._source.checkpoint_id, self._token)
        except PermissionError:  # without the permission, no pin was set
            return
        except (OSError, StorageError, NotImplementedError) as exc:
            source = self._source
            unpin = as_command("unpin", self._store.storage.url, source.run, source.checkpoint_id)
            get_run_logger().warning("%s stays pinned (%s); `%s` removes its pins", self._path, exc, unpin)

    @property
    def _path(self) -> str:
        return self._store.path_of(self._source.checkpoint_id)
