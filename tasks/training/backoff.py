"""The backoff of repeated actions during a training: publishing pages, prunes, calls of an unavailable API."""

import time
from collections.abc import Callable

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 30.0
_GROWTH = 1.15


class Backoff:
    """Bounds how often something happens: each pause is 15 % longer than the one before, from 2 s up to 30 s.

    That is 16 times in the first 100 s, while somebody is likely to look, and twice a minute from the fourth minute on.

    Args:
        clock: Returns the time in seconds.
        delay_s: How long to wait before the first time.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, delay_s: float = 0.0) -> None:
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._due_s = clock() + delay_s

    def wait_s(self) -> float:
        """Return the seconds until it is due; 0 if it is due now."""
        return max(0.0, self._due_s - self._clock())

    def record(self) -> None:
        """Record that it happened; a failure counts too."""
        self._due_s = self._clock() + self._pause_s
        self._pause_s = min(self._pause_s * _GROWTH, LONGEST_PAUSE_S)
