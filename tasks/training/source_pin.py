"""The pin of another run's checkpoint that a training starts from, until the training has its own checkpoint."""

import xxhash
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, StorageError
from prefect_torch.ckpt.storage.protocol import INTERACTIVE_RETRY_POLICY
from prefect_torch.ckpt.text import as_command
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.run_logs import get_run_logger


class SourcePin:
    """The pin of a checkpoint that a run starts from; its storage is opened only to set or remove the pin.

    All attempts of a run set and remove the same pin, wherever its storage is mounted, so a later attempt removes the pin of
    one that was killed. Costs a small read.

    Args:
        source: The checkpoint.
        run: The run that starts from it, which is claimed.

    """

    def __init__(self, source: CheckpointRef, run: CheckpointStore) -> None:
        self._source = source
        self._run = run
        self._token = _token_of(run)
        self._may_exist = True

    def set(self, store: CheckpointStore) -> None:
        """Pin the checkpoint in its run `store`; costs five requests. No effect on a storage that cannot be written to.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint, or a prune is deleting it at this moment.
            CheckpointCorruptError: If its manifest is damaged.

        """
        try:
            store.pin(self._source.checkpoint_id, self._token)
        except CheckpointNotFoundError:
            raise
        except (OSError, StorageError, NotImplementedError) as exc:
            path = store.path_of(self._source.checkpoint_id)
            get_run_logger().info("%s is not pinned meanwhile, so a prune may delete it: %s", path, exc)

    def remove(self) -> None:
        """Remove the pin, once; harmless if there is none. Another storage has 20 seconds to answer."""
        if not self._may_exist:
            return
        self._may_exist = False
        source = self._source
        try:
            source.open_run(self._run, retry=INTERACTIVE_RETRY_POLICY).unpin(source.checkpoint_id, self._token)
        except PermissionError:  # without the permission, no pin was set
            return
        except (OSError, StorageError, NotImplementedError, ValueError) as exc:  # the last is of a login that has failed since
            unpin = as_command("unpin", source.storage.url, source.run, source.checkpoint_id)
            text = "checkpoint %s of run %r stays pinned (%s); `%s` removes its pins"
            get_run_logger().warning(text, source.checkpoint_id, source.run, exc, unpin)


def _token_of(run: CheckpointStore) -> str:
    """Return what only this run's pins have: another machine's run may have the same path, and this one another path there."""
    run_id = (run.records.get_json(run.layout.run_info) or {}).get("run_id")
    return xxhash.xxh32_hexdigest(f"{run_id}/{run.name}".encode())
