"""A restored checkpoint's files on the leader's node: read from a bucket once, verified in transit, reused by its ranks."""

import logging
import shutil
import tempfile
from contextlib import ExitStack

from prefect_torch.ckpt.errors import CheckpointError
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.verification import VerifyLevel, verify

from .download import cached_files

_ROOM = 2  # times the checkpoint's size must be free: the training needs space, too, and TMPDIR may be memory
_logger = logging.getLogger(__name__)


class NodeCopy:
    """Keeps the files it has verified among the node's downloads until it is released."""

    def __init__(self) -> None:
        self._kept = ExitStack()

    def verify(self, run: Run, manifest: Manifest, level: VerifyLevel) -> None:
        """Verify as `CheckpointStore.verify` does; files read from a bucket for it are kept, if there is room.

        Raises:
            CheckpointCorruptError: Naming the first file that is missing, short, long or changed.
            CheckpointNotFoundError: If the checkpoint is being pruned.

        """
        is_in_place = run.storage.local_path(run.layout.data(manifest.id)) is not None
        if level != "digest" or is_in_place or not _has_room(manifest.total_bytes):
            verify(run, manifest, level)
            return
        verify(run, manifest, "size")
        try:
            self._kept.enter_context(cached_files(run, manifest, manifest.files))
        except CheckpointError:
            raise
        except OSError as exc:  # an error of this machine's disk, which a verification does not need
            _logger.warning("checkpoint %s is not kept on this node, so each reader reads it again: %s", manifest.id, exc)
            verify(run, manifest, level)

    def release(self) -> None:
        """Release the files as soon as no other process on this node reads them; do nothing if there are none."""
        self._kept.close()


def _has_room(num_bytes: int) -> bool:
    return shutil.disk_usage(tempfile.gettempdir()).free >= _ROOM * num_bytes
