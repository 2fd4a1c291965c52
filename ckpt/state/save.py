"""One rank's state in a report: captured when it is reported, staged by one copy, stored in the background."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.storage.protocol import Transfer

from .flatten import Describer, Leaf, flatten, is_small, is_unowned
from .image import StagingBuffer
from .index import Chunk, ValueEntry, fields_of, rank_name, rank_of, tensors_file, values_file
from .plan import TensorShard, WriteItem
from .planner import StateDecision
from .values import Value, capture_values, digest_tensors

BLOCK_BYTES = 4 * 2**20  # raw data with a digest of its own: a load must read a whole block to verify any byte of it

Put = Callable[[str, Sequence[memoryview]], Transfer]


@dataclass(frozen=True, slots=True, eq=False)
class StateSnapshot:
    """A reported state, before its tensors are copied.

    Attributes:
        pieces: This rank's part of each tensor.
        tensors: The same tensors' memory.
        values: The plain values, as they are now.
        digests: The digests of the tensors that may differ on other ranks.
        parts: The parts of each module and each optimizer, by its name.

    """

    pieces: list[TensorShard]
    tensors: list[torch.Tensor]
    values: list[Value]
    digests: dict[str, str]
    parts: dict[str, Sequence[object]]


class StateSaver:
    """A rank's memory between reports: the plan, and the buffer in which states are staged.

    Args:
        rank: This rank.
        world_size: The number of ranks.

    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._describer = Describer()
        self._described: tuple[list[TensorShard], dict[str, Sequence[object]]] | None = None
        self._writes: list[WriteItem] = []
        self._image: StagingBuffer | None = None
        self._imaged: list[TensorShard] | None = None
        self._staged: StateSnapshot | None = None

    def capture(self, state: Mapping[str, Any]) -> StateSnapshot:
        """Return a snapshot of `state` with copies of its plain values.

        With several ranks, each reads its large unowned tensors once, for their digests.

        Raises:
            ValueError: If a part of it cannot be stored, naming the part.

        """
        leaves, parts = flatten(state, self._rank)
        snapshot = StateSnapshot([], [], [], {}, parts)
        plain: list[Leaf] = []
        compared: list[Leaf] = []
        for leaf in leaves:
            loose = not isinstance(leaf.value, torch.Tensor) or is_unowned(leaf)
            if loose and (not isinstance(leaf.value, torch.Tensor) or is_small(leaf.value)):
                plain.append(leaf)
                continue
            if loose and self._world_size > 1 and rank_of(leaf.name) is None:
                compared.append(leaf)
            if (described := self._describer.describe(leaf)) is not None:
                snapshot.pieces.append(described[0])
                snapshot.tensors.append(described[1])
        snapshot.values.extend(capture_values(plain))
        snapshot.digests.update(digest_tensors(compared))
        return snapshot

    def describe(self, snapshot: StateSnapshot) -> dict[str, Any]:
        """Return the description of `snapshot` for rank 0, with its structure only where it changed."""
        told: dict[str, Any] = {"pieces": None, "tensors": snapshot.digests}
        told["values"] = {value.name: value.digest for value in snapshot.values}
        if (structure := (snapshot.pieces, snapshot.parts)) != self._described:
            self._described = structure
            told["pieces"] = [piece.encode() for piece in snapshot.pieces]
            told["parts"] = {name: _digest_names(parts) for name, parts in snapshot.parts.items()}
        return told

    def stage_early(self, snapshot: StateSnapshot) -> None:
        """Stage by the plan of the previous report, while the ranks agree; `finalize` checks whether it is still valid."""
        if snapshot.pieces == self._imaged:
            self._stage(snapshot)

    def finalize(self, snapshot: StateSnapshot, decision: StateDecision) -> "StagedState":
        """Return `snapshot` staged by the ranks' decision; the tensors may change when this returns."""
        if self._staged is not snapshot:
            self._stage(snapshot)
        self._staged = None
        own, rank = set(decision.own), self._rank
        values = {rank_name(value.name, rank) if value.name in own else value.name: value for value in snapshot.values}
        kept = {name: value for name, value in values.items() if name != value.name or decision.writers.get(name, 0) == rank}
        pieces = [replace(piece, name=rank_name(piece.name, rank)) if piece.name in own else piece for piece in snapshot.pieces]
        assert self._image is not None
        return StagedState(rank, pieces, self._writes, self._image, kept)

    def apply(self, writes: list[WriteItem]) -> None:
        """Apply a new plan and discard staged data, which belong to another plan."""
        self._writes, self._imaged, self._staged = writes, None, None

    def _stage(self, snapshot: StateSnapshot) -> None:
        if snapshot.pieces != self._imaged:
            self._image, self._imaged = self._new_image(snapshot), snapshot.pieces
        assert self._image is not None
        self._image.stage([_rows(snapshot.tensors[write.piece], snapshot.pieces[write.piece], write) for write in self._writes])
        self._staged = snapshot

    def _new_image(self, snapshot: StateSnapshot) -> StagingBuffer:
        previous, self._image, self._imaged = self._image, None, None
        chunks = [(snapshot.tensors[write.piece].dtype, _box(snapshot.pieces[write.piece], write)[1]) for write in self._writes]
        return StagingBuffer(chunks, previous=previous)


