"""A storage whose answers take some time: it shows what is asked for at the same time, and what one after the other."""

import threading
from collections import Counter
from typing import Any

from wrapped_storage import WrappedStorage


class WaitingStorage(WrappedStorage):
    """Answers requests after 10 ms; for some folders, once four have come at the same time, or half a second after each.

    Args:
        inner: The storage.
        awaited: These folders.

    Attributes:
        most: How many requests have waited at the same time, by the first folder of the key in its run.

    """

    def __init__(self, inner: Any, *awaited: str):
        super().__init__(inner)
        self.most: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._awaited = awaited
        self._coming = threading.Condition()

    def _do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        key = args[0] if args and isinstance(args[0], str) else ""
        folder = "/".join(key.split("/")[1:2])
        with self._coming:
            self._waiting[folder] += 1
            self.most[folder] = max(self.most[folder], self._waiting[folder])
            self._coming.notify_all()
            self._coming.wait_for(lambda: self.most[folder] >= 4, 0.5 if folder in self._awaited else 0.01)
            self._waiting[folder] -= 1
        return super()._do(verb, *args, **kwargs)
