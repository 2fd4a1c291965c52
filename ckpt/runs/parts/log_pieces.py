"""The objects that hold a rank's log: pieces of a part that grows, each written once, and the larger ones that replace them.

The key of a piece holds where it ends in its part and then its length, so that it sorts after all the pieces that it replaces:
a listing that misses a just deleted piece finds its replacement. The last replacement is the whole part, and has only its name.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefect_torch.ckpt.runs.layout import log_name, log_piece_name
from prefect_torch.ckpt.runs.run import Run

_FEW = 32
_NAME = re.compile(r"(?P<part>rank-[0-9]+(\.[0-9]+)?)(\.(?P<end>[0-9]+)-(?P<length>[0-9]+))?\.log")


@dataclass(frozen=True, slots=True)
class Piece:
    """One object of a part: its bytes from `begin` to `end`.

    Attributes:
        key: Its key.
        begin: Where it begins in the part.
        end: Where it ends, at most.

    """

    key: str
    begin: int
    end: int


@dataclass(slots=True)
class GrowingPart:
    """A part of a rank's log that is stored while it grows, each byte three or four times at most.

    Each flush stores one piece. Each 32nd piece holds what the 31 before it hold, too, and each 1,024th all before it.

    Attributes:
        rank: The rank.
        number: The number of the part.
        text: Its lines.
        is_full: Whether it gets no more lines, so that the next piece is the whole part.

    """

    rank: int
    number: int = 0
    text: bytearray = field(default_factory=bytearray)
    is_full: bool = False
    _num_stored: int = 0
    _pieces: dict[int, Piece] = field(default_factory=dict)  # those that nothing has replaced, each by its place among all

    @property
    def name(self) -> str:
        """Its name, once it is whole."""
        return log_name(self.rank, self.number)

    def following(self, folder: str, end: int, *, is_whole: bool) -> Piece:
        """Return the piece to store next, which ends with byte `end`."""
        place = self._num_stored + 1
        first = 0 if is_whole else place - _num_together(place)
        begin = next((piece.begin for it, piece in self._pieces.items() if it > first), self._end)
        name = self.name if is_whole else log_piece_name(self.rank, self.number, end, end - begin)
        return Piece(folder + name, begin, end)

    def replaced_by(self, piece: Piece) -> list[str]:
        """Return the keys of the stored pieces that `piece` holds."""
        return [it.key for it in self._pieces.values() if it.begin >= piece.begin]

    def add(self, piece: Piece) -> None:
        """Note that a piece is stored."""
        self._num_stored += 1
        self._pieces = {place: it for place, it in self._pieces.items() if it.begin < piece.begin}
        self._pieces[self._num_stored] = piece

    @property
    def _end(self) -> int:
        return max((piece.end for piece in self._pieces.values()), default=0)


def _num_together(number: int) -> int:
    """Return how many flushes the piece of the `number`-th flush covers: the largest power of 32 that divides it."""
    together = 1
    while number % (together * _FEW) == 0:
        together *= _FEW
    return together


def list_parts(run: Run, folder: str) -> dict[str, list[Piece]]:
    """Return the pieces of each part in a folder of logs, by its name; another program's file is a part of its own."""
    parts: dict[str, list[Piece]] = defaultdict(list)
    for key in run.keys(folder):
        name = key.removeprefix(folder)
        found = _NAME.fullmatch(name)
        if found is None or found["end"] is None:
            parts[name if found is None else found["part"]].append(Piece(key, 0, sys.maxsize))
        else:
            end = int(found["end"])
            parts[found["part"]].append(Piece(key, end - int(found["length"]), end))
    return parts


def read_part(run: Run, folder: str, part: str, pieces: Sequence[Piece]) -> bytes:
    """Return the text of a part, also while its pieces are replaced: when a listed one is gone, it lists again."""
    gone: set[str] = set()
    while (text := _joined(run, pieces, gone)) is None:
        pieces = list_parts(run, folder).get(part, [])
    return text


def _joined(run: Run, pieces: Sequence[Piece], gone: set[str]) -> bytes | None:
    """Return the text of pieces; None if one is gone, which is added to `gone`: listed and missing again, it never existed."""
    text, end = bytearray(), 0
    for piece in sorted(pieces, key=lambda it: (it.begin, -it.end)):
        if piece.end <= end or piece.key in gone:  # a larger one holds it
            continue
        try:
            text += run.storage.get_bytes(piece.key)
        except FileNotFoundError:
            gone.add(piece.key)
            return None
        end = piece.end
    return bytes(text)
