"""The index of a run's manifests: their contents, many to an object, so that reading a hundred thousand costs few requests.

It is a cache in the storage. Only a listing of the manifests shows what exists, and an entry counts only where the listed size
of the manifest is the one that was indexed. A segment is written once, under a key of its own; the leader of the run merges
small ones, and rebuilds what is missing or damaged (`writer`).
"""

import json
import logging
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from typing import Any

import xxhash
from prefect_torch.ckpt.errors import MalformedRecordError, UnsupportedFormatError
from prefect_torch.ckpt.runs.bulk import all_are, are_counts, are_scalars, bytes_if_there, no_collection
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.manifest import MAX_STEP, FileEntry, Manifest, id_prefix, is_id
from prefect_torch.ckpt.runs.metrics import to_json
from prefect_torch.ckpt.runs.records.fields import decode, is_moment
from prefect_torch.ckpt.storage.keys import check_key
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.storage.records import FORMAT_VERSION, is_newer, parse, unsupported

FEW = 64  # manifests that are read one by one; as many are worth a segment
LARGEST = FEW * 256  # entries of a segment
MOST_BYTES = 8 * 2**20  # after which a segment ends: the leader holds sixteen to merge them, with each file of each manifest
_CHECKED = 256  # rows that are checked together: an unusual one makes the check of all slow
_NAME = re.compile(r"(?P<count>[0-9]{6})-(?P<token>[0-9a-f]{8})\.json")
_WHAT = "a segment of the index"
_FIELDS = ("id", "step", "attempt", "metrics", "files", "world_size", "parent", "created_at", "metadata", "timings")
_FILE_FIELDS = ("path", "bytes", "digest", "rank")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segment:
    """One object of the index.

    Attributes:
        key: Its key.
        count: The number of its entries.
        bytes: Its size.

    """

    key: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of a manifest when it was indexed.

    Attributes:
        manifest: As it was committed, without attached metrics.
        bytes: The size of its object.

    """

    manifest: Manifest
    bytes: int


def list_segments(storage: Storage, layout: Layout) -> list[Segment]:
    """Return the segments of a run's index, sorted by key; one request."""
    sizes = {info.key: info.bytes for info in storage.list(layout.index)}
    names = [(key, _NAME.fullmatch(key.removeprefix(layout.index))) for key in sorted(sizes)]
    return [Segment(key, int(name["count"]), sizes[key]) for key, name in names if name is not None]


def read_segment(storage: Storage, segment: Segment) -> list[Entry] | None:
    """Return the entries of a segment: none, with a warning, if it is damaged; None if it is gone, or of a newer version."""
    return _parsed(storage, segment, bytes_if_there(storage, segment.key))


def read_index(storage: Storage, layout: Layout) -> dict[str, Entry]:
    """Return the indexed manifests by id, also of checkpoints that are gone; a listing, and a read for each segment."""
    segments = list_segments(storage, layout)
    stored = read_all(segments, lambda segment: bytes_if_there(storage, segment.key))
    with no_collection():
        contents = [_parsed(storage, segment, data) for segment, data in zip(segments, stored, strict=True)]
        return {entry.manifest.id: entry for found in contents if found is not None for entry in found}


def _parsed(storage: Storage, segment: Segment, data: bytes | None) -> list[Entry] | None:
    try:
        return None if data is None else _decode(data, f"{storage.url}/{segment.key}")
    except MalformedRecordError as exc:
        _logger.warning("left out, so its manifests are read one by one: %s", exc)
        return []
    except UnsupportedFormatError:
        return None


def write_segments(storage: Storage, layout: Layout, entries: Iterable[Entry]) -> None:
    """Store entries as new segments, of which each is written once, and encoded by itself."""
    ordered = sorted(entries, key=lambda it: it.manifest.id)
    for rows in _divide(_encode(_row(entry)) for entry in ordered):
        storage.put_bytes(layout.index_segment(len(rows), secrets.token_hex(4)), _seal(rows))


