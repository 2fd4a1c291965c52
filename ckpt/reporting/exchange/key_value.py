"""The messages that ranks exchange: small values under keys that all ranks can wait for."""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol


class KeyValue(Protocol):
    """A small shared dictionary, such as torch's TCPStore; safe to share between threads, whose waits do not block others."""

    def set(self, key: str, value: bytes) -> None:
        """Store `value` and wake those that wait for `key`; ordered with this connection's requests, not with others'."""
        ...

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Store several values in one request, as `set` stores one."""
        ...

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of `keys` as soon as all are set.

        Raises:
            TimeoutError: If one is still missing after `timeout_s`.

        """
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0, and return the sum."""
        ...

    def check(self, key: str) -> bool:
        """Return whether `key` is set."""
        ...

    def delete(self, key: str) -> None:
        """Delete `key`; harmless when it is not set."""
        ...


class MemoryKeyValue:
    """A KeyValue between the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Store `value` and wake the threads that wait for `key`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def set_all(self, values: Mapping[str, bytes]) -> None:
        """Store several values."""
        with self._changed:
            self._values.update(values)
            self._changed.notify_all()

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Return the values of `keys` as soon as all are set."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not all(key in self._values for key in keys):
                if not self._changed.wait(deadline - time.monotonic()):
                    missing = [key for key in keys if key not in self._values]
                    if missing:
                        raise TimeoutError(f"not set within {timeout_s} s: {', '.join(missing)}")
            return [self._values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def check(self, key: str) -> bool:
        """Return whether `key` is set."""
        with self._changed:
            return key in self._values

    def delete(self, key: str) -> None:
        """Delete `key`."""
        with self._changed:
            self._values.pop(key, None)
