"""The index of a run's manifests: their contents, many to an object, so that reading a hundred thousand costs few requests.

It is a cache in the storage. Only a listing of the manifests shows what exists, and an entry counts only where the listed size
of the manifest is the one that was indexed. A segment is written once, under a key of its own; the leader of the run merges
small ones, and rebuilds what is missing or damaged (`index_writer`).
"""

import gc
import json
import logging
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import xxhash
from prefect_torch.ckpt.errors import MalformedRecordError, UnsupportedFormatError
from prefect_torch.ckpt.storage.keys import check_key
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.storage.protocol import Storage

from .layout import Layout
from .manifest import FileEntry, Manifest, is_id
from .metrics import to_json
from .records import FORMAT_VERSION, decode, is_newer, parse

FEW = 64  # manifests that are read one by one; as many are worth a segment
LARGEST = FEW * 256  # entries of a segment
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

    """

    key: str
    count: int


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
    keys = sorted({info.key for info in storage.list(layout.index)})
    names = [(key, _NAME.fullmatch(key.removeprefix(layout.index))) for key in keys]
    return [Segment(key, int(name["count"])) for key, name in names if name is not None]


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


def bytes_if_there(storage: Storage, key: str) -> bytes | None:
    """Return an object's bytes; None if it is gone, as one that was merged with others is."""
    try:
        return storage.get_bytes(key)
    except FileNotFoundError:
        return None


def _parsed(storage: Storage, segment: Segment, data: bytes | None) -> list[Entry] | None:
    try:
        return None if data is None else _decode(data, f"{storage.url}/{segment.key}")
    except MalformedRecordError as exc:
        _logger.warning("left out, so its manifests are read one by one: %s", exc)
        return []
    except UnsupportedFormatError:
        return None


@contextmanager
def no_collection() -> Iterator[None]:
    """Let the garbage collector rest: of a million new objects that all stay, it would look at each several times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def write_segments(storage: Storage, layout: Layout, entries: Iterable[Entry]) -> None:
    """Store entries as new segments, of which each is written once."""
    ordered = sorted(entries, key=lambda it: it.manifest.id)
    for first in range(0, len(ordered), LARGEST):
        part = ordered[first : first + LARGEST]
        storage.put_bytes(layout.index_segment(len(part), secrets.token_hex(4)), _encode(part))


def _encode(entries: Iterable[Entry]) -> bytes:
    """Return a segment: a line with its format and the digest of the rest, and then a row for each manifest."""
    return _seal([_row(it) for it in entries])


def _seal(rows: Sequence[Sequence[Any]]) -> bytes:
    dumped = json.dumps(rows, separators=(",", ":"), allow_nan=False).encode()
    head = {"format": FORMAT_VERSION, "digest": xxhash.xxh3_128_hexdigest(dumped)}
    return b"%b\n%b" % (json.dumps(head).encode(), dumped)


def _decode(data: bytes, where: str) -> list[Entry]:
    line, _, rows = data.partition(b"\n")
    head = parse(line, where, _WHAT)
    if is_newer(head.get("format")):
        raise UnsupportedFormatError(f"{where} has format {head['format']}: upgrade prefect-torch")
    if head.get("digest") != xxhash.xxh3_128_hexdigest(rows):
        raise MalformedRecordError(f"{where} does not match its own digest")
    try:
        return [_entry(row, where) for row in json.loads(rows)]
    except (TypeError, ValueError, RecursionError) as exc:
        raise MalformedRecordError(f"{where} is not {_WHAT}: {exc}") from exc


def _row(entry: Entry) -> list[Any]:
    fields = {**asdict(entry.manifest), "metrics": entry.manifest.reported, "created_at": entry.manifest.created_at.isoformat()}
    fields["files"] = [[getattr(file, name) for name in _FILE_FIELDS] for file in entry.manifest.files]
    values = to_json([fields[name] for name in _FIELDS])
    assert isinstance(values, list)
    return [entry.bytes, *values]


def _entry(row: Sequence[Any], where: str) -> Entry:
    size, *values = row
    if type(size) is not int:
        raise ValueError(f"{size!r} is no size")
    manifest = _quick(values)
    if manifest is None:
        fields: dict[str, Any] = dict(zip(_FIELDS, values, strict=True))
        fields["files"] = [dict(zip(_FILE_FIELDS, file, strict=True)) for file in fields["files"]]
        manifest = decode(Manifest, fields, where, _WHAT)
    return Entry(manifest, size)


_PLAIN = {int, float, str, bool, type(None)}
_FLOAT = {float}


def _quick(values: Sequence[Any]) -> Manifest | None:
    """Return the manifest of a row as `decode` does, in a fifth of the time; None for values out of the ordinary."""
    checkpoint_id, step, attempt, metrics, files, world_size, parent, created_at, metadata, timings = values
    ordinary = (
        type(checkpoint_id) is str
        and type(attempt) is int
        and type(step) is int
        and attempt > 0
        and checkpoint_id.startswith("%06d-%08d-" % (attempt, step))  # noqa: UP031 - a third of the time of an f-string
        and is_id(checkpoint_id)
        and type(metrics) is dict
        and _PLAIN.issuperset(map(type, metrics.values()))
        and type(world_size) is int
        and 0 <= world_size < 2**63
        and (parent is None or type(parent) is str)
        and metadata == {}
        and type(timings) is dict
        and _FLOAT.issuperset(map(type, timings.values()))
    )
    entries = _files(files) if ordinary else None
    if entries is None:
        return None
    moment = datetime.fromisoformat(created_at)
    if moment.tzinfo is None:
        return None
    return Manifest(checkpoint_id, step, attempt, metrics, entries, world_size, parent, moment, {}, timings)


def _files(rows: Collection[Any]) -> tuple[FileEntry, ...] | None:
    found = []
    for path, size, digest, rank in rows:
        if type(size) is not int or type(rank) is not int or type(digest) is not str or type(path) is not str:
            return None
        if not 0 <= size < 2**63 or not 0 <= rank < 2**63 or not _is_key(path):
            return None
        found.append(FileEntry(path, size, digest, rank))
    return tuple(found)


@lru_cache(1024)  # checkpoints of one run have files of the same names
def _is_key(path: str) -> bool:
    try:
        check_key(path)
    except ValueError:
        return False
    return True
