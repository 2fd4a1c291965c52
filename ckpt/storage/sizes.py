"""The sizes of stored objects, compared with those that they should have."""

from collections.abc import Callable, Mapping
from functools import partial

from prefect_torch.ckpt.errors import StorageError

from .parallel import AT_ONCE, read_all
from .protocol import Storage
from .retry import with_retries


class OtherSizeError(StorageError):
    """An object has another size than it should have.

    Attributes:
        key: Its key.
        size: Its size in bytes; None if there is no such object.

    """

    def __init__(self, key: str, size: int | None, expected: int) -> None:
        super().__init__(f"{size or 0} of {expected} bytes of {key} are there")
        self.key = key
        self.size = size


def wait_for_sizes(storage: Storage, place: str, sizes: Mapping[str, int], check: Callable[[], object]) -> None:
    """Wait until a storage has what it acknowledged, for as long as it retries requests.

    A gateway may answer for a bucket, so each look after the first has a new connection. A mount may show an old listing (FUSE,
    for minutes), or the size that a file had while it was written (NFS, for seconds).

    Args:
        storage: The storage.
        place: The prefix of all objects, which ends with "/", or the key of the only one, which costs no listing.
        sizes: The size of each object in bytes, by its key.
        check: Called after each look that finds another size; an error other than a StorageError ends the wait.

    Raises:
        OtherSizeError: If an object is missing, or of another size, until the retries end.
        StorageError: If the storage does not answer.

    """
    others: list[OtherSizeError] = []

    def look(storage: Storage) -> None:
        used = storage.reopened() if others else storage
        if place.endswith("/"):
            other = find_other_size(used, place, sizes)
        else:
            found = find_size(used, place)
            other = None if found == sizes[place] else (place, found)
        if other is not None:
            others.append(OtherSizeError(*other, sizes[other[0]]))
            check()
            raise others[-1]

    try:
        with_retries(storage, "looking for what was stored in", place, look)
    except StorageError as exc:
        if not others:
            raise
        raise others[-1] from exc


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


def refuse_part(storage: Storage, key: str, got: int, expected: int) -> None:
    """Raise if a bucket has given another number of bytes of an object than it lists: such a read says nothing of the object.

    A gateway's page, or a cut answer that seems complete, comes with status 200. A local file is asked for its size before.

    Args:
        storage: The storage.
        key: The object that was read.
        got: How many bytes came.
        expected: How many were stored.

    Raises:
        StorageError: If they differ, and the storage lists the object with `expected` bytes, or does not list it.

    """
    if got == expected or storage.local_path(key) is not None:
        return
    listed = find_listed_size(storage, key)
    if listed in (None, expected):
        raise StorageError(f"{got} bytes came of the {expected} of {storage.url}/{key}")


def require_size(storage: Storage, key: str, got: int) -> None:
    """Raise unless as many bytes of an object came as it has now; a request, for a bucket a listing.

    Raises:
        StorageError: If they differ.

    """
    size = find_listed_size(storage, key) if storage.local_path(key) is None else find_size(storage, key)
    if size != got:
        raise StorageError(f"{got} bytes came of the {size} of {storage.url}/{key}")


def find_listed_size(storage: Storage, key: str) -> int | None:
    """Return the size with which an object is listed, or None if it is not; one request if the order of listings is known."""
    parent = key[: key.rfind("/") + 1]
    return next((info.bytes for info in storage.list(parent, after=key[:-1]) if info.key == key), None)


def find_size(storage: Storage, key: str) -> int | None:
    """Return the size of an object in bytes, or None if there is none; one request."""
    try:
        return storage.size(key)
    except FileNotFoundError:
        return None
