"""Who writes which part of a state: a pure decision from what every rank has."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from prefect_torch.ckpt.errors import ReportMismatchError

Step: TypeAlias = str | int | list[int]  # a dict's key, or a place in a list as [place]; so JSON can hold a path
_LEAST_SPLIT_BYTES = 2**20  # less is cheaper copied at once than described twice


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank has of one tensor.

    Attributes:
        name: The tensor's, joined with dots from its path.
        path: Where it is in the state.
        dtype: As torch names it: "float32".
        item_bytes: The size of one element.
        shape: Of the whole tensor.
        offsets: Where this rank's part begins in it.
        sizes: The shape of this rank's part.
        by_first: Whether the lowest rank's copy counts where several have it, as it does for what DDP sends from rank 0.

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
        """How often it can be cut, plus one."""
        return self.sizes[0] if self.sizes else 1

    def encode(self) -> list[Any]:
        """Return what JSON can hold."""
        return [
            *(self.name, list(self.path), self.dtype, self.item_bytes),
            *(list(self.shape), list(self.offsets), list(self.sizes), self.by_first),
        ]

    @classmethod
    def decode(cls, fields: Sequence[Any]) -> "Piece":
        """Undo `encode`."""
        name, path, dtype, item_bytes, shape, offsets, sizes, by_first = fields
        return cls(name, tuple(path), dtype, item_bytes, tuple(shape), tuple(offsets), tuple(sizes), by_first)


@dataclass(frozen=True, slots=True)
class Write:
    """Rows of a piece that its rank writes.

    Attributes:
        piece: The piece's number among its rank's.
        start: The first row.
        stop: The row after the last.

    """

    piece: int
    start: int
    stop: int


def plan_writes(pieces: Sequence[Sequence[Piece]]) -> list[list[Write]]:
    """Return what each rank writes, so that all is written once and ranks that have the same write equally many bytes.

    What the same ranks have is laid out in a line and cut into equal parts, so at most one tensor per rank is cut in two.

    Args:
        pieces: What each rank has, by rank.

    Raises:
        ReportMismatchError: If ranks have something else under one name, or parts that do not make a whole.

    """
    _check_alike(pieces)
    _check_whole(pieces)
    holders: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, of_rank in enumerate(pieces):
        for number, piece in enumerate(of_rank):
            holders[piece.name, piece.offsets, piece.sizes].append((rank, number))
    lines: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for held in holders.values():
        ranks, numbers = zip(*held, strict=True)
        lines[ranks].append(list(numbers))
    writes: list[list[Write]] = [[] for _ in pieces]
    for ranks, line in lines.items():
        for rank, write in _cut(ranks, line, pieces):
            writes[rank].append(write)
    return [sorted(of_rank, key=lambda write: (write.piece, write.start)) for of_rank in writes]


def _cut(
    ranks: tuple[int, ...], line: Sequence[Sequence[int]], pieces: Sequence[Sequence[Piece]]
) -> Iterator[tuple[int, Write]]:
    """Yield who writes what of `line`: pieces that all `ranks` have, each as its number on every rank."""
    of_first = pieces[ranks[0]]
    fixed = [numbers for numbers in line if of_first[numbers[0]].by_first or of_first[numbers[0]].bytes == 0]
    movable = [numbers for numbers in line if not (of_first[numbers[0]].by_first or of_first[numbers[0]].bytes == 0)]
    yield from ((ranks[0], Write(numbers[0], 0, of_first[numbers[0]].rows)) for numbers in fixed)
    left, share = _shares(_bytes(of_first, fixed), _bytes(of_first, movable), len(ranks))
    turn = 0
    for numbers in movable:
        piece, row = of_first[numbers[0]], 0
        while row < piece.rows:
            rows = piece.rows - row if turn == len(ranks) - 1 else _rows_that_fit(piece, row, left)
            if rows == 0:
                turn, left = turn + 1, share + left
                continue
            yield ranks[turn], Write(numbers[turn], row, row + rows)
            left -= rows * piece.bytes / piece.rows
            row += rows


def _shares(fixed: int, movable: int, num_ranks: int) -> tuple[float, float]:
    """Return how many of the movable bytes go to the first rank, which has the fixed ones already, and to each other one."""
    if num_ranks == 1:
        return float(movable), 0.0
    of_first = max(0.0, (fixed + movable) / num_ranks - fixed)
    return of_first, (movable - of_first) / (num_ranks - 1)


def _bytes(pieces: Sequence[Piece], line: Sequence[Sequence[int]]) -> int:
    return sum(pieces[numbers[0]].bytes for numbers in line)


def _rows_that_fit(piece: Piece, row: int, left: float) -> int:
    rows = piece.rows - row
    row_bytes = piece.bytes / piece.rows
    if rows * row_bytes <= max(left, 0.0):
        return rows
    if piece.bytes < _LEAST_SPLIT_BYTES or piece.rows == 1:  # whole, to whoever has room for more than its half
        return rows if rows * row_bytes / 2 < left else 0
    return max(0, round(left / row_bytes))


def _check_alike(pieces: Sequence[Sequence[Piece]]) -> None:
    first: dict[str, tuple[int, Piece]] = {}
    for rank, of_rank in enumerate(pieces):
        for piece in of_rank:
            known_rank, known = first.setdefault(piece.name, (rank, piece))
            if (piece.dtype, piece.shape) != (known.dtype, known.shape):
                raise ReportMismatchError(
                    f"rank {rank} has {piece.name!r} as {piece.dtype} {list(piece.shape)} but rank {known_rank} as "
                    f"{known.dtype} {list(known.shape)}: report the same model on every rank, or what differs as RankLocal(...)"
                )


def _check_whole(pieces: Sequence[Sequence[Piece]]) -> None:
    found: dict[str, dict[tuple[Any, ...], int]] = defaultdict(dict)
    shapes: dict[str, tuple[int, ...]] = {}
    for of_rank in pieces:
        for piece in of_rank:
            found[piece.name][piece.offsets, piece.sizes] = math.prod(piece.sizes)
            shapes[piece.name] = piece.shape
    for name, parts in found.items():
        if sum(parts.values()) != math.prod(shapes[name]):
            raise ReportMismatchError(
                f"the ranks' parts of {name!r} hold {sum(parts.values())} of its {math.prod(shapes[name])} elements: "
                "report the state on every rank that has a part, sharded in one way"
            )
