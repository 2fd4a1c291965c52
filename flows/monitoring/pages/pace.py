"""How often a page is published: often at first, when somebody looks, and ever more seldom."""

import time
from collections.abc import Callable

FIRST_S = 2.0
LONGEST_S = 30.0
GROWTH = 1.15


class Pace:
    """Bounds how often something is done: every pause is longer than the one before, up to `longest_s`.

    With the defaults that is 16 times in the first 100 s, and twice a minute from the fourth minute on.

    Args:
        first_s: The first pause.
        longest_s: What pauses grow to.
        growth: By what factor.
        clock: What tells the time, in seconds.

    """

    def __init__(
        self,
        first_s: float = FIRST_S,
        longest_s: float = LONGEST_S,
        growth: float = GROWTH,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pause_s = first_s
        self._longest_s = longest_s
        self._growth = growth
        self._clock = clock
        self._due_s = clock()

    def wait_s(self) -> float:
        """Return in how many seconds it is due; 0 when it is."""
        return max(0.0, self._due_s - self._clock())

    def take(self) -> None:
        """Take note that it is done now; a try that fails counts, too."""
        self._due_s = self._clock() + self._pause_s
        self._pause_s = min(self._pause_s * self._growth, self._longest_s)
