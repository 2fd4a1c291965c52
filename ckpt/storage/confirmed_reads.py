"""Damage is a verdict of two reads: one bit that flipped on the way must not cost a checkpoint."""

import logging
from collections.abc import Callable
from typing import TypeVar

from prefect_torch.ckpt.errors import CheckpointCorruptError

from .protocol import Storage

T = TypeVar("T")
_logger = logging.getLogger(__name__)


def confirm_damage(storage: Storage, read: Callable[[Storage], T]) -> T:
    """Return what `read` returns; where it finds damage, what it returns by a new connection, and only that counts.

    Costs nothing where all is well, and else the read once more.

    Args:
        storage: Where to read from.
        read: Reads from the storage that it is given, and raises CheckpointCorruptError where what it read cannot be true.

    Raises:
        CheckpointCorruptError: If the second read finds damage, too.

    """
    try:
        return read(storage)
    except CheckpointCorruptError as exc:
        first = exc
    _logger.warning("%s; reading once more, by a new connection", first)
    result = read(storage.reopened())
    _logger.warning("the second read was good: what is stored is whole, but a connection or a memory here flips bits")
    return result