def _divide(rows: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the rows of each segment; one ends with the row with which it is full."""
    part, size = list[bytes](), 0
    for row in rows:
        part.append(row)
        size += len(row)
        if len(part) == LARGEST or size >= MOST_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _seal(rows: Sequence[bytes]) -> bytes:
    """Return a segment: a line with its format and the digest of the rest, and then a row for each manifest."""
    joined = b"[%b]" % b",".join(rows)
    head = {"format": FORMAT_VERSION, "digest": xxhash.xxh3_128_hexdigest(joined)}
    return b"%b\n%b" % (json.dumps(head).encode(), joined)


def _decode(data: bytes, where: str) -> list[Entry]:
    line, _, rows = data.partition(b"\n")
    head = parse(line, where, _WHAT)
    if is_newer(head.get("format")):
        raise unsupported(head["format"], where)
    if head.get("digest") != xxhash.xxh3_128_hexdigest(rows):
        raise MalformedRecordError(f"{where} does not match its own digest")
    try:
        table = list(json.loads(rows))
        parts = (table[first : first + _CHECKED] for first in range(0, len(table), _CHECKED))
        return [entry for part in parts for entry in _quick(part) or [_entry(row, where) for row in part]]
    except (TypeError, ValueError, RecursionError) as exc:
        raise MalformedRecordError(f"{where} is not {_WHAT}: {exc}") from exc


def _encode(row: Sequence[Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode()


def _row(entry: Entry) -> list[Any]:
    manifest = entry.manifest
    fields = {name: getattr(manifest, name) for name in _FIELDS}
    fields |= {"metrics": manifest.reported, "created_at": manifest.created_at.isoformat()}
    fields["files"] = [[getattr(file, name) for name in _FILE_FIELDS] for file in manifest.files]
    values = to_json([fields[name] for name in _FIELDS])
    assert isinstance(values, list)
    return [entry.bytes, *values]


def _entry(row: Sequence[Any], where: str) -> Entry:
    size, *values = row
    if type(size) is not int:
        raise ValueError(f"{size!r} is no size")
    fields: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
    fields["files"] = [dict(zip(_FILE_FIELDS, file, strict=True)) for file in fields["files"]]
    return Entry(decode(Manifest, fields, where, _WHAT), size)


def _quick(table: Sequence[Sequence[Any]]) -> list[Entry] | None:
    """Return the entries of all rows as `_entry` does, column by column, in a sixth of the time; None if a value is unusual."""
    sizes, ids, steps, attempts, metrics, files, world_sizes, parents, moments, metadata, timings = zip(*table, strict=True)
    are_ordinary = (
        all_are({int}, sizes)
        and all_are({str}, ids)
        and all_are({int}, (*steps, *attempts))
        and all(map(is_id, ids))
        and 0 <= min(steps) <= max(steps) <= MAX_STEP
        and all(map(str.startswith, ids, map(id_prefix, attempts, steps)))
        and min(attempts) > 0
        and are_scalars(metrics, {int, float, str, bool, type(None)})
        and are_counts(world_sizes)
        and all_are({str, type(None)}, parents)
        and all_are({dict}, metadata)
        and not any(metadata)
        and are_scalars(timings, {float})
    )
    if not are_ordinary or (grouped := _quick_files(files)) is None:
        return None
    committed_at = [datetime.fromisoformat(it) for it in moments]
    if not all(map(is_moment, committed_at)):
        return None
    columns = (ids, steps, attempts, metrics, grouped, world_sizes, parents, committed_at, metadata, timings)
    return list(map(Entry, map(Manifest, *columns), sizes))


def _quick_files(rows: Iterable[Collection[Any]]) -> list[tuple[FileEntry, ...]] | None:
    flat = list(chain.from_iterable(rows))
    paths, sizes, digests, ranks = zip(*flat, strict=True) if flat else ((), (), (), ())
    are_ordinary = all_are({str}, paths) and are_counts(sizes) and all_are({str}, digests) and are_counts(ranks)
    if not are_ordinary or not all(map(_is_key, set(paths))):
        return None
    entries = map(FileEntry, paths, sizes, digests, ranks)
    return [tuple(islice(entries, len(row))) for row in rows]


def _is_key(path: str) -> bool:
    try:
        check_key(path)
    except ValueError:
        return False
    return True
