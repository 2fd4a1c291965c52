"""The checkpoints that a prune keeps whatever a policy decides, since the newest attempt may need them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from prefect_torch.ckpt.runs.attempts.begun import has_begun
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus, read_status
from prefect_torch.ckpt.runs.history import newest_recorded
from prefect_torch.ckpt.runs.run import Run


@dataclass(frozen=True, slots=True)
class PruneLimits:
    """Checkpoints that may not be deleted, whatever a policy decides.

    Attributes:
        in_use: The ids that ranks restore.
        up_to: The newest checkpoint whose report is in the metric history: of a newer one, the manifest is the only record.
            None sets no such limit.
        claim: The key of the claim of the attempt that prunes, which deletes nothing once it is overtaken; None for another
            process.
        own_metric: The metric of the run's own policy, which its checkpoints may lack: they may await their evaluation.

    """

    in_use: tuple[str, ...] = ()
    up_to: str | None = None
    claim: str | None = None
    own_metric: str | None = None

    def narrowed(self, in_use: Iterable[str], up_to: str | None) -> "PruneLimits":
        """Return limits that keep the checkpoints `in_use`, and those newer than `up_to`, in addition."""
        up_to = min((it for it in (self.up_to, up_to) if it is not None), default=None)
        return replace(self, in_use=(*self.in_use, *in_use), up_to=up_to)


def prune_limits(run: Run, status: AttemptStatus | None) -> PruneLimits:
    """Return the limits of a prune by a process other than the leader of the newest attempt; a leader knows its own.

    An attempt without an outcome is running, or its leader was killed; then the next leader stores the reports that it left
    unstored. A newer attempt whose claim cannot be read may be that leader. An attempt that has ended before its work was done
    may have failed to store its last reports; of one whose work is done, the outcome says so. Costs nothing after a completed
    attempt that has stored them, else a listing and a read of the metric history. If a run has checkpoints but no attempt, its
    claims are listed again: the first listing may have been a gateway's empty page.
    """
    if status is None and has_begun(run):
        status = read_status(run)
    if status is None:
        return PruneLimits()
    own_metric = status.attempt.policy.checkpoint_score_attribute
    if status.has_all_reports and not status.has_unreadable_successor:
        return PruneLimits(own_metric=own_metric)
    restored = status.attempt.restored_id if status.outcome is None else None
    return PruneLimits(() if restored is None else (restored,), newest_recorded(run), own_metric=own_metric)
