"""The kind of a failure, its budget, and which of several failures caused the others.

The only module that classifies errors and exit statuses, both in a rank and in the process that leads the training. It imports
neither prefect nor torch.
"""

import re
import signal
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor
from itertools import chain
from pathlib import Path
from traceback import walk_tb
from typing import TypeGuard

from prefect_torch.ckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitFailedError,
    FencedError,
    PeerGoneError,
    ReportMismatchError,
    ReportWithdrawnError,
    StateMismatchError,
    StorageError,
    StorageFullError,
    UnsupportedFormatError,
)
from prefect_torch.ckpt.errors import PAGE_OF_PROXY, is_of_full_disk
from prefect_torch.ckpt.runs.attempts.attempt import FailureKind

from .errors import NotEnoughMachinesError, RankFailedError, RankFailureKind, StorageNotSeenError

# From the most probable cause to the surest consequence of another failure, each with the budget that it counts against.
_BUDGETS: dict[RankFailureKind, FailureKind] = {
    "final": "final",
    "out_of_memory": "out_of_memory",
    "user": "user",
    "preemption": "preemption",
    "unprepared": "infrastructure",
    "infrastructure": "infrastructure",
    "withdrawn": "user",  # the rank that withdrew has caught its own error
    "communication": "infrastructure",
    "peer": "infrastructure",
}
CONSEQUENCES: tuple[RankFailureKind, ...] = ("withdrawn", "communication", "peer")  # of another rank's failure
_MOST_SPECIFIC_FIRST: tuple[tuple[type[BaseException], RankFailureKind], ...] = (
    (PeerGoneError, "peer"),
    (ReportWithdrawnError, "withdrawn"),
    (FencedError, "final"),
    (ReportMismatchError, "final"),
    (StateMismatchError, "final"),
    (UnsupportedFormatError, "final"),
    (StorageNotSeenError, "final"),
    (StorageFullError, "user"),  # a disk is as full a second later, so only restarts that a user asks for
    (CheckpointNotFoundError, "user"),
    (CheckpointError, "infrastructure"),
    (MemoryError, "out_of_memory"),
)
# By name: a process that has such an error has imported its library, and this module must not.
_OF_TORCH: dict[str, RankFailureKind] = {
    "torch.OutOfMemoryError": "out_of_memory",
    "torch.cuda.OutOfMemoryError": "out_of_memory",
    "torch.distributed.DistError": "communication",
}
# Errors of a CUDA runtime call, by the code that torch.AcceleratorError has, and by the text that a RuntimeError of older
# versions begins with (driver_types.h). A device-side assertion (710) and an illegal access (700) are the function's.
_OF_CUDA: dict[int, tuple[str, RankFailureKind]] = {
    2: ("out of memory", "out_of_memory"),
    46: ("CUDA-capable device(s) is/are busy or unavailable", "infrastructure"),
    100: ("no CUDA-capable device is detected", "infrastructure"),
    214: ("uncorrectable ECC error encountered", "infrastructure"),
    220: ("uncorrectable NVLink error detected during the execution", "infrastructure"),
    226: ("Invalid access of peer GPU memory over nvlink or a hardware error", "infrastructure"),
    802: ("system not yet initialized", "infrastructure"),
}
_CUDA_ERROR = "CUDA error: "
_NO_THREAD = "can't start new thread"  # of CPython; such a limit may be reached for a moment only
_OF_PREFECT = "httpx.HTTPError"
# Gloo throws a plain RuntimeError whose text begins with the location in its source, or with what torch was about to do: to
# connect a group, to pass a monitored barrier, of which TORCH_DISTRIBUTED_DEBUG=DETAIL puts one before each collective. It may
# be raised anywhere: in a collective, in work.wait() of the user, in the backward pass of DDP. The location in TensorPipe, of
# torch.distributed.rpc, is at the end; torch puts the number of the error before the words of a call that took too long.
_OF_LOST_CONNECTION = re.compile(
    r"(?:Gloo connectFullMesh failed with )?\[\S*\bgloo/\S+\.(?:cc|h):\d+\] "
    r"|(?:\[Rank \d+\]: )?Ranks? [\d, ]+ (?:failed to pass|timed out in|successfully reached) monitoredBarrier\b"
    r"|ProcessGroupWrapper: Monitored Barrier encountered error "
    r"|Application timeout caused pair closure$"
    r"|[^\n]* \(this error originated at tensorpipe/"
    r"|RPCErr:1:"
)


