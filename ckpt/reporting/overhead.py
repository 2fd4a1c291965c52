"""The checkpoint interval that keeps to a share of the training's time."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class CommitCosts:
    """The costs of a rank's commits for its training.

    The training's thread begins them, and one thread at a time ends them.

    Attributes:
        num_begun: How many were begun.
        num_ended: How many have ended.
        begun_s: When the newest one was begun, by a monotonic clock.
        stall_s: How long the training waited for the newest one that is durable.

    """

    num_begun: int = 0
    num_ended: int = 0
    begun_s: float = -float("inf")
    stall_s: float = 0.0


class OverheadBudget:
    """An overhead budget: the cost of the last checkpoint determines when the next one is due.

    Args:
        target_overhead: The share of the training's time that it may wait for checkpoints; None means never due.
        costs: The costs of the commits so far.
        clock: The monotonic clock of `costs`, in seconds.

    """

    def __init__(self, target_overhead: float | None, costs: CommitCosts, clock: Callable[[], float] = time.monotonic) -> None:
        self._target_overhead = target_overhead
        self._costs = costs
        self._clock = clock

    def is_due(self) -> bool:
        """Return whether another checkpoint would keep to the target; the first is due immediately, to be measured."""
        if self._target_overhead is None or self._costs.num_ended < self._costs.num_begun:
            return False
        return self._clock() - self._costs.begun_s >= self._costs.stall_s / self._target_overhead
