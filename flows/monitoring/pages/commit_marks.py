"""The report times of an attempt's checkpoints and their stalls, in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass

_MAX_MARKS = 2000  # each checkpoint of all but the longest attempts; 0.4 MB
_RECENT = 100  # their report or commit may be still to come


@dataclass(slots=True)
class CommitMark:
    """A checkpoint, or several consecutive ones.

    Attributes:
        first: The oldest id.
        newest: The newest id.
        reported_s: The time of the newest report, in seconds since the epoch; None before.
        num_reported: The number of reported checkpoints.
        num_timed: The number of checkpoints whose stall is known.
        stall_s: The sum of their stalls in seconds.

    """

    first: str
    newest: str
    reported_s: float | None = None
    num_reported: int = 0
    num_timed: int = 0
    stall_s: float = 0.0

    def merged(self, later: "CommitMark") -> "CommitMark":
        """Return one mark for this one and a later one."""
        return CommitMark(
            self.first,
            later.newest,
            self.reported_s if later.reported_s is None else later.reported_s,
            self.num_reported + later.num_reported,
            self.num_timed + later.num_timed,
            self.stall_s + later.stall_s,
        )


class CommitMarks:
    """The checkpoints of one attempt, oldest first: a mark each up to 2,000, beyond that one mark for several older ones."""

    def __init__(self) -> None:
        self._marks: dict[str, CommitMark] = {}

    def __iter__(self) -> Iterator[CommitMark]:
        return iter([self._marks[key] for key in sorted(self._marks)])

    def __contains__(self, checkpoint_id: str) -> bool:
        return checkpoint_id in self._marks or any(mark.first <= checkpoint_id < mark.newest for mark in self._marks.values())

    def record_report(self, checkpoint_id: str, at_s: float) -> None:
        """Record a checkpoint's report, before or after its commit."""
        mark = self._mark(checkpoint_id)
        mark.reported_s = at_s
        mark.num_reported += 1

    def record_commit(self, checkpoint_id: str, stall_s: float) -> None:
        """Record for how many seconds a checkpoint stalled the training."""
        mark = self._mark(checkpoint_id)
        mark.num_timed += 1
        mark.stall_s += stall_s

    def _mark(self, checkpoint_id: str) -> CommitMark:
        if checkpoint_id not in self._marks:
            if len(self._marks) >= _MAX_MARKS:
                self._thin()
            self._marks[checkpoint_id] = CommitMark(checkpoint_id, checkpoint_id)
        return self._marks[checkpoint_id]

    def _thin(self) -> None:
        marks = list(self)
        older, recent = marks[:-_RECENT], marks[-_RECENT:]
        pairs = [first.merged(second) for first, second in zip(older[::2], older[1::2], strict=False)]
        odd = older[len(pairs) * 2 :]
        self._marks = {mark.newest: mark for mark in (*pairs, *odd, *recent)}
