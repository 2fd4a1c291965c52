"""The checkpoint interval that keeps to a share of the training's time."""

import threading
import time
from collections.abc import Callable


class OverheadBudget:
    """An overhead budget: the cost of the last checkpoint determines when the next one is due.

    Args:
        target_overhead: The share of the training's time that it may wait for checkpoints; None means never due.
        clock: A monotonic clock in seconds.

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
            stall_s: How long the training waited for it; None where it failed, which measures nothing.

        """
        with self._lock:
            self._under_way -= 1
            if stall_s is not None and self._target_overhead is not None:
                self._pause_s = stall_s / self._target_overhead

    def is_due(self) -> bool:
        """Return whether another checkpoint would keep to the target; the first is due immediately, to be measured."""
        if self._target_overhead is None:
            return False
        with self._lock:
            return self._under_way == 0 and self._clock() - self._begun_s >= self._pause_s
