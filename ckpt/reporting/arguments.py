"""The arguments of a report, checked in the caller's stack before anything happens."""

import operator
from collections.abc import Mapping
from typing import Any, Literal, SupportsIndex, TypeAlias

from prefect_torch.ckpt.runs.manifest import MAX_STEP

Upload: TypeAlias = Literal["sync", "async"]


def check_step(step: SupportsIndex | None, *, following: int, newest: int | None) -> int:
    """Return the step of a report.

    Args:
        step: The user's argument; None counts on.
        following: The step that comes next.
        newest: The step of the newest checkpoint, which the step of a new one may repeat but not go below; None for a
            report without a checkpoint.

    Raises:
        ValueError: If `step` is invalid.

    """
    if isinstance(step, bool):
        raise ValueError("step must be a whole number, not a bool")  # noqa: TRY004 - one error for a bad step
    try:
        chosen = following if step is None else operator.index(step)
    except TypeError as exc:
        raise ValueError(f"step={step!r}: give a whole number") from exc
    if not 0 <= chosen <= MAX_STEP:
        raise ValueError(f"step={chosen}: give a number from 0 to {MAX_STEP}")
    if newest is not None and chosen < newest:
        raise ValueError(
            f"step={chosen} comes before the last checkpoint's step {newest}; "
            "steps must grow from checkpoint to checkpoint, also after a resume"
        )
    return chosen


def check_upload(upload: Upload | None, checkpoint: object, state: Mapping[str, Any] | None) -> Upload | None:
    """Return the upload mode of a report; None where there is nothing to store.

    Raises:
        ValueError: If `upload` is no such mode.

    """
    if upload not in (None, "sync", "async"):
        raise ValueError(f"upload={upload!r}: give 'sync' or 'async'")
    if checkpoint is None and state is None:
        return None
    return upload or ("sync" if state is None else "async")


def check_progress(progress: float | None) -> None:
    """Raise unless `progress` is a share from 0 to 1, or None.

    Raises:
        ValueError: If it is anything else.

    """
    if progress is not None and not (isinstance(progress, (int, float)) and 0 <= progress <= 1):
        raise ValueError(f"progress={progress!r}: give a share of the training from 0 to 1")
