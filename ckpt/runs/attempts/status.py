"""The status of a run: its newest attempt, how that ended, whether its process is gone; and what a prune therefore keeps."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from prefect_torch.ckpt.runs.history import newest_recorded
from prefect_torch.ckpt.runs.run import Run

from .attempt import Attempt, EndState, Outcome, newest_claims, read_outcome

State: TypeAlias = EndState | Literal["running", "lost", "unknown"]


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """The state of an attempt as its records and its machine show it; only Prefect knows more of its flow run.

    Attributes:
        attempt: The attempt.
        outcome: Its recorded outcome; None while it runs, or if its leader was killed.
        is_newest: Whether no newer claim lies there that cannot be read.

    """

    attempt: Attempt
    outcome: Outcome | None
    is_newest: bool = True

    @property
    def is_process_gone(self) -> bool | None:
        """Whether the leader's process is gone; None if it is on another machine or in another container."""
        return self.attempt.owner.is_process_gone()

    @property
    def state(self) -> State:
        """The recorded end, else "running", "lost" (its process is gone) or "unknown" (its process is elsewhere)."""
        if self.outcome is not None:
            return self.outcome.state
        is_gone = self.is_process_gone
        return "unknown" if is_gone is None else "lost" if is_gone else "running"

    @property
    def is_completed(self) -> bool:
        """Whether the attempt completed."""
        return self.outcome is not None and self.outcome.ending == "completed"

    @property
    def is_done(self) -> bool:
        """Whether the attempt completed, or was stopped by a decision: then all of its reports are stored."""
        return self.outcome is not None and self.outcome.is_done

    @property
    def may_be_alive(self) -> bool:
        """Whether the attempt may be under way, for all that its records and its machine show."""
        return self.state in ("running", "unknown")


def read_status(run: Run) -> AttemptStatus | None:
    """Return the status of the newest attempt, or None before the first; a listing and two small reads.

    Raises:
        UnsupportedFormatError: If a newer version made the attempt.

    """
    readable, newer = newest_claims(run)
    return replace(status_of(run, readable[0]), is_newest=not newer) if readable else None


def status_of(run: Run, attempt: Attempt) -> AttemptStatus:
    """Return the status of `attempt`; one small read."""
    return AttemptStatus(attempt, read_outcome(run, attempt.number))


@dataclass(frozen=True, slots=True)
class PruneLimits:
    """Checkpoints that may not be deleted, whatever a policy decides.

    Attributes:
        in_use: The ids that ranks restore.
        up_to: The newest checkpoint whose report is in the metric history: of a newer one, the manifest is the only record.
            None for no such limit.

    """

    in_use: tuple[str, ...] = ()
    up_to: str | None = None


def prune_limits(run: Run, status: AttemptStatus | None) -> PruneLimits:
    """Return the limits of a prune by a process other than the leader of the newest attempt; a leader knows its own.

    An attempt without an outcome is running, or its leader was killed, and then the next leader stores the reports that it left
    unstored. So does a newer attempt whose claim cannot be read. One that has ended before its work was done may have failed to
    store its last reports. Costs nothing after a completed attempt, else a listing and a read of the metric history.
    """
    if status is None or (status.is_done and status.is_newest):
        return PruneLimits()
    restored = status.attempt.restored_id if status.outcome is None else None
    return PruneLimits(() if restored is None else (restored,), newest_recorded(run))
