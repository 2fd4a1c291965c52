"""Reads of very many stored records: their values are checked column by column, not one by one."""

import gc
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

from prefect_torch.ckpt.errors import MalformedRecordError
from prefect_torch.ckpt.storage.protocol import Storage

_MANY_OBJECTS = 50_000  # a collection of so many takes some 5 ms
_logger = logging.getLogger(__name__)


def bytes_if_there(storage: Storage, key: str) -> bytes | None:
    """Return an object's bytes; None if it is gone, for example because it was merged with others.

    An object that is too large for a record counts as empty, with a warning.
    """
    try:
        return storage.get_bytes(key)
    except FileNotFoundError:
        return None
    except MalformedRecordError as exc:
        _logger.warning("left out: %s", exc)
        return b""


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector: of a million new objects that all stay, it would examine each several times.

    Afterwards they are moved to the oldest generation, or the next collection would examine each of them again. A small number
    of them is left to that collection: objects that are moved without a collection do not bring the next full one nearer, so a
    process that repeatedly reads a little would never free its garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_count()[0] > _MANY_OBJECTS and not _has_frozen():  # else objects of a process that forks would be thawed
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@cache
def _has_frozen() -> bool:
    """Return whether this process has frozen objects: it freezes them before any read, and a count takes milliseconds."""
    return gc.get_freeze_count() > 0


def all_are(kinds: Collection[type], values: Iterable[object]) -> bool:
    """Return whether the type of each value is one of `kinds`; a bool is no int."""
    return frozenset(kinds).issuperset(map(type, values))


def are_counts(values: Sequence[Any]) -> bool:
    """Return whether the values are `records.fields.Count`s."""
    return all_are({int}, values) and min(values, default=0) >= 0 and max(values, default=0) < 2**63


def are_scalars(rows: Sequence[Any], kinds: Collection[type]) -> bool:
    """Return whether each row is a dict of scalars of `kinds`, of which the floats are finite."""
    if not all_are({dict}, rows):
        return False
    of_rows: Iterable[Mapping[str, Any]] = rows
    values = list(chain.from_iterable(row.values() for row in of_rows))
    return all_are(kinds, values) and all(map(math.isfinite, [value for value in values if type(value) is float]))
