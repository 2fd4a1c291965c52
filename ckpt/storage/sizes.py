"""The sizes of stored objects, compared with those that they should have."""

from collections.abc import Mapping
from functools import partial

from .parallel import AT_ONCE, read_all
from .protocol import Storage


def find_other_size(storage: Storage, prefix: str, sizes: Mapping[str, int]) -> tuple[str, int | None] | None:
    """Return the first key whose size differs, with the stored size (None for a missing object); None if no size differs.

    Costs one listing, and a request for each object that it does not show as expected: a listing may lag behind, and leaves out
    objects behind links. Those requests use a new connection, and end with the first 32 of which one differs.

    Args:
        storage: The storage.
        prefix: The prefix of all objects, which ends with "/".
        sizes: The size of each object in bytes, by its key.

    """
    listed = {info.key: info.bytes for info in storage.list(prefix)}
    unproven = [key for key, expected in sizes.items() if listed.get(key) != expected]
    if not unproven:
        return None
    size_of = partial(find_size, storage.reopened())
    for start in range(0, len(unproven), AT_ONCE):
        keys = unproven[start : start + AT_ONCE]
        for key, found in zip(keys, read_all(keys, size_of), strict=True):
            if found != sizes[key]:
                return key, found
    return None


def find_size(storage: Storage, key: str) -> int | None:
    """Return the size of an object in bytes, or None if there is none; one request."""
    try:
        return storage.size(key)
    except FileNotFoundError:
        return None
