"""The load of a stored state: where its files are, its index, and the load into live objects."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash
from prefect_torch.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, StateMismatchError
from prefect_torch.ckpt.files.download import found_files, in_place
from prefect_torch.ckpt.files.node_copy import NodeCopy, despite_damaged_copy
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.state.expected_size import prepare_for_loaded
from prefect_torch.ckpt.state.index import INDEX_FILE, StateIndex
from prefect_torch.ckpt.state.staging.device_copies import wait_for_current_streams
from prefect_torch.ckpt.storage.confirmed_reads import confirm_damage
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.storage.retry import with_retries
from prefect_torch.ckpt.storage.sizes import refuse_part

from .load_plan import LoadPlan, Redistribute
from .read import SPAN_BYTES, StateReader
from .restore import plan_restore
from .shared_reads import SharedReads

Source: TypeAlias = Path | tuple[Run, Manifest]  # a plain directory, or a committed checkpoint


def load_state(
    source: Source,
    state: MutableMapping[str, Any],
    rank_and_size: tuple[int, int],
    redistribute: Redistribute | None = None,
    copy: NodeCopy | None = None,
) -> None:
    """Restore `state` in place; see `Checkpoint.load_state`.

    The files that a process of this node has downloaded from a bucket are read first. If they are damaged, the bucket's files
    are read. With `copy`, files that all ranks of this node read are downloaded by one of them.

    Args:
        source: The checkpoint.
        state: The state to restore.
        rank_and_size: This rank and the number of ranks.
        redistribute: Called for values that were each rank's own, if another number of ranks stored them.
        copy: Keeps the downloads for the node's other ranks; None if this rank is alone.

    """
    with _opened_copy(source) as reader, despite_damaged_copy():
        if reader is not None:
            _load(reader, state, rank_and_size, redistribute)
            return
    with opened(source) as reader:
        shared = None if copy is None or isinstance(source, Path) else SharedReads(*source, reader, copy)
        _load(reader, state, rank_and_size, redistribute, shared)


def _load(
    reader: StateReader,
    state: MutableMapping[str, Any],
    rank_and_size: tuple[int, int],
    redistribute: Redistribute | None,
    shared: SharedReads | None = None,
) -> None:
    index = read_index(reader) if shared is None else shared.read_file(INDEX_FILE, read_index)
    try:
        plan = LoadPlan(index, reader, *rank_and_size, redistribute)
        plan_restore(plan, state)
    except RecursionError as exc:
        raise StateMismatchError(f"{reader.where} or the state to load into is nested too deeply to be loaded") from exc
    source = reader if shared is None else shared
    source.read(plan.values)
    for unpack in plan.unpack:
        unpack()
    source.read(plan.blocks)
    # The reads write past autograd, which must see that a value that it has saved for a backward pass has changed.
    torch.autograd.graph.increment_version([tensor for tensor in plan.filled if not tensor.is_inference()])
    for finish in (*plan.finish, *plan.last):
        finish()
    wait_for_current_streams(plan.devices)  # torch's own copies within a device return before they are done
    prepare_for_loaded(index, *rank_and_size)


@contextmanager
def opened(source: Source) -> Iterator[StateReader]:
    """Yield the reader of a checkpoint's files; in a local directory they stay in place meanwhile, despite any prune.

    Raises:
        CheckpointNotFoundError: If the checkpoint was pruned, also meanwhile.

    """
    if isinstance(source, Path):
        storage = LocalStorage(source)
        files = {info.key: FileEntry(info.key, info.bytes, "", 0) for info in storage.list("")}  # their digests are not known
        yield StateReader(storage, "", str(source), files)
        return
    run, manifest = source
    with in_place(run, manifest, manifest.files):
        try:
            yield StateReader(run.storage, run.layout.data(manifest.id), run.path_of(manifest.id), _by_path(manifest))
        except CheckpointCorruptError:
            run.check_exists(manifest.id)  # a prune deletes the manifest first
            raise


@contextmanager
def _opened_copy(source: Source) -> Iterator[StateReader | None]:
    """Yield the reader of the files that a process of this node has downloaded from a bucket, or None if there are none."""
    if isinstance(source, Path) or source[0].storage.local_path(source[0].name) is not None:
        yield None
        return
    run, manifest = source
    with found_files(run, manifest, manifest.files) as folder:
        yield None if folder is None else StateReader(LocalStorage(folder), "", str(folder), _by_path(manifest))


def _by_path(manifest: Manifest) -> dict[str, FileEntry]:
    return {entry.path: entry for entry in manifest.files}


def read_index(reader: StateReader) -> StateIndex:
    """Return the index of a stored state, whose entries all lie inside their files.

    Raises:
        CheckpointNotFoundError: If the checkpoint holds no state.
        CheckpointCorruptError: If the index is missing or differs from the committed one.

    """
    where = f"{reader.where}/{INDEX_FILE}"
    known = reader.files.get(INDEX_FILE)
    if known is None:
        raise CheckpointNotFoundError(
            f"{reader.where} holds no state: it was reported as a directory; read it with as_directory()"
        )

    key = f"{reader.folder}{INDEX_FILE}"

    def get(storage: Storage) -> bytes:
        if known.bytes > SPAN_BYTES or storage.local_path(key) is not None:
            reader.check_size(INDEX_FILE, storage)
        if not known.digest:  # a plain directory may hold anything
            return storage.get_bytes(key)
        data = memoryview(bytearray(known.bytes))  # unlike a record, it may be large: an entry for each tensor and each rank
        count = storage.get_range(key, 0, data)
        refuse_part(storage, key, count, known.bytes)
        return bytes(data[:count])

    def read(storage: Storage) -> StateIndex:
        try:
            data = with_retries(storage, "reading", key, get)
        except FileNotFoundError as exc:
            raise CheckpointCorruptError(f"{where} is missing") from exc
        if known.digest and xxhash.xxh3_128_hexdigest(data) != known.digest:
            raise CheckpointCorruptError(f"{where} differs from what was committed")
        return StateIndex.decode(data, where, {path: entry.bytes for path, entry in reader.files.items()})

    return confirm_damage(reader.storage, read)
