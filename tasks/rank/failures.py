"""What an error, or the end of a process, counts as: the one place that knows, for ranks and for the process that leads them.

Imports neither prefect nor torch.
"""

import errno
import re
import signal
from concurrent.futures import BrokenExecutor
from pathlib import Path
from traceback import walk_tb
from typing import Literal, TypeAlias

from prefect_torch.ckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    FencedError,
    PeerGoneError,
    ReportMismatchError,
    StateMismatchError,
    StorageFullError,
    UnsupportedFormatError,
)
from prefect_torch.ckpt.attempts import FailureKind
from prefect_torch.ckpt.errors import ReportWithdrawnError

# The latter three are consequences of what another rank did; its own failure says more.
RankFailureKind: TypeAlias = FailureKind | Literal["withdrawn", "communication", "peer"]

_CAUSES_FIRST: tuple[RankFailureKind, ...] = (
    "final",
    "out_of_memory",
    "user",
    "preemption",
    "infrastructure",
    "withdrawn",
    "communication",
    "peer",
)
_COUNTS_AS: dict[RankFailureKind, FailureKind] = {
    "final": "final",
    "out_of_memory": "out_of_memory",
    "user": "user",
    "preemption": "preemption",
    "infrastructure": "infrastructure",
    "withdrawn": "user",  # the rank that withdrew has caught its own error
    "communication": "infrastructure",
    "peer": "infrastructure",
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_MOST_SPECIFIC_FIRST: tuple[tuple[type[BaseException], RankFailureKind], ...] = (
    (PeerGoneError, "peer"),
    (ReportWithdrawnError, "withdrawn"),
    (FencedError, "final"),
    (ReportMismatchError, "final"),
    (StateMismatchError, "final"),
    (UnsupportedFormatError, "final"),
    (StorageFullError, "user"),  # a full disk is as full a second later: restarts are for those who ask for them
    (CheckpointNotFoundError, "user"),
    (CheckpointError, "infrastructure"),
    (MemoryError, "out_of_memory"),
)
# By name, since whoever has such an error has imported torch, and nobody else should.
_OF_TORCH: dict[str, RankFailureKind] = {
    "torch.OutOfMemoryError": "out_of_memory",
    "torch.cuda.OutOfMemoryError": "out_of_memory",
    "torch.distributed.DistError": "communication",
}
# Gloo throws a plain RuntimeError whose text begins with the place in its source. Where it surfaces tells nothing: in a
# collective, in a user's own work.wait(), in DDP's backward pass.
_THROWN_BY_GLOO = re.compile(r"\[\S*\bgloo/\S+\.(?:cc|h):\d+\] ")


def of_exception(error: BaseException, *, oom_killed: bool = False) -> RankFailureKind:
    """Return what an exception in a rank counts as; "user" where nothing says otherwise.

    Args:
        error: What was raised.
        oom_killed: Whether the kernel has killed a process for lack of memory meanwhile, such as a data loader's worker.

    """
    for error_type, kind in _MOST_SPECIFIC_FIRST:
        if isinstance(error, error_type):
            return kind
    for ancestor in type(error).__mro__:
        if (of_torch := _OF_TORCH.get(f"{ancestor.__module__}.{ancestor.__qualname__}")) is not None:
            return of_torch
    if type(error) is RuntimeError and _THROWN_BY_GLOO.match(str(error)):
        return "communication"
    if oom_killed and _tells_of_a_lost_child(error):
        return "out_of_memory"
    return "user"


def of_returncode(returncode: int | None, *, oom_killed: bool) -> RankFailureKind:
    """Return what the end of a rank's process counts as that said nothing itself.

    Args:
        returncode: Its exit code, negative for the signal that killed it; None when even its guard was killed.
        oom_killed: Whether the kernel has killed a process for lack of memory while it ran.

    """
    if returncode == -signal.SIGTERM:
        return "preemption"
    return "out_of_memory" if oom_killed and returncode in (None, -signal.SIGKILL) else "infrastructure"


def counts_against(kind: RankFailureKind) -> FailureKind:
    """Return the budget that a rank's failure counts against; "final" has none."""
    return _COUNTS_AS[kind]


def cause_order(kind: RankFailureKind) -> int:
    """Return a number that is lower for what more probably caused the other failures."""
    return _CAUSES_FIRST.index(kind)


def is_full(error: BaseException) -> bool:
    """Return whether a disk or a quota is full."""
    return isinstance(error, StorageFullError) or (isinstance(error, OSError) and error.errno in _FULL)


def _tells_of_a_lost_child(error: BaseException) -> bool:
    """Return whether the error is how torch's data loaders, or a pool of processes, tell that a worker was killed."""
    if isinstance(error, BrokenExecutor):
        return True
    raised_in = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, RuntimeError) and bool(raised_in) and "/torch/utils/data/" in Path(raised_in[-1]).as_posix()
