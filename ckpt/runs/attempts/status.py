"""The status of a run: its newest attempt, how that ended, and whether its process is gone."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from prefect_torch.ckpt.runs.run import Run

from .attempt import Attempt, EndState, Outcome, newest_claims, read_outcome

State: TypeAlias = EndState | Literal["running", "lost", "unknown"]


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """The state of an attempt as its records and its machine show it; only Prefect knows more of its flow run.

    Attributes:
        attempt: The attempt.
        outcome: Its recorded outcome; None while it runs, or if its leader was killed.
        is_process_gone: Whether the leader's process is gone; None if it is on another machine or in another container. Of
            before `outcome` was read: a process that records its outcome and ends meanwhile would look as if it was killed.
        is_overtaken: Whether there is a newer attempt: this one commits nothing more, whether or not its process is gone.
        has_unreadable_successor: Whether there is a newer claim that cannot be read.

    """

    attempt: Attempt
    outcome: Outcome | None
    is_process_gone: bool | None
    is_overtaken: bool = False
    has_unreadable_successor: bool = False

    @property
    def state(self) -> State:
        """The recorded end, else "running", "lost" (overtaken, or its process gone) or "unknown" (its process elsewhere)."""
        if self.outcome is not None:
            return self.outcome.state
        if self.is_overtaken:
            return "lost"
        is_gone = self.is_process_gone
        return "unknown" if is_gone is None else "lost" if is_gone else "running"

    @property
    def is_completed(self) -> bool:
        """Whether the attempt completed."""
        return self.outcome is not None and self.outcome.ending == "completed"

    @property
    def is_done(self) -> bool:
        """Whether the attempt completed, or was stopped by a decision."""
        return self.outcome is not None and self.outcome.is_done

    @property
    def has_all_reports(self) -> bool:
        """Whether the attempt is done, and all of its reports are stored."""
        return self.outcome is not None and self.outcome.is_done and not self.outcome.lacks_reports

    @property
    def may_be_alive(self) -> bool:
        """Whether the attempt may be under way, as far as its records and its machine show."""
        return self.state in ("running", "unknown")


def read_status(run: Run) -> AttemptStatus | None:
    """Return the status of the newest attempt, or None before the first; a listing and two small reads.

    Raises:
        UnsupportedFormatError: If a newer version made the attempt.

    """
    readable, newer = newest_claims(run)
    return replace(status_of(run, readable[0]), has_unreadable_successor=bool(newer)) if readable else None


def status_of(run: Run, attempt: Attempt) -> AttemptStatus:
    """Return the status of `attempt`; one small read."""
    is_process_gone = attempt.owner.is_process_gone()
    return AttemptStatus(attempt, read_outcome(run, attempt.number), is_process_gone)
