"""Small objects that wait for the next upload, or for the end of a period."""

import logging
import threading
from collections.abc import Callable, Iterable

from prefect_torch.ckpt.errors import StorageError

_AFTER_FAILURE_S = 10.0
_logger = logging.getLogger(__name__)


class LateUploads:
    """The keys that are yet to be uploaded by this process.

    Args:
        period_s: The longest time in seconds that they wait.
        upload: Uploads the waiting objects.

    """

    def __init__(self, period_s: float, upload: Callable[[], None]) -> None:
        self._period_s = period_s
        self._upload = upload
        self._keys: set[str] = set()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def add(self, keys: Iterable[str]) -> None:
        """Add `keys` to those that wait."""
        self._add(keys, self._period_s)

    def put_back(self, keys: Iterable[str]) -> None:
        """Add `keys` that could not be uploaded: they wait for ten seconds at least, since the target may be away."""
        self._add(keys, max(self._period_s, _AFTER_FAILURE_S))

    def take(self) -> set[str]:
        """Remove and return the waiting keys, which the caller uploads now, or puts back."""
        with self._lock:
            keys, self._keys = self._keys, set()
            return keys

    def _add(self, keys: Iterable[str], wait_s: float) -> None:
        with self._lock:
            self._keys.update(keys)
            if self._keys and self._timer is None:
                self._timer = threading.Timer(wait_s, self._run)
                self._timer.daemon = True
                self._timer.start()

    def _run(self) -> None:
        with self._lock:
            self._timer = None
        try:
            self._upload()
        except (StorageError, OSError, ValueError) as exc:  # the keys wait again, and the next commit uploads them
            _logger.warning("small objects could not be synced yet: %s", exc)