def is_kind(name: object) -> TypeGuard[RankFailureKind]:
    """Return whether `name` is a kind of failure."""
    return name in _BUDGETS


def of_exception(
    error: BaseException,
    *,
    rank: int | None = None,
    in_function: bool = True,
    oom_killed: bool = False,
    is_gpu_shared: bool = False,
) -> RankFailureKind:
    """Return the kind of a rank's failure by an exception.

    Args:
        error: The exception.
        rank: The rank: others may be the cause of a failed commit, and their machines.
        in_function: Whether the user's function was running. Before that, "user" becomes "infrastructure".
        oom_killed: Whether the kernel has killed a process for lack of memory meanwhile, such as a data loader's worker.
        is_gpu_shared: Whether others hold memory of the GPU; a lack of memory then says nothing about the function.

    """
    if isinstance(error, SystemExit) and error.__context__ is not None:  # `sys.exit(1)` where the function has caught the error
        error = error.__context__
    kind = _of_error(error, oom_killed=oom_killed)
    if kind == "user":  # of whatever class, it may be what the function made of another error
        kind = _of_cause(error, oom_killed=oom_killed) or kind
    if kind == "infrastructure" and isinstance(error, CommitFailedError) and error.ranks and rank not in (None, *error.ranks):
        return "peer"
    if kind == "out_of_memory" and is_gpu_shared and not isinstance(error, MemoryError):
        return "infrastructure"
    return "infrastructure" if kind == "user" and not in_function else kind


def of_start(error: BaseException, *, resumes: bool, num_machines: int) -> RankFailureKind:
    """Return the kind of an error before the function runs that a rank on this machine would meet again.

    Args:
        error: The error.
        resumes: Whether the attempt resumes from a checkpoint of its run: earlier ranks have come further.
        num_machines: How many machines of a cluster the attempt has; 0 for this one without a cluster.

    """
    may_be_machines = num_machines > 1 or (num_machines == 1 and isinstance(error, StorageNotSeenError))
    return "unprepared" if resumes and may_be_machines else "final"


def is_of_gpu(error: BaseException | None) -> bool:
    """Return whether the driver raised `error` because of the GPU itself, such as a broken one: another may work."""
    return error is not None and _of_cuda(error) == "infrastructure"


def of_returncode(returncode: int | None, *, oom_killed: bool) -> RankFailureKind:
    """Return the kind of a rank's failure by the exit status of its process, which left no result.

    Args:
        returncode: The exit code, negative for the signal that killed it; None when even its guard was killed.
        oom_killed: Whether the kernel has killed a process for lack of memory while it ran.

    """
    if returncode == -signal.SIGTERM:
        return "preemption"
    if returncode == 0:  # not from the kernel or a crash but from code, which would do it again
        return "user"
    return "out_of_memory" if oom_killed and returncode in (None, -signal.SIGKILL) else "infrastructure"


def hint_at_death(returncode: int | None, *, oom_killed: bool | None) -> str:
    """Return what probably ended a process that left no result, to be appended to its exit status; "" if that is unknown.

    Args:
        returncode: The exit code, negative for the signal that killed it; None when even its guard was killed.
        oom_killed: Whether the kernel has killed a process for lack of memory while it ran; None if unknown.

    """
    if of_returncode(returncode, oom_killed=bool(oom_killed)) == "out_of_memory":
        return "; the kernel has killed for lack of memory meanwhile, so the machine, or its container, has too little"
    if returncode == -signal.SIGKILL and oom_killed is None:
        return "; if nobody sent it, the machine ran out of memory"
    if returncode == 0:
        return "; os._exit(), or the exit() of a library, ends a rank before its result is known: let the function return"
    if returncode == -signal.SIGABRT:
        return "; the lines above say why, such as NCCL's, which aborts a process whose collective timed out"
    if returncode == -signal.SIGBUS:
        return "; probably /dev/shm, or a disk with a mapped file, is full"
    return ""


