"""Very many stored records read at once: their values are checked column by column, not one by one."""

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

_MANY_OBJECTS = 50_000  # a collection looks at as many in some 5 ms
_logger = logging.getLogger(__name__)


def bytes_if_there(storage: Storage, key: str) -> bytes | None:
    """Return an object's bytes; None if it is gone, as one that was merged with others is.

    One that is too large for a record is empty, with a warning.
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
    """Let the garbage collector rest: of a million new objects that all stay, it would look at each several times.

    Afterwards they count as old, as all that a collection has looked at twice; without that, the next one looks at each again.
    Few of them are left to it: what counts as old without a collection does not bring the next one of all objects nearer, and
    a process that reads a little again and again would never free its garbage.
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
    """Return whether this process has frozen objects, which it does before it reads any; a count of all takes milliseconds."""
    return gc.get_freeze_count() > 0


def all_are(kinds: Collection[type], values: Iterable[object]) -> bool:
    """Return whether the type of each value is one of `kinds`; a bool is no int."""
    return frozenset(kinds).issuperset(map(type, values))


def are_counts(values: Sequence[Any]) -> bool:
    """Return whether the values are `record_fields.Count`s."""
    return all_are({int}, values) and min(values, default=0) >= 0 and max(values, default=0) < 2**63


def are_scalars(rows: Sequence[Any], kinds: Collection[type]) -> bool:
    """Return whether each row is a dict of scalars of `kinds`, of which the floats are finite."""
    if not all_are({dict}, rows):
        return False
    of_rows: Iterable[Mapping[str, Any]] = rows
    values = list(chain.from_iterable(row.values() for row in of_rows))
    return all_are(kinds, values) and all(map(math.isfinite, [value for value in values if type(value) is float]))
