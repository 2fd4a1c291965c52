"""Writes the index of a run's manifests, in the process that leads the run."""

from collections.abc import Sequence

from prefect_torch.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedFormatError
from prefect_torch.ckpt.runs.evaluations import ListedCheckpoint
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.parallel import read_all

from .segments import FEW, LARGEST, Entry, list_segments, read_segment, write_segments

_MERGED = 16  # segments of one size that become one of the next
_AT_ONCE = 4096  # manifests that one call reads, so that it ends within seconds


class IndexWriter:
    """Keeps the index of a run complete, and in few segments; for one thread of the run's leader.

    A new segment is stored before those that it replaces are deleted. A crash in between leaves entries in two segments, which
    harms no reader; `repair` deletes one of the segments.

    Args:
        run: The run.

    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._oldest: str | None = None
        self._num_new = 0
        self._indexed: set[str] | None = None
        self._useless: list[str] = []

    def add(self, checkpoint_id: str) -> bool:
        """Record a commit, and return whether `write` is due."""
        self._oldest = checkpoint_id if self._oldest is None else min(self._oldest, checkpoint_id)
        self._num_new += 1
        return self._num_new % FEW == 0

    def write(self) -> None:
        """Store a segment of the new checkpoints, if many still exist, and merge segments of one size.

        Raises:
            StorageError: If the storage fails; the next call does the rest.

        """
        if self._oldest is None:
            return
        listed = self._run.listed(since=self._oldest)
        if len(listed) < FEW:
            return
        self._store(listed[:_AT_ONCE])
        self._oldest = None if len(listed) <= _AT_ONCE else listed[_AT_ONCE].id
        self._merge()

    def repair(self, listed: Sequence[ListedCheckpoint]) -> bool:
        """Index missing manifests, and delete useless segments; return whether more are missing, for another call.

        Args:
            listed: All checkpoints of the run; the same in each call.

        Raises:
            StorageError: If the storage fails; the next call does the rest.

        """
        if self._indexed is None:
            self._indexed = self._compare(listed)
        missing = [it for it in listed if it.id not in self._indexed and it.bytes is not None]
        if len(missing) >= FEW:
            self._store(missing[:_AT_ONCE])
            self._indexed.update(it.id for it in missing[:_AT_ONCE])
        self._run.storage.delete(self._useless)
        self._useless = []
        return len(missing) > _AT_ONCE

    def _compare(self, listed: Sequence[ListedCheckpoint]) -> set[str]:
        """Return the ids that are indexed, and note the segments of which most checkpoints are gone, or in a larger one."""
        sizes = {it.id: it.bytes for it in listed}
        indexed: set[str] = set()
        segments = list_segments(self._run.storage, self._run.layout)
        contents = zip(segments, read_all(segments, lambda it: read_segment(self._run.storage, it)), strict=True)
        for segment, found in sorted(contents, key=lambda it: -it[0].count):
            if found is None:
                continue
            alive = {it.manifest.id for it in found if sizes.get(it.manifest.id) == it.bytes} - indexed
            if len(alive) * 2 > len(found):
                indexed |= alive
            else:
                self._useless.append(segment.key)
        return indexed

    def _store(self, listed: Sequence[ListedCheckpoint]) -> None:
        read = zip(listed, read_all(listed, self._committed), strict=True)
        entries = [Entry(manifest, it.bytes) for it, manifest in read if manifest is not None and it.bytes is not None]
        write_segments(self._run.storage, self._run.layout, entries)

    def _committed(self, listed: ListedCheckpoint) -> Manifest | None:
        """Return the manifest without attached metrics; None if it is gone or cannot be read."""
        try:
            return self._run.committed(listed.id)
        except (CheckpointNotFoundError, CheckpointCorruptError, UnsupportedFormatError):
            return None

    def _merge(self) -> None:
        """Replace sixteen segments of about one size by one of the next."""
        storage, layout = self._run.storage, self._run.layout
        segments = list_segments(storage, layout)
        for least, most in ((0, FEW * _MERGED), (FEW * _MERGED, LARGEST)):
            alike = [it for it in segments if least <= it.count < most]
            if len(alike) < _MERGED:
                continue
            contents = zip(alike, read_all(alike, lambda segment: read_segment(storage, segment)), strict=True)
            read = {segment.key: found for segment, found in contents if found is not None}  # else it is a newer version's
            if len(read) < _MERGED:  # or another leader merges them
                continue
            entries = {it.manifest.id: it for found in read.values() for it in found}
            write_segments(storage, layout, entries.values())
            storage.delete(read)
