"""The backoff of repeated actions during a training: publishing pages, prunes, calls of an unavailable API."""

import time
from collections.abc import Callable

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 30.0
_GROWTH = 1.15
_SLOW_GROWTH = 1.005


class Backoff:
    """Bounds how often something happens: each pause is 15 % longer than the one before, from 2 s up to 30 s.

    That is 16 times in the first 100 s, while somebody is likely to look, and twice a minute from the fourth minute on. Where
    that is too often for a training of months, each further pause is 0.5 % longer, and so 0.5 % of the time that has passed.

    Args:
        clock: Returns the time in seconds.
        delay_s: How long to wait before the first time.
        longest_s: The longest pause.

    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, delay_s: float = 0.0, longest_s: float = LONGEST_PAUSE_S
    ) -> None:
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._due_s = clock() + delay_s
        self._longest_s = longest_s

    def wait_s(self) -> float:
        """Return the seconds until it is due; 0 if it is due now."""
        return max(0.0, self._due_s - self._clock())

    def record(self) -> None:
        """Record that it happened; a failure counts too."""
        self._due_s = self._clock() + self._pause_s
        growth = _GROWTH if self._pause_s < LONGEST_PAUSE_S else _SLOW_GROWTH
        self._pause_s = min(self._pause_s * growth, self._longest_s)
