"""The errors of a training, as the process that leads it sees them, and the kinds of a rank's failure."""

import copy
import copyreg
from typing import Literal, TypeAlias

from prefect_torch.ckpt.runs.attempts.attempt import FailureKind

# The last three are consequences of another rank's failure, which says more.
RankFailureKind: TypeAlias = FailureKind | Literal["unprepared", "withdrawn", "communication", "peer"]


class RankFailedError(RuntimeError):
    """A rank's function raised, or its process died; the text is one line.

    Attributes:
        rank: Its number; None when all hang.
        kind: "user": the function raised. "infrastructure": the process died, or the storage failed. "out_of_memory": the
            GPU's memory or the machine's did not suffice. "preemption": the process was terminated (SIGTERM). "final": trying
            again cannot help. "unprepared": the machine lacks what the ranks of earlier attempts had, such as the storage.
            "withdrawn", "communication" and "peer": the consequence of another rank's failure.
        original: The exception of the rank, where this process could rebuild it.
        traceback: The rank's own traceback, of the training function's frames; empty if its process died.
        was_killed: Whether SIGKILL ended its process, which another rank's failure does not cause.
        others: The failures of other ranks of the attempt that this one did not cause, as far as they became known.

    """

    def __init__(
        self,
        message: str,
        rank: int | None,
        kind: RankFailureKind,
        original: Exception | None = None,
        traceback: str = "",
        *,
        was_killed: bool = False,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind: RankFailureKind = kind
        self.original = original
        self.traceback = traceback
        self.was_killed = was_killed
        self.others: tuple[RankFailedError, ...] = ()

    def __reduce__(self) -> tuple[type, tuple[object, ...], dict[str, object]]:
        original = self.original
        # With Dask in the process, tblib pickles exceptions of other types with their causes: an endless cycle.
        if original is not None and original.__cause__ is self and type(original) in copyreg.dispatch_table:
            original = copy.copy(original)
            original.__cause__ = original.__context__ = None
        state: dict[str, object] = {"was_killed": self.was_killed, "others": self.others}
        return type(self), (str(self), self.rank, self.kind, original, self.traceback), state


def show_traceback(error: RankFailedError) -> str:
    """Return which rank failed, and its traceback, which ends with the message; nothing if the error has no traceback."""
    which, _, _ = str(error).partition(": ")
    return f"{which}:\n{error.traceback.rstrip()}" if error.traceback else ""


class RestartsUsedUpError(RuntimeError):
    """A flow run was started again, and a budget of its `FailureConfig` was used up before."""


class StorageNotSeenError(RuntimeError):
    """A rank's machine sees another storage than the flow's process, or that of a trial another one than its sweep."""


class NotEnoughMachinesError(RuntimeError):
    """A cluster has room for fewer ranks than an attempt needs; another attempt may find more."""
