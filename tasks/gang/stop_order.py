"""The order to stop the ranks of a gang, which reaches the threads that supervise them without a request to a store."""

import threading
from collections.abc import Callable


class StopOrder:
    """Whether the ranks of a gang are to be stopped.

    Attributes:
        reason: The first reason that was given; None while they are not to be stopped.
        wants_stack_traces: Whether they print their stack traces before they are stopped.

    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.wants_stack_traces = False
        self._giving = threading.Lock()
        self._wakes: list[Callable[[], None]] = []

    def give(self, reason: str, *, wants_stack_traces: bool = False) -> None:
        """Order the ranks to stop, and wake the threads that wait for their output."""
        with self._giving:
            if self.reason is None:
                self.wants_stack_traces, self.reason = wants_stack_traces, reason
            wakes = tuple(self._wakes)
        for wake in wakes:
            wake()

    def follow(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when the order is given; immediately if it was given before."""
        with self._giving:
            self._wakes.append(wake)
            is_given = self.reason is not None
        if is_given:
            wake()
