"""How often a training may checkpoint for a share of its time."""

import threading
import time
from collections.abc import Callable


class OverheadBudget:
    """Says when the next checkpoint is due, from what the last one cost.

    Args:
        target_overhead: Which share of the training's time checkpoints may hold it up; None for never due.
        clock: Seconds that only grow.

    """

    def __init__(self, target_overhead: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._target_overhead = target_overhead
        self._clock = clock
        self._lock = threading.Lock()  # a commit in the background ends in another thread
        self._begun_s = -float("inf")
        self._pause_s = 0.0
        self._under_way = 0

    def begin(self) -> None:
        """Record that a checkpoint is being reported."""
        with self._lock:
            self._begun_s = self._clock()
            self._under_way += 1

    def end(self, stall_s: float | None = None) -> None:
        """Record that the checkpoint has ended.

        Args:
            stall_s: For how long it held the training up; None where it failed, which tells nothing.

        """
        with self._lock:
            self._under_way -= 1
            if stall_s is not None and self._target_overhead is not None:
                self._pause_s = stall_s / self._target_overhead

    def is_due(self) -> bool:
        """Return whether another one would keep to the target; the first is due at once, to be measured."""
        if self._target_overhead is None:
            return False
        with self._lock:
            return self._under_way == 0 and self._clock() - self._begun_s >= self._pause_s
