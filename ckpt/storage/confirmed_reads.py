"""Damage is confirmed by a second read: one bit that flipped in transit must not cost a checkpoint."""

import logging
from collections.abc import Callable
from typing import TypeVar

from prefect_torch.ckpt.errors import CheckpointCorruptError

from .protocol import Storage

T = TypeVar("T")
_logger = logging.getLogger(__name__)


def confirm_damage(storage: Storage, read: Callable[[Storage], T]) -> T:
    """Return the result of `read`; if it finds damage, the result of a second read by a new connection, which alone counts.

    Costs nothing without damage, and one more read with it.

    Args:
        storage: The storage to read.
        read: Reads from the storage that it receives, and raises CheckpointCorruptError if the data are damaged.

    Raises:
        CheckpointCorruptError: If the second read finds damage, too.

    """
    try:
        return read(storage)
    except CheckpointCorruptError as exc:
        first = str(exc)  # the error itself would keep the data of the first read in memory during the second
    result = read(storage.reopened())
    _logger.warning(
        "%s; but a second read was good: the stored data are whole, and a connection or a memory here flips bits", first
    )
    return result
