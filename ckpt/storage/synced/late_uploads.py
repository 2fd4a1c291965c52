"""Small objects that wait for the next upload, or for the end of a period."""

import logging
import threading
from collections.abc import Callable, Iterable

from prefect_torch.ckpt.errors import StorageError

_logger = logging.getLogger(__name__)


class LateUploads:
    """The keys that are yet to be uploaded by this process.

    Args:
        period_s: How long they wait at most.
        upload: Uploads what waits.

    """

    def __init__(self, period_s: float, upload: Callable[[], None]) -> None:
        self._period_s = period_s
        self._upload = upload
        self._keys: set[str] = set()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def add(self, keys: Iterable[str]) -> None:
        """Let `keys` wait."""
        with self._lock:
            self._keys.update(keys)
            if self._keys and self._timer is None:
                self._timer = threading.Timer(self._period_s, self._run)
                self._timer.daemon = True
                self._timer.start()

    def take(self) -> set[str]:
        """Return what waits, which the caller uploads now, or adds again."""
        with self._lock:
            keys, self._keys = self._keys, set()
            return keys

    def _run(self) -> None:
        with self._lock:
            self._timer = None
        try:
            self._upload()
        except (StorageError, OSError, ValueError) as exc:  # they wait again, and the next commit takes them along
            _logger.warning("small objects could not be synced yet: %s", exc)