def counts_against(error: BaseException) -> FailureKind:
    """Return the budget that the error which ended an attempt counts against; "final" has none.

    Args:
        error: The failure of a rank, an exception raised from one, or an error of the process that leads the attempt.

    """
    failed = error if isinstance(error, RankFailedError) else error.__cause__
    if isinstance(failed, RankFailedError):
        return _BUDGETS[failed.kind]
    if isinstance(error, (StorageError, NotEnoughMachinesError, *PAGE_OF_PROXY)) or _OF_PREFECT in _type_names(error):
        return "infrastructure"
    if isinstance(error, StorageFullError) or is_of_full_disk(error):
        return "user"
    if type(error) is RuntimeError and str(error) == _NO_THREAD:
        return "infrastructure"
    kind = of_exception(error)
    if kind == "out_of_memory":
        return kind
    return "infrastructure" if kind == "communication" else "final"


def cause_first(failures: Iterable[BaseException]) -> list[BaseException]:
    """Return failures of one attempt, the most probable cause first; those that are no rank's own failure come last."""
    order = list(_BUDGETS)
    return sorted(failures, key=lambda it: order.index(it.kind) if isinstance(it, RankFailedError) else len(order))


def cause_of(failures: Iterable[BaseException]) -> BaseException:
    """Return the most probable cause of failures of one attempt; as `others`, it has those that it did not cause."""
    first, *rest = cause_first(failures)
    if isinstance(first, RankFailedError):
        known = [first.others, *((it, *it.others) for it in rest if isinstance(it, RankFailedError))]
        first.others = tuple(it for it in chain(*known) if it.rank is not None and it.kind not in CONSEQUENCES)
    return first


def _of_error(error: BaseException, *, oom_killed: bool) -> RankFailureKind:
    for error_type, kind in _MOST_SPECIFIC_FIRST:
        if isinstance(error, error_type):
            return kind
    for name in _type_names(error):
        if name in _OF_TORCH:
            return _OF_TORCH[name]
    if (of_cuda := _of_cuda(error)) is not None:
        return of_cuda
    if type(error) is RuntimeError and _OF_LOST_CONNECTION.match(str(error)):
        return "communication"
    if oom_killed and _is_of_killed_worker(error):
        return "out_of_memory"
    return "user"


def _of_cause(error: BaseException, *, oom_killed: bool) -> RankFailureKind | None:
    """Return the kind of what `error` was raised from, or because of, if that is a consequence of another rank's failure."""
    raised = [error]
    while (cause := _raised_after(raised[-1])) is not None and all(cause is not it for it in raised):
        kind = _of_error(cause, oom_killed=oom_killed)
        if kind in CONSEQUENCES:
            return kind
        raised.append(cause)
    return None


def _raised_after(error: BaseException) -> BaseException | None:
    """Return what a traceback of `error` shows above it."""
    return error.__cause__ if error.__suppress_context__ else error.__context__


def _of_cuda(error: BaseException) -> RankFailureKind | None:
    if type(error) is RuntimeError or "torch.AcceleratorError" in _type_names(error):
        for code, (text, kind) in _OF_CUDA.items():
            if getattr(error, "error_code", None) == code or str(error).startswith(f"{_CUDA_ERROR}{text}"):
                return kind
    return None


def _type_names(error: BaseException) -> list[str]:
    return [f"{ancestor.__module__}.{ancestor.__qualname__}" for ancestor in type(error).__mro__]


def _is_of_killed_worker(error: BaseException) -> bool:
    """Return whether torch's data loaders, or a pool of processes, raise this when a worker is killed."""
    if isinstance(error, BrokenExecutor):
        return True
    raised_in = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, RuntimeError) and bool(raised_in) and "/torch/utils/data/" in Path(raised_in[-1]).as_posix()
