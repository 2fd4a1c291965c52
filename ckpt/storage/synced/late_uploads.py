"""Small objects that wait for the next upload, or for the end of a period."""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from prefect_torch.ckpt.errors import StorageError

from .held_folders import HeldFolder

_AFTER_FAILURE_S = 10.0
_logger = logging.getLogger(__name__)


class LateUploads:
    """The keys that are yet to be uploaded by this process, and those that a process that was killed has left.

    Each waiting key is an empty file in a directory of this process.

    Args:
        folder: Holds the directories of all processes that upload to one target.
        period_s: The longest time in seconds that they wait.
        upload: Uploads the waiting objects.

    """

    def __init__(self, folder: Path, period_s: float, upload: Callable[[], None]) -> None:
        self._folder = folder
        self._has_adopted = False
        self._period_s = period_s
        self._upload = upload
        self._keys: set[str] = set()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    @cached_property
    def _own(self) -> Path:
        return HeldFolder.make(self._folder).path

    def add(self, keys: Iterable[str]) -> None:
        """Add `keys` to those that wait."""
        self._add(keys, self._period_s)

    def put_back(self, keys: Iterable[str]) -> None:
        """Add `keys` that could not be uploaded: they wait for ten seconds at least, since the target may be away."""
        self._add(keys, max(self._period_s, _AFTER_FAILURE_S))

    def take(self) -> set[str]:
        """Remove and return the waiting keys, which the caller uploads now, and declares as `uploaded` or puts back."""
        with self._lock:
            if not self._has_adopted:
                self._adopt()
                self._has_adopted = True
            keys, self._keys = self._keys, set()
            return keys

    def uploaded(self, keys: Iterable[str]) -> None:
        """Forget `keys`, unless they wait again meanwhile."""
        with self._lock:
            for key in set(keys) - self._keys:
                (self._own / key).unlink(missing_ok=True)

    def _adopt(self) -> None:
        """Take the keys over that processes which have ended have left."""
        for left in filter(None, map(HeldFolder.take, list(self._folder.glob("*-*")))):
            keys = {str(Path(place, name).relative_to(left.path)) for place, _, names in os.walk(left.path) for name in names}
            self._mark(keys)
            self._keys.update(keys)
            left.remove()

    def _mark(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self._own / key).parent.mkdir(parents=True, exist_ok=True)
            (self._own / key).touch()

    def _add(self, keys: Iterable[str], wait_s: float) -> None:
        added = set(keys)
        with self._lock:
            self._mark(added)
            self._keys.update(added)
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
