"""One rank's state on its way to a checkpoint: held when it is reported, staged by one copy, stored in the background."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.storage.protocol import Transfer

from .flatten import Describer, flatten, is_loose, is_small
from .image import Image
from .index import Chunk, ValueEntry, fields_of, rank_name, rank_of, tensors_file, values_file
from .plan import Piece, Write
from .planner import StateDecision
from .values import Value, digest_tensor, hold_value

BLOCK_BYTES = 4 * 2**20  # raw data with a digest of its own: what a load must read to trust any byte of it

Put = Callable[[str, Sequence[memoryview]], Transfer]


@dataclass(frozen=True, slots=True, eq=False)
class HeldState:
    """A reported state, before anything of it is copied.

    Attributes:
        pieces: What this rank has of each tensor.
        tensors: The same tensors' memory.
        values: The plain values, as they are now.
        digests: Of the tensors that other ranks may have different ones of.
        parts: What each module and each optimizer consists of, by its name.

    """

    pieces: list[Piece]
    tensors: list[torch.Tensor]
    values: list[Value]
    digests: dict[str, str]
    parts: dict[str, Sequence[object]]


class StateSaver:
    """What a rank keeps between reports: the plan, and the memory that states are staged in.

    Args:
        rank: This rank.
        world_size: The number of ranks.

    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._describer = Describer()
        self._told: tuple[list[Piece], dict[str, Sequence[object]]] | None = None
        self._writes: list[Write] = []
        self._image: Image | None = None
        self._imaged: list[Piece] | None = None
        self._staged: HeldState | None = None

    def hold(self, state: Mapping[str, Any]) -> HeldState:
        """Look at `state` and copy its plain values; of several ranks, each reads its large loose tensors once.

        Raises:
            ValueError: If something in it cannot be stored, naming it.

        """
        leaves, parts = flatten(state, self._rank)
        held = HeldState([], [], [], {}, parts)
        for leaf in leaves:
            loose = not isinstance(leaf.value, torch.Tensor) or is_loose(leaf)
            if loose and (not isinstance(leaf.value, torch.Tensor) or is_small(leaf.value)):
                held.values.append(hold_value(leaf))
                continue
            if loose and self._world_size > 1 and rank_of(leaf.name) is None:
                held.digests[leaf.name] = digest_tensor(leaf.value)
            if (described := self._describer.describe(leaf)) is not None:
                held.pieces.append(described[0])
                held.tensors.append(described[1])
        return held

    def tell(self, held: HeldState) -> dict[str, Any]:
        """Return what rank 0 must know of `held`, its structure only where it changed."""
        told: dict[str, Any] = {"pieces": None, "tensors": held.digests}
        told["values"] = {value.name: value.digest for value in held.values}
        if (structure := (held.pieces, held.parts)) != self._told:
            self._told = structure
            told["pieces"] = [piece.encode() for piece in held.pieces]
            told["parts"] = {name: _digest_names(parts) for name, parts in held.parts.items()}
        return told

    def stage_early(self, held: HeldState) -> None:
        """Stage by the plan of the report before, while the ranks agree; `settle` sees whether it still holds."""
        if held.pieces == self._imaged:
            self._stage(held)

    def settle(self, held: HeldState, decision: StateDecision) -> "StagedState":
        """Return `held` staged by what the ranks decided; from now on the tensors may change."""
        if self._staged is not held:
            self._stage(held)
        self._staged = None
        own, rank = set(decision.own), self._rank
        values = {rank_name(value.name, rank) if value.name in own else value.name: value for value in held.values}
        kept = {name: value for name, value in values.items() if name != value.name or decision.writers.get(name, 0) == rank}
        pieces = [replace(piece, name=rank_name(piece.name, rank)) if piece.name in own else piece for piece in held.pieces]
        assert self._image is not None
        return StagedState(rank, pieces, self._writes, self._image, kept)

    def follow(self, writes: list[Write]) -> None:
        """Take over a new plan; whatever was staged was staged by another one."""
        self._writes, self._imaged, self._staged = writes, None, None

    def _stage(self, held: HeldState) -> None:
        if held.pieces != self._imaged:
            self._image, self._imaged = self._new_image(held), held.pieces
        assert self._image is not None
        self._image.stage([_rows(held.tensors[write.piece], held.pieces[write.piece], write) for write in self._writes])
        self._staged = held

    def _new_image(self, held: HeldState) -> Image:
        previous, self._image, self._imaged = self._image, None, None
        chunks = [(held.tensors[write.piece].dtype, _box(held.pieces[write.piece], write)[1]) for write in self._writes]
        return Image(chunks, pinned=any(tensor.is_cuda for tensor in held.tensors), previous=previous)


@dataclass(frozen=True, slots=True)
class StagedState:
    """A rank's share of a state in memory of our own, ready to be stored.

    Attributes:
        rank: This rank.
        pieces: What it has of each tensor, by the name to store it under.
        writes: What of it it stores.
        image: The bytes of its file of tensors, in the order of `writes`.
        values: The values that it stores, by the name to store each under.

    """

    rank: int
    pieces: list[Piece]
    writes: list[Write]
    image: Image
    values: dict[str, Value]

    def store(self, put: Put) -> tuple[list[FileEntry], dict[str, Any]]:
        """Store this rank's files and return them, with what the index must say of them."""
        image, writes = self.image, self.writes
        if not image.is_exact:
            image.reencode()
        encoded = {name: value.encode() for name, value in self.values.items()}
        files = {}
        if writes:
            files[tensors_file(self.rank)] = [image.data]
        if encoded:
            files[values_file(self.rank)] = [memoryview(b"".join(encoded.values()))]
        with ThreadPoolExecutor(2, "prefect-torch-upload") as pool:
            digests = pool.submit(self._digest_blocks)
            moved = list(pool.map(put, files, files.values()))
            told = {"tensors": self._tell_tensors(digests.result()), "values": self._tell_values(encoded)}
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


def _box(piece: Piece, write: Write) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes of what `write` writes of `piece`, in the whole tensor."""
    if not piece.sizes:
        return (), ()
    offsets, sizes = piece.offsets, piece.sizes
    return (offsets[0] + write.start, *offsets[1:]), (write.stop - write.start, *sizes[1:])


def _rows(tensor: torch.Tensor, piece: Piece, write: Write) -> torch.Tensor:
    if write.stop - write.start == piece.rows:
        return tensor
    return tensor[write.start : write.stop]
