"""Damage is confirmed by another read that finds the same: bits that flip in transit must not cost a checkpoint."""

import logging
from collections.abc import Callable
from typing import TypeVar

from prefect_torch.ckpt.errors import CheckpointCorruptError, StorageError

from .protocol import Storage
from .retry import with_retries
from .sizes import require_size

T = TypeVar("T")
_MOST_READS = 5
_logger = logging.getLogger(__name__)


def confirm_damage(storage: Storage, read: Callable[[Storage], T]) -> T:
    """Return the result of `read`; if it finds damage, that of the first of further reads that finds none, or the same again.

    Costs nothing without damage, and one more read with it. Each further read has a new connection.

    Args:
        storage: The storage to read.
        read: Reads from the storage that it receives, and raises CheckpointCorruptError if the data are damaged, with the same
            text for the same data.

    Raises:
        CheckpointCorruptError: If two reads in a row find the same damage.
        StorageError: If each of five reads finds another.

    """
    found: list[str] = []  # the errors themselves would keep the data of a read in memory during the next one
    while len(found) < _MOST_READS:
        try:
            result = read(storage.reopened() if found else storage)
        except CheckpointCorruptError as exc:
            if found and str(exc) == found[-1]:
                raise
            found.append(str(exc))
        else:
            if found:
                _logger.warning(
                    "%s; but another read was good: the stored data are whole, and a connection or a memory here flips bits",
                    found[-1],
                )
            return result
    raise StorageError(f"each of {len(found)} reads differs, so a connection or a memory here flips bits: {found[-1]}")


def read_whole(storage: Storage, key: str, read: Callable[[bytes], T]) -> T:
    """Return what `read` returns for the bytes of a record, which are read again if it finds damage.

    Args:
        storage: The storage.
        key: The key of the record.
        read: Raises CheckpointCorruptError if the bytes are damaged.

    Raises:
        FileNotFoundError: If there is no such object.
        CheckpointCorruptError: If it is damaged.
        StorageError: If reads return another number of bytes than its size, until the retries end.

    """

    def read_once(it: Storage) -> T:
        data = it.get_bytes(key)
        try:
            return read(data)
        except CheckpointCorruptError:
            require_size(it, key, len(data))
            raise

    return confirm_damage(storage, lambda it: with_retries(it, "reading", key, read_once))
