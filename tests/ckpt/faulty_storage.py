"""A storage that fails where it is told to, and counts what fired."""

import threading
from collections import Counter
from typing import Any

VERBS = ("put_file", "get_file", "put_bytes", "get_bytes", "list", "size", "delete", "remove_interrupted")


class Crash(BaseException):
    """The process is gone: nothing in the code under test may catch it."""


class FaultyStorage:
    """Passes everything on to `inner`, except operation number `crash_at`.

    Args:
        inner: The storage that does the work.
        crash_at: The operation, counted from 1, that does not happen or whose answer is lost; None for none.
        after: Whether the operation takes effect before the crash.
        error: What is raised.

    """

    def __init__(self, inner, crash_at: int | None = None, *, after: bool = False, error: BaseException | None = None):
        self.inner = inner
        self.crash_at = crash_at
        self.after = after
        self.error = error or Crash()
        self.operations: list[tuple[str, str]] = []
        self.fired = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.inner.url

    def local_path(self, key: str) -> Any:
        return self.inner.local_path(key)

    def counts(self) -> Counter[str]:
        return Counter(verb for verb, _ in self.operations)

    def _do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self.fired and isinstance(self.error, Crash):
                raise self.error  # a dead process does nothing more
            self.operations.append((verb, str(args[0])))
            fires = len(self.operations) == self.crash_at
            self.fired += fires
        if fires and not self.after:
            raise self.error
        result = getattr(self.inner, verb)(*args, **kwargs)
        if verb == "list":
            result = iter(list(result))
        if fires:
            raise self.error
        return result


for _verb in VERBS:
    setattr(FaultyStorage, _verb, lambda self, *args, _verb=_verb, **kwargs: self._do(_verb, *args, **kwargs))
