"""One rank's state in a report: captured when it is reported, staged by one copy, stored in the background."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.state.index import (
    ArrayKind,
    Chunk,
    StateIndex,
    TensorEntry,
    ValueEntry,
    rank_name,
    rank_of,
    tensors_file,
    values_file,
)
from prefect_torch.ckpt.state.key_order import KeyOrder
from prefect_torch.ckpt.state.objects.flatten import Describer, Leaf, flatten, is_small, is_unowned
from prefect_torch.ckpt.state.objects.replicas import ReplicaSampler
from prefect_torch.ckpt.state.objects.values import Value, capture_values, digest_tensors
from prefect_torch.ckpt.state.plan import TensorShard, WriteItem
from prefect_torch.ckpt.state.staging.buffer import StagingBuffer
from prefect_torch.ckpt.storage.protocol import Transfer
from prefect_torch.ckpt.text import show_some

from .planner import StateDecision, StateDescription

BLOCK_BYTES = 4 * 2**20  # raw data with a digest of its own: a load must read a whole block to verify any byte of it
_MUCH_TO_COMPARE = 64 * 2**20  # takes some ten milliseconds
_logger = logging.getLogger(__name__)

Put = Callable[[str, Sequence[memoryview]], Transfer]


@dataclass(frozen=True, slots=True, eq=False)
class StateSnapshot:
    """A reported state, before its tensors are copied.

    Attributes:
        saver: The rank's memory between reports.
        shards: This rank's part of each tensor.
        tensors: The same tensors' memory.
        values: The plain values, as they are now.
        digests: The digests of the tensors that may differ on other ranks.
        parts: The parts of each module and each optimizer, by its name.
        arrays: The names of the leaves that are NumPy arrays or scalars, with the kind of each.
        orders: The order of the keys in its dicts.
        samples: Digests of some of the tensors that count as equal on all ranks, by module and optimizer.
        epochs: The epochs of loaders that share one order among the ranks.
        partless: The names of the DTensors of which this rank has no part.

    """

    saver: "StateSaver" = field(repr=False)
    shards: list[TensorShard]
    tensors: list[torch.Tensor]
    values: list[Value]
    digests: dict[str, str]
    parts: dict[str, Sequence[object]]
    arrays: Mapping[str, ArrayKind]
    orders: Sequence[KeyOrder]
    samples: Mapping[str, Sequence[str]]
    epochs: Mapping[str, int]
    partless: Sequence[str]

    def describe(self) -> StateDescription:
        """Return the description for rank 0, with the structure only if it changed; the caller must send it."""
        values = {value.name: value.digest for value in self.values}
        if not self.saver.record_described(self):
            return StateDescription(values, self.digests, samples=self.samples, epochs=self.epochs)
        parts = {name: _digest_names(of_part) for name, of_part in self.parts.items()}
        return StateDescription(values, self.digests, self.shards, parts, self.samples, self.epochs, self.partless)

    def stage_early(self) -> None:
        """Stage by the plan of the previous report, while the ranks agree; `stage` checks whether it is still valid."""
        with suppress(Exception):  # `stage` tries again and raises it
            self.saver.stage_early(self)

    def stage(self, decision: StateDecision, writes: Sequence[WriteItem]) -> "StagedState":
        """Return the rank's share of the state, copied; the tensors may change when this returns.

        Args:
            decision: Rank 0's decision.
            writes: What this rank writes, by the plan that `decision` names.

        """
        rank, own = self.saver.rank, set(decision.own)
        buffer = self.saver.stage(self, decision.plan, writes)
        values = {rank_name(value.name, rank) if value.name in own else value.name: value for value in self.values}
        kept = {name: value for name, value in values.items() if name != value.name or decision.writers.get(name, 0) == rank}
        shards = [replace(shard, name=rank_name(shard.name, rank)) if shard.name in own else shard for shard in self.shards]
        arrays: dict[str, ArrayKind] = {
            rank_name(name, rank) if name in own else name: kind for name, kind in self.arrays.items()
        }
        return StagedState(rank, shards, writes, buffer, kept, arrays, self.orders)


class StateSaver:
    """A rank's memory between reports: the structure that rank 0 knows, and the buffer in which states are staged.

    Args:
        rank: This rank.
        world_size: The number of ranks.

    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self._world_size = world_size
        self._describer = Describer()
        self._sampler = ReplicaSampler()
        self._described: tuple[list[TensorShard], dict[str, Sequence[object]], Sequence[str]] | None = None
        self._plan = 0
        self._writes: Sequence[WriteItem] = []
        self._buffer: StagingBuffer | None = None
        self._staged_shards: list[TensorShard] | None = None
        self._staged: StateSnapshot | None = None
        self._has_warned = False

    def capture(self, state: Mapping[str, Any]) -> StateSnapshot:
        """Return a snapshot of `state` with copies of its plain values.

        With several ranks, each reads its large unowned tensors once, for their digests.

        Raises:
            ValueError: If a part of it cannot be stored, naming the part.

        """
        found = flatten(state, self.rank)
        arrays: dict[str, ArrayKind] = {leaf.name: leaf.array for leaf in found.leaves if leaf.array is not None}
        plain: list[Leaf] = []
        compared: list[Leaf] = []
        shards: list[TensorShard] = []
        tensors: list[torch.Tensor] = []
        partless: list[str] = []
        for leaf in found.leaves:
            unowned = not isinstance(leaf.value, torch.Tensor) or is_unowned(leaf)
            if unowned and (not isinstance(leaf.value, torch.Tensor) or is_small(leaf.value)):
                plain.append(leaf)
                continue
            if unowned and self._world_size > 1 and rank_of(leaf.name) is None:
                compared.append(leaf)
            if (described := self._describer.describe(leaf)) is None:
                partless.append(leaf.name)
            else:
                shards.append(described[0])
                tensors.append(described[1])
        self._warn_of_costs(compared)
        samples = self._sampler.sample(found.leaves, found.parts) if self._world_size > 1 else {}
        values, digests = capture_values(plain), digest_tensors(compared)
        return StateSnapshot(
            *(self, shards, tensors, values, digests, found.parts, arrays, found.orders, samples, found.epochs, partless)
        )

    def _warn_of_costs(self, compared: Sequence[Leaf]) -> None:
        """Log once, on rank 0, that large tensors are compared, as those of a `state_dict()` are, and what to give instead."""
        count = sum(leaf.value.nbytes for leaf in compared)
        if self._has_warned or self.rank != 0 or count < _MUCH_TO_COMPARE:
            return
        self._has_warned = True
        _logger.warning(
            "%d MiB of the reported state are tensors of no module and no optimizer (%s), such as those of a state_dict(): "
            "every rank reads all of them at each report, to find where they differ. Give the objects themselves, as in "
            'report(..., state={"model": model, "optimizer": optimizer}): then each rank reads only what it stores; mark what '
            "is each rank's own with RankLocal",
            count // 2**20,
            show_some([leaf.name for leaf in compared]),
        )

    def record_described(self, snapshot: StateSnapshot) -> bool:
        """Record the structure as described, and return whether it differs from the one before."""
        structure = (snapshot.shards, snapshot.parts, snapshot.partless)
        if structure == self._described:
            return False
        self._described = structure
        return True

    def stage_early(self, snapshot: StateSnapshot) -> None:
        """Stage by the plan of the previous report if the structure is unchanged."""
        if snapshot.shards == self._staged_shards:
            self._copy(snapshot)

    def stage(self, snapshot: StateSnapshot, plan: int, writes: Sequence[WriteItem]) -> StagingBuffer:
        """Return the buffer with what `writes` names of the snapshot, copied unless it was staged early by the same plan."""
        if plan != self._plan:
            self._plan, self._writes, self._staged_shards, self._staged = plan, writes, None, None
        if self._staged is not snapshot:
            self._copy(snapshot)
        self._staged = None
        assert self._buffer is not None
        return self._buffer

    def _copy(self, snapshot: StateSnapshot) -> None:
        if snapshot.shards != self._staged_shards:
            self._buffer, self._staged_shards = self._new_buffer(snapshot), snapshot.shards
        assert self._buffer is not None
        self._buffer.stage(
            [_rows(snapshot.tensors[write.shard], snapshot.shards[write.shard], write) for write in self._writes]
        )
        self._staged = snapshot

    def _new_buffer(self, snapshot: StateSnapshot) -> StagingBuffer:
        previous, self._buffer, self._staged_shards = self._buffer, None, None
        chunks = [(snapshot.tensors[write.shard].dtype, _box(snapshot.shards[write.shard], write)[1]) for write in self._writes]
        return StagingBuffer(chunks, previous=previous)


