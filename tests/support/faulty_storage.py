"""A storage that fails where it is told to, and counts what fired."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from wrapped_storage import WrappedStorage


class Crash(BaseException):
    """The process is gone: nothing in the code under test may catch it."""


class FaultyStorage(WrappedStorage):
    """Passes everything on to `inner`, except operation number `crash_at`.

    Args:
        inner: The storage that does the work.
        crash_at: The operation, counted from 1, that does not happen or whose answer is lost; None for none.
        after: Whether the operation takes effect before the crash.
        error: What is raised.
        torn: Whether a put leaves the first half of its bytes under its key, as no storage should.
        delay_s: How long each operation takes.

    """

    def __init__(
        self,
        inner,
        crash_at: int | None = None,
        *,
        after: bool = False,
        error: BaseException | None = None,
        torn: bool = False,
        delay_s: float = 0.0,
    ):
        super().__init__(inner)
        self.crash_at = crash_at
        self.after = after
        self.error = error or Crash()
        self.torn = torn
        self.delay_s = delay_s
        self.operations: list[tuple[str, str]] = []
        self.fired = 0
        self._lock = threading.Lock()

    def counts(self) -> Counter[str]:
        return Counter(verb for verb, _ in self.operations)

    def _do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self.fired and isinstance(self.error, Crash):
                raise self.error  # a dead process does nothing more
            self.operations.append((verb, str(args[0])))
            fires = len(self.operations) == self.crash_at
            self.fired += fires
        time.sleep(self.delay_s)
        if fires and self.torn and verb in ("put_file", "put_bytes"):
            data = args[1].read_bytes() if verb == "put_file" else args[1]
            self.inner.put_bytes(args[0], data[: len(data) // 2])
        if fires and self.torn and verb == "put_files":
            *whole, (key, path) = list(args[0].items())[: len(args[0]) // 2 + 1]
            self.inner.put_files(dict(whole), **kwargs)
            data = Path(path).read_bytes()
            self.inner.put_bytes(key, data[: len(data) // 2])
        if fires and not self.after:
            raise self.error
        result = getattr(self.inner, verb)(*args, **kwargs)
        if verb == "list":
            result = iter(list(result))
        if fires:
            raise self.error
        return result
