"""The two index files of a stored state: our own, and the one that torch.distributed.checkpoint reads."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from prefect_torch.ckpt.runs.bulk import no_collection
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.storage.parallel import for_each
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .index import DCP_METADATA_FILE, INDEX_FILE, Counts, StateIndex, TensorEntry, ValueEntry, rank_name, rank_of
from .plan import Step
from .save import Put

_MANY_TENSORS = 5000  # of all ranks, each counted


def store_index(parts: Sequence[Mapping[str, Any] | None], put: Put) -> list[FileEntry]:
    """As rank 0, store the index of all ranks, for us and for torch.distributed.checkpoint: two small puts at the same time.

    Args:
        parts: The `StateIndex.fields` of each rank's own index, None for a rank without a state.
        put: Stores a file.

    """
    num_tensors = sum(len(part["tensors"]) for part in parts if part is not None)
    with no_collection() if num_tensors > _MANY_TENSORS else nullcontext():  # several objects for each
        index = StateIndex.merged(parts)
        files = {INDEX_FILE: index.encode(), DCP_METADATA_FILE: dcp_metadata(index)}
        del index
    moved = for_each(files.items(), lambda file: put(file[0], [memoryview(file[1])]))
    return [FileEntry(path, sent.bytes, sent.digest, 0) for path, sent in zip(files, moved, strict=True)]


def dcp_metadata(index: StateIndex) -> bytes:
    """Return the `.metadata` with which FileSystemReader finds every entry of `index` in our files."""
    size_of = cache(torch.Size)  # the pickle has each equal size once
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in index.tensors.items():
        described[name] = _tensor(entry, size_of)
        for chunk in entry.chunks:
            stored[MetadataIndex(name, chunk.offsets)] = _StorageInfo(chunk.file, *chunk.archive)
    for name, value in index.values.items():
        described[name] = _value(value)
        at = None if value.tensor is None else (0,) * len(value.tensor[1])
        stored[MetadataIndex(name, at)] = _StorageInfo(value.file, value.start, value.bytes)
    paths = {name: _path(name, path) for name, path in index.paths()}
    return _pickled(Metadata(described, paths, stored, StorageMeta(), CURRENT_DCP_VERSION))


class _Pieces(list[bytes]):
    def write(self, piece: bytes) -> None:  # in Python: `append` itself lets no other thread run
        self.append(piece)


def _pickled(value: object) -> bytes:
    """Return a pickle; other threads run after each 64 KiB, whereas `pickle.dumps` holds the interpreter for all of it."""
    pickle.Pickler(pieces := _Pieces()).dump(value)
    return b"".join(pieces)


def _tensor(entry: TensorEntry, size_of: Callable[[Counts], torch.Size]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(size_of(chunk.offsets), size_of(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(getattr(torch, entry.dtype)), torch.Size(entry.shape), chunks)


def _value(value: ValueEntry) -> TensorStorageMetadata | BytesStorageMetadata:
    if value.tensor is None:
        return BytesStorageMetadata()
    dtype, shape = value.tensor
    chunk = ChunkStorageMetadata(torch.Size((0,) * len(shape)), torch.Size(shape))
    return TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(shape), [chunk])


def _path(name: str, stored: tuple[Step, ...]) -> tuple[str | int, ...]:
    """Return the path at which DCP restores `name`; for a value of one rank alone, it ends with the rank."""
    path = [step[0] if isinstance(step, list) else str(step) for step in stored]
    rank = rank_of(name)
    if rank is None:
        return tuple(path)
    return (*path[:-1], rank_name(path[-1], rank)) if isinstance(path[-1], str) else (name,)