@dataclass(frozen=True, slots=True)
class StagedState:
    """A rank's share of a state in memory of our own, ready to be stored.

    Attributes:
        rank: This rank.
        shards: Its part of each tensor, with the name to store it under.
        writes: The rows of these parts that it stores.
        buffer: The bytes of its file of tensors, in the order of `writes`.
        values: The values that it stores, by the name to store each under.
        arrays: The names under which NumPy arrays and scalars are stored, with the kind of each.
        orders: The order of the keys in the dicts of this rank's state.

    """

    rank: int
    shards: list[TensorShard]
    writes: Sequence[WriteItem]
    buffer: StagingBuffer
    values: dict[str, Value]
    arrays: Mapping[str, ArrayKind]
    orders: Sequence[KeyOrder]

    def store(self, put: Put) -> tuple[list[FileEntry], StateIndex]:
        """Store this rank's files and return them, with their entries for the index."""
        buffer, writes = self.buffer, self.writes
        if not buffer.is_exact:
            buffer.reserialize()
        encoded = {name: value.encode() for name, value in self.values.items()}
        files = {}
        if writes:
            files[tensors_file(self.rank)] = [buffer.data]
        if encoded:
            files[values_file(self.rank)] = [memoryview(b"".join(encoded.values()))]
        with ThreadPoolExecutor(3, "prefect-torch-upload") as pool:
            registered = pool.submit(buffer.register)
            digests = pool.submit(self._digest_blocks)
            moved = list(pool.map(put, files, files.values()))
            entries = self._tensor_entries(digests.result()), self._value_entries(encoded)
            index = StateIndex(1, BLOCK_BYTES, *entries, self.arrays, tuple(self.orders), self._holders())
            registered.result()
        return [FileEntry(path, sent.bytes, sent.digest, self.rank) for path, sent in zip(files, moved, strict=True)], index

    def _digest_blocks(self) -> list[list[str]]:
        data = self.buffer.data
        return [
            [
                xxhash.xxh3_128_hexdigest(data[start : min(start + BLOCK_BYTES, slot.raw_start + slot.raw_bytes)])
                for start in range(slot.raw_start, slot.raw_start + slot.raw_bytes, BLOCK_BYTES)
            ]
            for slot in self.buffer.slots
        ]

    def _tensor_entries(self, digests: Sequence[Sequence[str]]) -> dict[str, TensorEntry]:
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        shards: dict[str, TensorShard] = {}
        for write, slot, of_chunk in zip(self.writes, self.buffer.slots, digests, strict=True):
            shard = self.shards[write.shard]
            box = _box(shard, write)
            chunk = Chunk(*box, tensors_file(self.rank), (slot.start, slot.bytes), slot.raw_start, tuple(of_chunk))
            chunks[shard.name].append(chunk)
            shards[shard.name] = shard
        return {name: TensorEntry(shard.path, shard.dtype, shard.shape, tuple(chunks[name])) for name, shard in shards.items()}

    def _holders(self) -> dict[str, tuple[int, ...]]:
        return {self.shards[write.shard].name: tuple(write.holders) for write in self.writes if write.holders is not None}

    def _value_entries(self, encoded: Mapping[str, bytes]) -> dict[str, ValueEntry]:
        entries: dict[str, ValueEntry] = {}
        start = 0
        for name, data in encoded.items():
            value, digest = self.values[name], xxhash.xxh3_128_hexdigest(data)
            entries[name] = ValueEntry(value.path, values_file(self.rank), start, len(data), digest, value.tensor)
            start += len(data)
        return entries


def _digest_names(names: Sequence[object]) -> str:
    return xxhash.xxh3_64_hexdigest(repr(sorted(map(repr, names))).encode())


def _box(shard: TensorShard, write: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes of the rows of `shard` that `write` writes, in the whole tensor."""
    if not shard.sizes:
        return (), ()
    offsets, sizes = shard.offsets, shard.sizes
    return (offsets[0] + write.start, *offsets[1:]), (write.stop - write.start, *sizes[1:])


def _rows(tensor: torch.Tensor, shard: TensorShard, write: WriteItem) -> torch.Tensor:
    if write.stop - write.start == shard.rows:
        return tensor
    return tensor[write.start : write.stop]
