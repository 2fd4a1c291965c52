"""A storage whose answers take some time: it shows what is asked for at the same time, and what one after the other."""

import time
from collections import Counter
from typing import Any

from wrapped_storage import WrappedStorage


class WaitingStorage(WrappedStorage):
    """Answers each request after 10 ms.

    Attributes:
        most: How many requests have waited at the same time, by the first folder of the key in its run.

    """

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.most: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    def _do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        key = args[0] if args and isinstance(args[0], str) else ""
        folder = "/".join(key.split("/")[1:2])
        self._waiting[folder] += 1
        self.most[folder] = max(self.most[folder], self._waiting[folder])
        time.sleep(0.01)
        self._waiting[folder] -= 1
        return super()._do(verb, *args, **kwargs)
