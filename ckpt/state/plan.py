"""The assignment of a state's parts to the ranks that write them: a pure function of the parts that each rank has."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import randbits
from typing import Any, TypeAlias

from prefect_torch.ckpt.errors import ReportMismatchError

Step: TypeAlias = str | int | list[int]  # a dict's key, or an index of a list as [index], so that JSON can represent a path
LEAST_SPLIT_BYTES = 2**20  # a smaller tensor is cheaper to copy whole than to describe twice


def path_name(path: tuple[Step, ...]) -> str:
    """Return `path` joined with dots."""
    return ".".join(str(step[0] if isinstance(step, list) else step) for step in path)


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One rank's part of one tensor.

    Attributes:
        name: The tensor's name, its path joined with dots.
        path: Its path in the state.
        dtype: Its dtype, as torch names it: "float32".
        item_bytes: The size of one element.
        shape: The shape of the whole tensor.
        offsets: The offsets of this rank's part in it.
        sizes: The shape of this rank's part.
        by_first: Whether the lowest rank's copy is stored where several have it, as for tensors that DDP sends from rank 0.

    """

    name: str
    path: tuple[Step, ...]
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    by_first: bool = False

    @property
    def bytes(self) -> int:
        """The size of this rank's part."""
        return math.prod(self.sizes) * self.item_bytes

    @property
    def rows(self) -> int:
        """The number of rows into which it can be split."""
        return self.sizes[0] if self.sizes else 1

    def encode(self) -> list[Any]:
        """Return a form that JSON can represent."""
        return [
            *(self.name, list(self.path), self.dtype, self.item_bytes),
            *(list(self.shape), list(self.offsets), list(self.sizes), self.by_first),
        ]

    @classmethod
    def decode(cls, fields: Sequence[Any]) -> "TensorShard":
        """Undo `encode`."""
        name, path, dtype, item_bytes, shape, offsets, sizes, by_first = fields
        return cls(name, tuple(path), dtype, item_bytes, tuple(shape), tuple(offsets), tuple(sizes), by_first)


@dataclass(frozen=True, slots=True)
class WriteItem:
    """Rows of a shard that its rank writes.

    Attributes:
        shard: The shard's number among those of its rank.
        start: The first row.
        stop: The row after the last.
        holders: The ranks that alone have the tensor in their states; None for all that report a state.

    """

    shard: int
    start: int
    stop: int
    holders: tuple[int, ...] | None = None


def plan_writes(shards: Sequence[Sequence[TensorShard]]) -> list[list[WriteItem]]:
    """Return the writes of each rank: all data are written once, and ranks with the same data write equally many bytes.

    The shards that the same ranks have are concatenated and cut into equal parts, so at most one tensor per rank is cut in
    two.

    Args:
        shards: The shards of each rank, by rank.

    Raises:
        ReportMismatchError: If ranks have different tensors under one name, or parts that do not form a whole tensor.

    """
    _check_alike(shards)
    _check_whole(shards)
    holders: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, of_rank in enumerate(shards):
        for number, shard in enumerate(of_rank):
            holders[shard.name, shard.offsets, shard.sizes].append((rank, number))
    lines: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for held in holders.values():
        ranks, numbers = zip(*held, strict=True)
        lines[ranks].append(list(numbers))
    writes: list[list[WriteItem]] = [[] for _ in shards]
    for ranks, line in lines.items():
        for rank, write in _cut(ranks, line, shards):
            writes[rank].append(write)
    return [sorted(of_rank, key=lambda write: (write.shard, write.start)) for of_rank in writes]


