"""The reads that the ranks of a node have in common: one of them downloads a file from the bucket, the others find it."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from prefect_torch.ckpt.files.node_copy import NodeCopy, despite_damaged_copy
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage

from .read import Block, StateReader

T = TypeVar("T")
_LEAST_SAVING = 1.5  # times a file's size; a copy costs a write and a read of the disk that a read into place does not


@dataclass(frozen=True, slots=True)
class SharedReads:
    """The reads of a state, in which files that all ranks of a node need are downloaded once.

    Attributes:
        run: The run.
        manifest: The checkpoint.
        reader: Reads it where it was committed.
        copy: Keeps the downloaded files until every rank of the node has read them.

    """

    run: Run
    manifest: Manifest
    reader: StateReader
    copy: NodeCopy

    def read_file(self, path: str, read: Callable[[StateReader], T]) -> T:
        """Return what `read` finds in a file that all ranks read."""
        return self._from_node([path] if path in self.reader.files else [], read)

    def read(self, blocks: Sequence[Block]) -> None:
        """Read `blocks` as `StateReader.read` does; files that all ranks of the node need are downloaded once.

        Raises:
            CheckpointCorruptError: If bytes, or a file, are missing or differ; blocks read before stay.

        """
        common = files_in_common(blocks, self.reader.files.values(), self.copy.num_readers)
        together = [block for block in blocks if block.file in common]
        if together:
            self._from_node(sorted(common), lambda reader: reader.read(together))
        self.reader.read([block for block in blocks if block.file not in common])

    def _from_node(self, paths: Collection[str], read: Callable[[StateReader], T]) -> T:
        with despite_damaged_copy():
            folder = self.copy.keep(self.run, self.manifest, [self.reader.files[path] for path in paths])
            if folder is not None:
                return read(replace(self.reader, storage=LocalStorage(folder), folder="", where=str(folder)))
        return read(self.reader)


def files_in_common(blocks: Sequence[Block], files: Collection[FileEntry], num_ranks: int) -> set[str]:
    """Return the files that are better downloaded once for all ranks of a node than read by each of them.

    A tensor that this rank reads whole is a replica: every rank reads it. Of a sharded one, each rank reads another part.

    Args:
        blocks: What this rank reads.
        files: The files of the state.
        num_ranks: The number of the node's ranks.

    """
    replicated: Counter[str] = Counter()
    for block in blocks:
        if block.is_replicated:
            replicated[block.file] += block.bytes
    return {file.path for file in files if replicated[file.path] * num_ranks >= _LEAST_SAVING * file.bytes > 0}