@dataclass(frozen=True, slots=True)
class StagedState:
    """A rank's share of a state in memory of our own, ready to be stored.

    Attributes:
        rank: This rank.
        pieces: Its part of each tensor, with the name to store it under.
        writes: The rows of these parts that it stores.
        image: The bytes of its file of tensors, in the order of `writes`.
        values: The values that it stores, by the name to store each under.

    """

    rank: int
    pieces: list[TensorShard]
    writes: list[WriteItem]
    image: StagingBuffer
    values: dict[str, Value]

    def store(self, put: Put) -> tuple[list[FileEntry], dict[str, Any]]:
        """Store this rank's files and return them, with their entries for the index."""
        image, writes = self.image, self.writes
        if not image.is_exact:
            image.reserialize()
        encoded = {name: value.encode() for name, value in self.values.items()}
        files = {}
        if writes:
            files[tensors_file(self.rank)] = [image.data]
        if encoded:
            files[values_file(self.rank)] = [memoryview(b"".join(encoded.values()))]
        with ThreadPoolExecutor(3, "prefect-torch-upload") as pool:
            registered = pool.submit(image.register)
            digests = pool.submit(self._digest_blocks)
            moved = list(pool.map(put, files, files.values()))
            told = {"tensors": self._tell_tensors(digests.result()), "values": self._tell_values(encoded)}
            registered.result()
        return [FileEntry(path, sent.bytes, sent.digest, self.rank) for path, sent in zip(files, moved, strict=True)], told

    def _digest_blocks(self) -> list[list[str]]:
        data = self.image.data
        return [
            [
                xxhash.xxh3_128_hexdigest(data[start : min(start + BLOCK_BYTES, slot.raw_start + slot.raw_bytes)])
                for start in range(slot.raw_start, slot.raw_start + slot.raw_bytes, BLOCK_BYTES)
            ]
            for slot in self.image.slots
        ]

    def _tell_tensors(self, digests: Sequence[Sequence[str]]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for write, slot, of_chunk in zip(self.writes, self.image.slots, digests, strict=True):
            piece = self.pieces[write.piece]
            box = _box(piece, write)
            chunk = Chunk(*box, tensors_file(self.rank), (slot.start, slot.bytes), slot.raw_start, tuple(of_chunk))
            entry = told.setdefault(piece.name, {"path": piece.path, "dtype": piece.dtype, "shape": piece.shape, "chunks": []})
            entry["chunks"].append(fields_of(chunk))
        return told

    def _tell_values(self, encoded: Mapping[str, bytes]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        start = 0
        for name, data in encoded.items():
            value, digest = self.values[name], xxhash.xxh3_128_hexdigest(data)
            told[name] = fields_of(ValueEntry(value.path, values_file(self.rank), start, len(data), digest, value.tensor))
            start += len(data)
        return told


def _digest_names(names: Sequence[object]) -> str:
    return xxhash.xxh3_64_hexdigest(repr(sorted(map(repr, names))).encode())


def _box(piece: TensorShard, write: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes of the rows of `piece` that `write` writes, in the whole tensor."""
    if not piece.sizes:
        return (), ()
    offsets, sizes = piece.offsets, piece.sizes
    return (offsets[0] + write.start, *offsets[1:]), (write.stop - write.start, *sizes[1:])


def _rows(tensor: torch.Tensor, piece: TensorShard, write: WriteItem) -> torch.Tensor:
    if write.stop - write.start == piece.rows:
        return tensor
    return tensor[write.start : write.stop]
