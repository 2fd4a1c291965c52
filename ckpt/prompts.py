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
        self.asked = 0  # how often
        self._forgotten = 0
        self._reports = 0

    def ask(self) -> bool:
        """Return what rank 0 says in its call of the same number; on the others this waits for it.

        Raises:
            ReportMismatchError: If rank 0 reports instead of asking.

        """
        topic = _topic(self.asked)
        self.asked += 1
        if self._peers.rank != 0:
            return self._peers.decision(topic, unless=_report(self._reports)) == b"yes"
        is_due = self._ends_soon() or self._pace.is_due()
        self._peers.decide(topic, b"yes" if is_due else b"no")
        return is_due

    def begin_report(self) -> None:
        """As rank 0, tell who waits for an answer that none will come before this report."""
        if self._peers.rank == 0:
            self._peers.decide(_report(self._reports), b"")

    def end_report(self) -> None:
        """Drop the answers so far, which every rank has read, since all have come to this report."""
        if self._peers.rank == 0 and self._peers.world_size > 1:
            self._peers.forget(_report(self._reports))
            for number in range(self._forgotten, self.asked):
                self._peers.forget(_topic(number))
        self._forgotten = self.asked
        self._reports += 1


def _report(number: int) -> str:
    return f"no answer before report {number}"


def _topic(number: int) -> str:
    return f"checkpoint now {number}"
