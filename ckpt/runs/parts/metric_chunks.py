"""The objects that hold a run's metric history: each is written once, and each line carries its own digest.

An attempt's records are numbered. The key of a chunk holds the number of its last record and the count of its records, so that
a merged chunk sorts after all the chunks that it replaces: a listing that misses a just deleted chunk finds its replacement.
Version 0.1 wrote chunks of a thousand without digests, and rewrote the newest in place; they are read as they are.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from prefect_torch.ckpt.errors import CheckpointCorruptError, UnsupportedFormatError
from prefect_torch.ckpt.runs.bulk import all_are, are_counts, bytes_if_there, no_collection
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.metrics import to_json
from prefect_torch.ckpt.runs.records.fields import Count, decode
from prefect_torch.ckpt.storage.confirmed_reads import read_whole
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.storage.records import FORMAT_VERSION, parse, seal, unseal, unseal_all

if TYPE_CHECKING:
    from typing_extensions import Self

CHUNK_RECORDS = 1000
_WHAT = "a metric record"
_NAME = re.compile(r"(?P<attempt>[0-9]{6})-(?P<last>[0-9]{9})-(?P<count>[0-9]{4})\.jsonl")
_NAME_IN_0_1 = re.compile(r"(?P<attempt>[0-9]{6})-(?P<chunk>[0-9]{6})\.jsonl")
_HEAD = itemgetter("format", "number")
_logger = logging.getLogger(__name__)

T = TypeVar("T", bound="ChunkRecord")


class ChunkRecord(Protocol):
    """A dataclass for the records of a history."""

    @classmethod
    def quick(cls, fields: Sequence[Mapping[str, Any]]) -> "list[Self] | None":
        """Return the records with these stored fields as `decode` does, in less time; None if one is out of the ordinary."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """One object of the history; chunks sort by their records, and of two with the same last record, the longer is last.

    Attributes:
        attempt: The attempt whose leader wrote it.
        last: The number of its last record.
        count: The number of its records, at most.
        key: Its key.
        proves_itself: Whether its lines carry digests.

    """

    attempt: int
    last: int
    count: int
    key: str
    proves_itself: bool = True


@dataclass(frozen=True, slots=True)
class _Number:
    """The number of a record; the other fields of the same JSON object are the record itself."""

    number: Count


def new_chunk(layout: Layout, attempt: int, last: int, count: int) -> Chunk:
    """Return the chunk of the `count` records of `attempt` that end with number `last`."""
    return Chunk(attempt, last, count, layout.metrics_chunk(attempt, last, count))


def list_chunks(storage: Storage, layout: Layout, since: int | None = None) -> list[Chunk]:
    """Return the chunks of all attempts, or of `since` and later ones, in the order of their records; warn of other objects."""
    first = None if since is None else f"{layout.metrics}{since:06d}"
    found: set[Chunk] = set()
    for info in storage.list(layout.metrics, after=first):
        chunk = _named(info.key)
        if chunk is None:
            _logger.warning("left out: %s/%s is no chunk of the metric history", storage.url, info.key)
        else:
            found.add(chunk)
    return sorted(found)


def encode_line(number: int, record: dict[str, Any]) -> bytes:
    """Return one line of a chunk."""
    return seal(to_json({"format": FORMAT_VERSION, "number": number, **record}))


def join_lines(lines: Sequence[bytes]) -> bytes:
    """Return the stored form of a chunk."""
    return b"\n".join(lines)


def read_chunk(storage: Storage, chunk: Chunk, kind: type[T]) -> dict[int, T] | None:
    """Return the records of a chunk by number; None if the chunk does not exist.

    An object with unreadable lines, which a gateway may have cut, is read again. Lines that are unreadable each time are left
    out, with one warning that names the first of them.
    """
    data = bytes_if_there(storage, chunk.key)
    if data is None:
        return None
    records, problems = _parsed(storage, chunk, data, kind)

    def read(data: bytes) -> None:
        nonlocal records, problems
        records, problems = _parsed(storage, chunk, data, kind)
        if problems:
            raise CheckpointCorruptError(problems[0])

    if problems:
        try:
            read_whole(storage, chunk.key, read)
        except CheckpointCorruptError:
            more = f"; that is the first of {len(problems)} problems" if len(problems) > 1 else ""
            _logger.warning("left out of the metric history: %s%s", problems[0], more)
        except FileNotFoundError:  # merged meanwhile
            return None
    return records


def _parsed(storage: Storage, chunk: Chunk, data: bytes, kind: type[T]) -> tuple[dict[int, T], list[str]]:
    """Return the readable records in `data`, and why others are not readable."""
    lines = data.split(b"\n")
    quick = _quick(lines, kind) if chunk.proves_itself and len(lines) == chunk.count else None
    if quick is not None:
        return quick, []
    records: dict[int, T] = {}
    problems: list[str] = []
    for index, line in enumerate(lines):
        where = f"line {index + 1} of {storage.url}/{chunk.key}"
        try:
            number, record = _decode_line(chunk, index, line, where, kind)
        except (CheckpointCorruptError, UnsupportedFormatError) as exc:
            problems.append(str(exc))
        else:
            records[number] = record
    if chunk.proves_itself and len(lines) < chunk.count:
        problems.append(f"{storage.url}/{chunk.key} has {len(lines)} lines instead of {chunk.count}")
    return records, problems


def _quick(lines: Sequence[bytes], kind: type[T]) -> dict[int, T] | None:
    """Return the records of lines as `_decode_line` does, in a sixth of the time; None if one is out of the ordinary."""
    bodies = unseal_all(lines)
    if bodies is None:
        return None
    try:
        versions, numbers = zip(*map(_HEAD, bodies), strict=True)
    except KeyError:
        return None
    are_ordinary = all_are({int}, versions) and set(versions) == {FORMAT_VERSION} and are_counts(numbers)
    records = kind.quick(bodies) if are_ordinary else None
    return None if records is None else dict(zip(numbers, records, strict=True))


def _decode_line(chunk: Chunk, index: int, line: bytes, where: str, kind: type[T]) -> tuple[int, T]:
    if chunk.proves_itself:
        fields = unseal(line, where, _WHAT)
        return decode(_Number, fields, where, _WHAT).number, decode(kind, fields, where, _WHAT)
    return chunk.last - chunk.count + 1 + index, decode(kind, parse(line, where, _WHAT), where, _WHAT)


def read_records(
    storage: Storage, layout: Layout, kind: type[T], known: dict[Chunk, dict[int, T]] | None = None, since: int | None = None
) -> list[T]:
    """Return every record of the history once, in order, even if a writer merges chunks meanwhile.

    Args:
        storage: The storage.
        layout: The keys of the run.
        kind: The dataclass of a record.
        known: Chunks that were read before; new ones are added, so the next call with the same dict reads only newer ones.
        since: The first attempt whose leader's records are read; None for all.

    """
    known = {} if known is None else known
    gone: set[Chunk] = set()
    while unread := [chunk for chunk in list_chunks(storage, layout, since) if chunk not in known]:
        with no_collection():
            read = read_all(unread, lambda chunk: read_chunk(storage, chunk, kind))
        for chunk, records in zip(unread, read, strict=True):
            if records is not None:
                known[chunk] = records
            elif chunk in gone:  # listed twice and missing twice: it never existed
                known[chunk] = {}
            else:
                gone.add(chunk)
        if known.keys() >= set(unread):
            break
    by_number: dict[int, dict[int, T]] = defaultdict(dict)
    for chunk in sorted(known):
        by_number[chunk.attempt].update(known[chunk])
    return [record for _, found in sorted(by_number.items()) for _, record in sorted(found.items())]


def _named(key: str) -> Chunk | None:
    name = key.rpartition("/")[2]
    if (found := _NAME.fullmatch(name)) is not None:
        return Chunk(int(found["attempt"]), int(found["last"]), int(found["count"]), key)
    if (found := _NAME_IN_0_1.fullmatch(name)) is not None:
        last = (int(found["chunk"]) + 1) * CHUNK_RECORDS - 1
        return Chunk(int(found["attempt"]), last, CHUNK_RECORDS, key, proves_itself=False)
    return None
