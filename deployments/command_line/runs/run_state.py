"""The state of a run: the recorded outcome of its newest attempt, else whether its leading process is alive."""

from typing import Literal, TypeAlias, cast

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts import Owner, read_outcome

State: TypeAlias = Literal["completed", "failed", "preempted", "cancelled", "running", "lost", "unknown"]
STYLES = {"completed": "green", "failed": "red", "lost": "red", "preempted": "yellow", "cancelled": "yellow"}


def state_of(owner: Owner, ending: str | None) -> State:
    """Return the state of an attempt led by `owner`, with `ending` as recorded, or None without a record."""
    if ending in ("completed", "failed", "preempted", "cancelled"):
        return cast("State", ending)
    dead = owner.is_dead()
    return "unknown" if dead is None else "lost" if dead else "running"


def ending_of(store: CheckpointStore, attempt: int) -> str | None:
    """Return the recorded ending of an attempt, by one small read; None if it is running, or its leader was killed."""
    outcome = read_outcome(store, attempt)
    return None if outcome is None else outcome.ending
