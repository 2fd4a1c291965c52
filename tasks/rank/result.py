"""What a rank's process says last to the task that supervises it."""

from dataclasses import dataclass

from .failures import RankFailureKind


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank says last.

    Attributes:
        return_value: What its function returned, pickled; None if it failed, or if that cannot travel.
        kind: How it failed, or None.
        error: The error in one line.
        traceback: The rank's own.
        exception: The exception, pickled, where it can travel.

    """

    return_value: bytes | None = None
    kind: RankFailureKind | None = None
    error: str = ""
    traceback: str = ""
    exception: bytes | None = None
