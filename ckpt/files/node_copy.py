"""The verified copy of a checkpoint that the ranks of one node share while they restore it."""

import logging
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prefect_torch.ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.verification import VerifyLevel, verify

from .download import cached_files, found_files
from .verified_in_place import known_states, verify_in_place

_ROOM = 2  # times the checkpoint's size must be free: the training needs space, too, and TMPDIR may be memory
_logger = logging.getLogger(__name__)


class NodeCopy:
    """Keeps the files it has verified among the node's downloads until it is released, or what it knows of those in place.

    Args:
        num_readers: The number of processes on this node that need them.

    """

    def __init__(self, num_readers: int = 1) -> None:
        self.num_readers = num_readers
        self._kept = ExitStack()
        self._held: set[str] = set()

    def __reduce__(self) -> "tuple[type[NodeCopy], tuple[int]]":
        """Pickle a copy that keeps nothing: files are kept by a process."""
        return type(self), (self.num_readers,)

    def verify(self, run: Run, manifest: Manifest, level: VerifyLevel) -> None:
        """Verify as `CheckpointStore.verify` does, and keep the files that this reads from a bucket if there is enough space.

        Raises:
            CheckpointCorruptError: Naming the first file that is missing, short, long or changed.
            CheckpointNotFoundError: If the checkpoint is being pruned.

        """
        if _is_in_place(run, manifest):
            if level == "digest":
                self.hold(run, manifest)
            verify_in_place(run, manifest, manifest.files, level)
            return
        if level != "digest" or not _has_room(manifest.files):
            verify(run, manifest, level)
            return
        verify(run, manifest, "size")
        if self.keep(run, manifest, manifest.files) is None:
            verify(run, manifest, level)

    def hold(self, run: Run, manifest: Manifest) -> None:
        """Keep what this machine's processes know of the files in place; do nothing for a bucket, or if it is kept already."""
        if manifest.id not in self._held:
            self._held.add(manifest.id)
            self._kept.enter_context(known_states(run, manifest))

    def keep(self, run: Run, manifest: Manifest, files: Collection[FileEntry]) -> Path | None:
        """Return a directory with `files`, verified, of which each was downloaded once on this node.

        Returns None if `files` is empty, they are read in place, this node does not have all of them and has too little
        space for them, or the disk fails.

        Raises:
            CheckpointCorruptError: If a file differs from the committed one.
            CheckpointNotFoundError: If the checkpoint was pruned meanwhile.

        """
        if not files or _is_in_place(run, manifest):
            return None
        try:
            with found_files(run, manifest, files) as found:
                if found is None and not _has_room(files):
                    return None
                return self._kept.enter_context(cached_files(run, manifest, files))
        except CheckpointError:
            raise
        except OSError as exc:  # this machine's disk failed, which a read or a verification does not need
            _logger.warning("checkpoint %s is not kept on this node, so each reader reads it again: %s", manifest.id, exc)
            return None

    def release(self) -> None:
        """Release the files, which are deleted once no other process on this node reads them; do nothing if there are none."""
        self._kept.close()
        self._held.clear()


@contextmanager
def despite_damaged_copy() -> Iterator[None]:
    """Log that files which this node has downloaded are damaged or gone, and end the body, which returns if they are whole."""
    try:
        yield
    except (CheckpointCorruptError, CheckpointNotFoundError) as exc:
        _logger.warning("%s; reading it from where it was committed", exc)


def _is_in_place(run: Run, manifest: Manifest) -> bool:
    return run.storage.local_path(run.layout.data(manifest.id)) is not None


def _has_room(files: Collection[FileEntry]) -> bool:
    return shutil.disk_usage(tempfile.gettempdir()).free >= _ROOM * sum(entry.bytes for entry in files)
