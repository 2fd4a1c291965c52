"""Writes the index of a run's manifests, in the process that leads the run."""

from collections.abc import Sequence
from itertools import accumulate

from prefect_torch.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedFormatError
from prefect_torch.ckpt.runs.evaluations import ListedCheckpoint
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.parallel import for_each, read_all

from .segments import FEW, LARGEST, MOST_BYTES, Entry, Segment, list_segments, read_segment, write_segments

_MERGED = 16  # segments of one size that become one of the next
_AT_ONCE = 4096  # manifests that one call reads, so that it ends within seconds
_MOST_READ = 64 * 2**20  # bytes of these manifests, which it holds
_SEGMENTS_AT_ONCE = 4  # that are held to be compared


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
        num_stored = self._store_some(listed)
        self._oldest = None if len(listed) == num_stored else listed[num_stored].id
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
        num_stored = self._store_some(missing) if len(missing) >= FEW else 0
        self._indexed.update(it.id for it in missing[:num_stored])
        self._run.storage.delete(self._useless)
        self._useless = []
        return len(missing) - num_stored >= FEW

    def _compare(self, listed: Sequence[ListedCheckpoint]) -> set[str]:
        """Return the ids that are indexed, and note the segments of which most checkpoints are gone, or in a larger one."""
        sizes = {it.id: it.bytes for it in listed}
        indexed: set[str] = set()
        segments = list_segments(self._run.storage, self._run.layout)
        contents = zip(segments, for_each(segments, self._read_sizes, _SEGMENTS_AT_ONCE), strict=True)
        for segment, found in sorted(contents, key=lambda it: -it[0].count):
            if found is None:
                continue
            alive = {checkpoint_id for checkpoint_id, size in found if sizes.get(checkpoint_id) == size} - indexed
            if len(alive) * 2 > len(found):
                indexed |= alive
            else:
                self._useless.append(segment.key)
        return indexed

    def _read_sizes(self, segment: Segment) -> list[tuple[str, int]] | None:
        """Return the ids in a segment, and the sizes of their manifests; None if it is gone, or of a newer version."""
        found = read_segment(self._run.storage, segment)
        return None if found is None else [(it.manifest.id, it.bytes) for it in found]

    def _store_some(self, listed: Sequence[ListedCheckpoint]) -> int:
        """Index the first of `listed`, and return their number."""
        sizes = accumulate(it.bytes or 0 for it in listed[: _AT_ONCE - 1])
        some = listed[: 1 + sum(size < _MOST_READ for size in sizes)]
        read = zip(some, read_all(some, self._committed), strict=True)
        entries = [Entry(manifest, it.bytes) for it, manifest in read if manifest is not None and it.bytes is not None]
        write_segments(self._run.storage, self._run.layout, entries)
        return len(some)

    def _committed(self, listed: ListedCheckpoint) -> Manifest | None:
        """Return the manifest without attached metrics; None if it is gone or cannot be read."""
        try:
            return self._run.committed(listed.id)
        except (CheckpointNotFoundError, CheckpointCorruptError, UnsupportedFormatError):
            return None

    def _merge(self) -> None:
        """Replace sixteen segments of about one size by one of the next, or by a few large ones."""
        storage, layout = self._run.storage, self._run.layout
        segments = [it for it in list_segments(storage, layout) if it.bytes < MOST_BYTES // 2]
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
