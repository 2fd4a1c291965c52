"""How a run stands: what its newest attempt recorded, else whether the process that leads it is there."""

from typing import Literal, TypeAlias, cast

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts import Attempt, Owner, read_outcome

State: TypeAlias = Literal["completed", "failed", "preempted", "cancelled", "running", "lost", "unknown"]
STYLES = {"completed": "green", "failed": "red", "lost": "red", "preempted": "yellow", "cancelled": "yellow"}


def state_of(owner: Owner, ending: str | None) -> State:
    """Return the state of an attempt that `owner` leads and that recorded `ending`, or could not."""
    if ending in ("completed", "failed", "preempted", "cancelled"):
        return cast("State", ending)
    dead = owner.is_dead()
    return "unknown" if dead is None else "lost" if dead else "running"


def ending_of(store: CheckpointStore, attempt: int) -> str | None:
    """Return the ending that an attempt recorded, by one small read; None if it runs, or its leader was killed."""
    outcome = read_outcome(store, attempt)
    return None if outcome is None else outcome.ending


def restored_by(store: CheckpointStore, attempt: Attempt | None) -> tuple[str, ...]:
    """Return the id of the checkpoint that a living attempt restores, which nobody may delete."""
    if attempt is None or attempt.restored_id is None:
        return ()
    if state_of(attempt.owner, ending_of(store, attempt.number)) not in ("running", "unknown"):
        return ()
    return (attempt.restored_id,)
