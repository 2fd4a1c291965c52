"""The replacement of many small objects by one, which is read back before they are deleted."""

import logging
from collections.abc import Iterable

from prefect_torch.ckpt.errors import StorageError
from prefect_torch.ckpt.storage.protocol import Storage

_logger = logging.getLogger(__name__)


class Merging:
    """Replaces objects of one log by larger ones; a crash in between leaves both, which readers must expect.

    Args:
        storage: The storage of the objects.
        log: What they hold, for a warning.

    """

    def __init__(self, storage: Storage, log: str) -> None:
        self._storage = storage
        self._log = log
        self._replaced: list[str] = []
        self._has_warned = False

    def replace(self, parts: Iterable[str], whole: str, data: bytes, *, is_stored: bool = False) -> None:
        """Store `data` under a new key, and read it back; `delete_replaced` then deletes the objects that it replaces.

        Args:
            parts: The keys of the objects that it replaces.
            whole: The new key.
            data: All that they hold.
            is_stored: Whether the object exists already.

        Raises:
            StorageError: If the object holds something else.

        """
        if not is_stored:
            self._storage.put_bytes(whole, data)
        if self._storage.get_bytes(whole) != data:
            raise StorageError(f"{self._storage.url}/{whole} holds something else than was stored just now")
        self._replaced += parts

    def delete_replaced(self) -> None:
        """Delete the replaced objects; after an error, the next call does. One that the storage refuses to delete stays."""
        if not self._replaced:
            return
        try:
            self._storage.delete(self._replaced)
        except PermissionError as exc:  # readers take the merged ones, so that only space is lost
            message = "small objects of %s, which is stored, cannot be deleted, and stay: %s"
            _logger.log(logging.DEBUG if self._has_warned else logging.WARNING, message, self._log, exc)
            self._has_warned = True
        self._replaced = []
