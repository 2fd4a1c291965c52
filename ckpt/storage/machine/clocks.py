"""The clocks of this machine."""

import time


class Stopwatch:
    """The time since it was made, by the clock that went on: while a machine sleeps, the monotonic one stands still."""

    def __init__(self) -> None:
        self._monotonic_s, self._wall_s = time.monotonic(), time.time()

    @property
    def elapsed_s(self) -> float:
        """The seconds since it was made; more if the clock was set forward meanwhile."""
        return max(time.monotonic() - self._monotonic_s, time.time() - self._wall_s)
