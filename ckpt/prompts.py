"""When a training is asked for a checkpoint: decided by rank 0, told to all, call by call."""

from collections.abc import Callable

from .pace import CheckpointPace
from .peers import Peers


class CheckpointPrompts:
    """The answers to `TrainContext.should_checkpoint` on one rank; the n-th is the same on all.

    Args:
        peers: The ranks.
        pace: When the next one is due.
        ends_soon: Says whether the training is about to be ended from outside.

    """

    def __init__(self, peers: Peers, pace: CheckpointPace, ends_soon: Callable[[], bool]) -> None:
        self._peers = peers
        self._pace = pace
        self._ends_soon = ends_soon
        self._asked = 0
        self._forgotten = 0

    def ask(self) -> bool:
        """Return what rank 0 says in its call of the same number; on the others this waits for it."""
        topic = _topic(self._asked)
        self._asked += 1
        if self._peers.rank != 0:
            return self._peers.decision(topic) == b"yes"
        is_due = self._ends_soon() or self._pace.is_due()
        self._peers.decide(topic, b"yes" if is_due else b"no")
        return is_due

    def forget(self) -> None:
        """Drop the answers so far, which every rank has read that has come as far as this one."""
        if self._peers.rank == 0 and self._peers.world_size > 1:
            for number in range(self._forgotten, self._asked):
                self._peers.forget(_topic(number))
        self._forgotten = self._asked


def _topic(number: int) -> str:
    return f"checkpoint now {number}"
