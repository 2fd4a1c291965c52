"""Small objects of a storage, one request each: JSON objects, and records with a digest."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from prefect_torch.ckpt.errors import MalformedRecordError, UnsupportedFormatError
from prefect_torch.ckpt.storage.confirmed_reads import read_whole
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.storage.records import check_digest, parse, with_digest

from .fields import decode

T = TypeVar("T")
_SHOWN = 300
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SmallRecords:
    """The small objects of a storage; what is malformed or damaged is left out with a warning, as if it did not exist.

    Attributes:
        storage: The storage.

    """

    storage: Storage

    def get(self, kind: type[T], key: str, what: str, *, key_of: Callable[[T], str] | None = None) -> T | None:
        """Return the record at `key`; None if it does not exist, or with a warning if it is malformed or damaged.

        Args:
            kind: Its dataclass; see `fields.decode`.
            key: Its key.
            what: A description of the record, with its article, for the warning.
            key_of: Returns the key that a record belongs to, by its fields; None if they do not determine it.

        Raises:
            UnsupportedFormatError: If a newer version wrote it.

        """
        where = location_of(self.storage, key)

        def read(found: dict[str, Any]) -> T:
            record = decode(kind, found, where, what)
            check_digest(found, where, what)
            if key_of is not None and key_of(record) != key:
                raise MalformedRecordError(f"{where} is not {what}: it is that of {key_of(record)[:_SHOWN]!r}")
            return record

        return self._read(key, what, read)

    def put(self, key: str, record: Mapping[str, Any]) -> None:
        """Store a record, of JSON values, with a digest, as one changed digit may lead to the loss of checkpoints."""
        self.put_json(key, with_digest(record))

    def get_json(self, key: str) -> dict[str, Any] | None:
        """Return a JSON object; None if it does not exist, or with a warning if it is no JSON object."""
        return self._read(key, "a JSON object", lambda found: found)

    def get_verified(self, key: str, what: str, digest_field: str) -> dict[str, Any] | None:
        """Return a JSON object without the field that has its digest; None as `get` does."""
        where = location_of(self.storage, key)
        return self._read(key, what, lambda found: check_digest(found, where, what, digest_field))

    def put_json(self, key: str, value: Mapping[str, Any]) -> None:
        """Store a JSON object."""
        self.storage.put_bytes(key, json.dumps(value, sort_keys=True).encode())

    def _read(self, key: str, what: str, read: Callable[[dict[str, Any]], T]) -> T | None:
        try:
            return read_whole(self.storage, key, lambda data: read(parse(data, location_of(self.storage, key), what)))
        except FileNotFoundError:
            return None
        except MalformedRecordError as exc:
            _logger.warning("left out: %s", exc)
            return None


def left_out_if_newer(read: Callable[[], T | None]) -> T | None:
    """Return what `read` returns; None, with a warning, if a newer version wrote it."""
    try:
        return read()
    except UnsupportedFormatError as exc:
        _logger.warning("left out: %s", exc)
        return None


def location_of(storage: Storage, key: str) -> str:
    """Return the location of an object: a local path or a URL."""
    url = storage.url
    return f"{url}{key}" if url.endswith("/") else f"{url}/{key}"  # "memory://" and "/" are roots
