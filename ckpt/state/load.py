"""The load of a stored state into live objects."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import xxhash
from prefect_torch.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.storage.confirmed_reads import confirm_damage
from prefect_torch.ckpt.storage.protocol import Storage

from .index import INDEX_FILE, StateIndex
from .read import StateReader
from .restore import Redistribute, Restore


def load_state(
    reader: StateReader,
    files: Mapping[str, FileEntry],
    state: MutableMapping[str, Any],
    place: tuple[int, int],
    redistribute: Redistribute | None = None,
) -> None:
    """Restore `state` in place from the files of `reader`; see `Checkpoint.load_state`.

    Tensors on devices are written after the work that this thread has queued on the devices' current streams, and every stream
    sees their values when this returns. Tensors without a target, such as the items of an empty dict, are built on the CPU.

    Args:
        reader: The reader of the state's files.
        files: The committed entry of each file, by path.
        state: The state to restore.
        place: This rank and the number of ranks.
        redistribute: Called for values that were each rank's own, of another number of ranks.

    """
    restore = Restore(read_index(reader, files), reader, *place, redistribute)
    restore.into(state)
    reader.read(restore.blocks)
    for finish in restore.finish:
        finish()


def read_index(reader: StateReader, files: Mapping[str, FileEntry]) -> StateIndex:
    """Return the index of a stored state, every entry of it inside its file.

    Raises:
        CheckpointNotFoundError: If the checkpoint holds no state.
        CheckpointCorruptError: If the index differs from the committed one.

    """
    where = f"{reader.where}/{INDEX_FILE}"
    known = files.get(INDEX_FILE)
    if known is None:
        raise CheckpointNotFoundError(
            f"{reader.where} holds no state: it was reported as a folder; read it with as_directory()"
        )

    def read(storage: Storage) -> StateIndex:
        try:
            data = storage.get_bytes(f"{reader.folder}{INDEX_FILE}")
        except FileNotFoundError as exc:
            raise CheckpointNotFoundError(f"{where} is missing") from exc
        if known.digest and xxhash.xxh3_128_hexdigest(data) != known.digest:
            raise CheckpointCorruptError(f"{where} differs from what was committed")
        return StateIndex.decode(data, where, {path: entry.bytes for path, entry in files.items()})

    return confirm_damage(reader.storage, read)


def files_in(storage: Storage) -> dict[str, FileEntry]:
    """Return the files of a plain directory, whose digests are not known."""
    return {info.key: FileEntry(info.key, info.bytes, "", 0) for info in storage.list("")}
