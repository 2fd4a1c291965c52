"""A storage whose connection flips a bit of what it reads; what is stored is whole."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from wrapped_storage import READS_OF_DATA, WrappedStorage


class FlippingStorage(WrappedStorage):
    """Passes everything on to `inner`; read number `flip_at` (counted from 1; None for every one) comes with a bit flipped.

    What is opened anew flips nothing, and counts for the first: `reopened_times`, `fired`.
    """

    def __init__(self, inner: Any, flip_at: int | None, first: "FlippingStorage | None" = None):
        super().__init__(inner)
        self.flip_at = flip_at
        self.first = first or self
        self.reads = 0
        self.fired = 0
        self.reopened_times = 0
        self._lock = threading.Lock()

    def local_path(self, key: str) -> None:
        """Not in place: a local folder is read through the verbs, too."""

    def reopened(self) -> "FlippingStorage":
        self.first.reopened_times += 1
        return FlippingStorage(self.inner, flip_at=0, first=self.first)

    def _do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        result = super()._do(verb, *args, **kwargs)
        with self._lock:
            self.reads += verb in READS_OF_DATA
            flips = verb in READS_OF_DATA and self.flip_at in (None, self.reads)
            self.first.fired += flips
        return self._flipped(verb, result, *args) if flips else result

    @staticmethod
    def _flipped(verb: str, result: Any, *args: Any) -> Any:
        if verb == "get_bytes":
            return bytes([result[0] ^ 1, *result[1:]])
        if verb == "get_range":
            args[-1][0] ^= 1
            return result
        if verb == "get_file":
            path = Path(args[1])
            data = path.read_bytes()
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        return replace(result, digest=f"{int(result.digest, 16) ^ 1:032x}")