def lie_apart(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return whether boxes (offsets and sizes) with a tensor's total size are disjoint and inside it; linear in their number.

    They are if and only if their corners, with alternating signs, cancel out to the tensor's own. With a random number for
    each coordinate, that is one comparison of sums (the lemma of Schwartz and Zippel).
    """
    if len(boxes) < 2:  # noqa: PLR2004 - a single box is the whole tensor
        return True
    numbers: dict[tuple[int, int], int] = defaultdict(partial(randbits, 61))

    def corners(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        ends = enumerate(zip(offsets, sizes, strict=True))
        return math.prod(numbers[dimension, start + size] - numbers[dimension, start] for dimension, (start, size) in ends)

    return sum(corners(*box) for box in boxes) == corners([0] * len(shape), shape)


def _cut(
    ranks: tuple[int, ...], line: Sequence[Sequence[int]], shards: Sequence[Sequence[TensorShard]]
) -> Iterator[tuple[int, WriteItem]]:
    """Yield the writes of each rank of `line`: shards that all `ranks` have, each as its number on every rank."""
    of_first = shards[ranks[0]]
    fixed = [numbers for numbers in line if of_first[numbers[0]].by_first or of_first[numbers[0]].bytes == 0]
    movable = [numbers for numbers in line if not (of_first[numbers[0]].by_first or of_first[numbers[0]].bytes == 0)]
    yield from ((ranks[0], WriteItem(numbers[0], 0, of_first[numbers[0]].rows)) for numbers in fixed)
    left, share = _shares(_bytes(of_first, fixed), _bytes(of_first, movable), len(ranks))
    turn = 0
    for numbers in movable:
        shard, row = of_first[numbers[0]], 0
        while row < shard.rows:
            rows = shard.rows - row if turn == len(ranks) - 1 else _rows_that_fit(shard, row, left)
            if rows == 0:
                turn, left = turn + 1, share + left
                continue
            yield ranks[turn], WriteItem(numbers[turn], row, row + rows)
            left -= rows * shard.bytes / shard.rows
            row += rows


def _shares(fixed: int, movable: int, num_ranks: int) -> tuple[float, float]:
    """Return the shares of the movable bytes: of the first rank, which also writes the fixed ones, and of each other rank."""
    if num_ranks == 1:
        return float(movable), 0.0
    of_first = max(0.0, (fixed + movable) / num_ranks - fixed)
    return of_first, (movable - of_first) / (num_ranks - 1)


def _bytes(shards: Sequence[TensorShard], line: Sequence[Sequence[int]]) -> int:
    return sum(shards[numbers[0]].bytes for numbers in line)


def _rows_that_fit(shard: TensorShard, row: int, left: float) -> int:
    rows = shard.rows - row
    row_bytes = shard.bytes / shard.rows
    if rows * row_bytes <= max(left, 0.0):
        return rows
    if shard.bytes < LEAST_SPLIT_BYTES or shard.rows == 1:  # whole, to a rank whose share has space for more than half of it
        return rows if rows * row_bytes / 2 < left else 0
    return max(0, round(left / row_bytes))


def _check_alike(shards: Sequence[Sequence[TensorShard]]) -> None:
    first: dict[str, tuple[int, TensorShard]] = {}
    for rank, of_rank in enumerate(shards):
        for shard in of_rank:
            known_rank, known = first.setdefault(shard.name, (rank, shard))
            if (shard.dtype, shard.shape) != (known.dtype, known.shape):
                raise ReportMismatchError(
                    f"rank {rank} has {shard.name!r} as {shard.dtype} {list(shard.shape)} but rank {known_rank} as "
                    f"{known.dtype} {list(known.shape)}: report the same model on every rank, or what differs as RankLocal(...)"
                )
            if shard.path != known.path:
                raise ReportMismatchError(
                    f"{shard.name!r} is at the path {list(shard.path)} of rank {rank}'s state but at {list(known.path)} of "
                    f"rank {known_rank}'s ([0] is an index of a list): give one form on all ranks, or mark it with RankLocal"
                )


def _check_whole(shards: Sequence[Sequence[TensorShard]]) -> None:
    found: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = defaultdict(dict)
    shapes: dict[str, tuple[int, ...]] = {}
    for of_rank in shards:
        for shard in of_rank:
            found[shard.name][shard.offsets, shard.sizes] = math.prod(shard.sizes)
            shapes[shard.name] = shard.shape
    for name, parts in found.items():
        if sum(parts.values()) != math.prod(shapes[name]):
            raise ReportMismatchError(
                f"the ranks' parts of {name!r} hold {sum(parts.values())} of its {math.prod(shapes[name])} elements: "
                "report the state on every rank that has a part, sharded in one way, under one name (f'stage{number}' of a "
                "pipeline's stage, not of the rank) and not in RankLocal, which holds what one rank has alone"
            )
        if not lie_apart(shapes[name], [*parts]):
            raise ReportMismatchError(f"the ranks' parts of {name!r} overlap: shard it in one way on every rank")
