"""The files that tell where everything of a stored state lies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.storage.protocol import Transfer

from .index import INDEX_FILE, METADATA_FILE, StateIndex
from .index_files import dcp_metadata
from .save import BLOCK_BYTES

Put = Callable[[str, Sequence[memoryview]], Transfer]


def store_index(parts: Sequence[Mapping[str, Any] | None], put: Put) -> list[FileEntry]:
    """As rank 0, store the index of what all ranks stored, for us and for torch.distributed.checkpoint; two small puts."""
    index = StateIndex.merged(parts, BLOCK_BYTES)
    files = {INDEX_FILE: index.encode(), METADATA_FILE: dcp_metadata(index)}
    moved = [(path, put(path, [memoryview(data)])) for path, data in files.items()]
    return [FileEntry(path, sent.bytes, sent.digest, 0) for path, sent in moved]
