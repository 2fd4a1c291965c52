"""Limits of a prune beside a training; a training's own prunes know these limits themselves."""

from dataclasses import dataclass

from .attempts import Attempt, read_outcome
from .history import newest_recorded
from .run import Run


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


def prune_limits(run: Run, attempt: Attempt | None) -> PruneLimits:
    """Return the limits of a prune by a process other than the leader of `attempt`, the newest of the run.

    An attempt without an outcome is running, or its leader was killed, and then the next leader stores the reports that it left
    unstored. Costs a small read; without an outcome, a listing and a read of the metric history in addition.
    """
    if attempt is None or read_outcome(run, attempt.number) is not None:
        return PruneLimits()
    return PruneLimits(() if attempt.restored_id is None else (attempt.restored_id,), newest_recorded(run))
