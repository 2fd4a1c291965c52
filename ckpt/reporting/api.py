"""The functions that a training function calls."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsIndex

from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.context import TrainContext, refuse_in_fork, set_context, uncompiled
from prefect_torch.ckpt.state.staging import spare_memory

if TYPE_CHECKING:
    from prefect_torch.ckpt.storage.machine.handover import LentDirectories

    from .agreement import Upload
    from .session import RankSession  # half of the cost of an import of this package, and only ranks need it

P = ParamSpec("P")
_ARGUMENTS_OF_RAY = {
    "checkpoint_dir_name": "ids are made of attempt and step; write step=, and give a name to Checkpoint.set_metadata",
    "checkpoint_upload_fn": "a checkpoint is what report stores: leave it out",
    "checkpoint_upload_mode": 'write upload="sync" or upload="async"',
    "delete_local_checkpoint_after_upload": 'leave it out: upload="async" moves the files away, "sync" leaves them',
    "validation": "a flow of its own evaluates checkpoints: prefect_torch.flows.evaluate(…, watch=True)",
}
_session: "RankSession | None" = None


def start_session(session: "RankSession | None") -> None:
    """Make `session` the session that this process reports to; None ends the current one."""
    global _session  # noqa: PLW0603 - a rank is a process, and has one session
    _session = session
    set_context(None if session is None else session.context)
    spare_memory.expect_reports(expected=session is not None and session.takes_reports)


def _naming_ray_arguments(function: Callable[P, None]) -> Callable[P, None]:
    """Return `function` with its signature, and with an error that explains arguments of Ray's."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in _ARGUMENTS_OF_RAY.keys() & kwargs.keys():
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument {name!r}, which is Ray's: {_ARGUMENTS_OF_RAY[name]}"
            )
        function(*args, **kwargs)

    return call


@_naming_ray_arguments
@uncompiled
def report(
    metrics: Mapping[str, object],
    checkpoint: Checkpoint | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    step: SupportsIndex | None = None,
    progress: float | None = None,
    upload: "Upload | None" = None,
) -> None:
    """Report metrics and a checkpoint, durable when a synchronous report returns; every rank calls it equally often.

    An asynchronous report (`upload="async"`, the default for a `state`) is durable once the next report that waits for it, or
    the training function, has returned; its failure is raised there.

    A `state` of live objects is the fastest checkpoint: the call returns as soon as the bytes that this rank owns are copied,
    1/N of the data that are equal on N ranks, and the copy is committed in the background. The training may go on
    immediately. The copy costs memory for these bytes once, which is kept for the next report; a report waits for the commit
    of the previous one. The values of tensors on a GPU are those after the work on the current streams of the calling
    thread; these streams must already wait for writes on other streams.

    Each rank uploads its own files, in parallel; together they are one checkpoint. It exists as soon as its manifest does,
    which is written last: a training killed at any moment resumes from a whole checkpoint, that of this report if it was
    synchronous and had returned. Rank 0's metrics are recorded, on their own and as the checkpoint's.

    Args:
        metrics: Numbers, bools, strings, None, NaN, infinities and nested dicts of them; numpy scalars and 0-d tensors
            become numbers. The score by which checkpoints are sorted (`checkpoint_score_attribute`) is a number, None, or
            missing.
        checkpoint: This rank's part (`Checkpoint.from_directory`); None where this rank has nothing to store. Ranks may
            report equal files under one name; different files need different names.
        state: Names of modules, optimizers, schedulers and other objects with `state_dict`, tensors (DTensors among them),
            NumPy's arrays and scalars, plain values and containers of them, random generators, `RandomState()`. The content of
            a module or an optimizer counts as equal on all ranks, and each rank stores a part of it; the buffers are rank 0's,
            and what `get_extra_state` returns is compared.
            A module or optimizer with other parts on another rank is refused, unless it has a name of its own there or is
            marked with `RankLocal`. Of everything else, each rank stores its own value if it differs between ranks or is
            marked. Give the objects themselves, since the tensors of their `state_dict()` would be compared. Give averages of
            weights as a module (`AveragedModel`), not as a dict. Gradients are not stored: report after an optimizer step.
            `Checkpoint.load_state` restores it, and torch.distributed.checkpoint reads it. A directory may be reported beside
            it.
        step: The same number below 10^18 on every rank, growing from checkpoint to checkpoint; None means the step after that
            of the previous report, or of the restored checkpoint; the first is 0. When the step of the newest checkpoint is
            reported again, such as at the end of a training that has just reported, the metrics are recorded and that
            checkpoint stays, with a warning.
        progress: The share of the training that is done, from 0 to 1.
        upload: "sync" (the default without a state) returns when the checkpoint is durable. "async" (the default with a
            state) adopts the directory's files, returns immediately and commits in the background. For directories,
            `CheckpointConfig.max_in_flight` limits the commits at a time, by default to one. A failure is raised by the next
            report on every rank, or at the end of the training function.

    Raises:
        TypeError: For any other argument; for one of Ray's, it names the replacement.
        ValueError: Before anything is stored, if an argument is invalid.
        CheckpointNotFoundError: If `checkpoint` is a committed one that is gone.
        ReportMismatchError: On every rank, if the ranks disagree on the step, if their states do not form one state, or if a
            rank left early.
        ReportWithdrawnError: On every other rank, if one of them raised before it could take part.
        PeerGoneError: If another rank failed or died, also in a report of metrics alone.
        CommitFailedError: On every rank, if this or the last background checkpoint could not be committed; the previous one
            is still the latest. Where the storage has no space left it is a StorageFullError.
        FencedError: If a newer attempt owns the run.
        SystemExit: On every rank, if termination of the training is requested: the first checkpoint after that is the last. A
            function that calls `should_checkpoint` continues after it, to return by itself; its next checkpoint is not stored.
            Also if a sweep decides that its trial ends here; a function that catches it gets it again from its next report.
        RuntimeError: Outside of a training function, or in a process that it has forked.

    """
    session = _require_own_session("report")
    from .rank_report import ReportArguments  # noqa: PLC0415 - imported already where there is a session

    session.report(ReportArguments(metrics, checkpoint, state, step, progress, upload))


@uncompiled
def log_metrics(metrics: Mapping[str, object], step: SupportsIndex | None = None) -> None:
    """Record metrics of rank 0 in the run's history; those of other ranks are ignored, and no rank waits for another.

    It is meant for a framework's logger, on any rank. `Result.metrics` has the newest of them in addition to the last report's.

    Args:
        metrics: As `report` takes them.
        step: The step of the metrics, in any order. None means the step that the next report would have by default.

    Raises:
        ValueError: If a metric or the step is invalid.
        RuntimeError: Outside of a training function, or in a process that it has forked.

    """
    _require_own_session("log_metrics").log_metrics(metrics, step)


def checkpoint_directory() -> AbstractContextManager[Path]:
    """Yield an empty directory for the files of a checkpoint, which a report then moves instead of copying them.

    It is on the storage's filesystem if that is local, else a temporary directory. Reported files are moved out of it, also by
    a sync report: a report costs the time that the disk needs to store them, and nothing may write to them afterwards. A file
    with a second name (a hard link) and the target of a symbolic link are copied. Remaining files are deleted at the end.

        with checkpoint_directory() as directory:
            torch.save(model.state_dict(), directory / "model.pt")
            report({"loss": loss}, Checkpoint.from_directory(directory))

    Raises:
        RuntimeError: Outside of a training function.

    """
    return _require_session("checkpoint_directory").lent.lend()


def lent_directories() -> "LentDirectories":
    """Return the directories that are lent to this rank's training function, to which an integration may add.

    Raises:
        RuntimeError: Outside of a training function.

    """
    return _require_session("lent_directories").lent


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint that this attempt continues, the same one on every rank; None on a fresh start.

    Raises:
        RuntimeError: Outside of a training function.

    """
    return _require_session("get_checkpoint").get_checkpoint()


def newest_step() -> int:
    """Return the step of the newest report, or of the run's own restored checkpoint before the first; -1 if there is none.

    Raises:
        RuntimeError: Outside of a training function.

    """
    return _require_session("newest_step").newest_step


def continues_own_run() -> bool:
    """Return whether this attempt continues a checkpoint of its own run, and not the initial one of another run.

    Raises:
        RuntimeError: Outside of a training function.

    """
    return _require_session("continues_own_run").continues_own_run


def grace_s() -> float:
    """Return how many seconds ranks have for a last checkpoint when termination of the training is requested.

    Raises:
        RuntimeError: Outside of a training function.

    """
    return _require_session("grace_s").grace_s


def get_context() -> TrainContext:
    """Return this rank's context: its place in the training.

    Raises:
        RuntimeError: Outside of a training function.

    """
    return _require_session("get_context").context


def _require_session(name: str) -> "RankSession":
    if _session is None:
        raise RuntimeError(
            f"{name}() may be called only inside the function that prefect_torch.flows.train() runs on its ranks"
        )
    return _session


def _require_own_session(name: str) -> "RankSession":
    """Return the session of this process; raise in a process that a rank has forked."""
    session = _require_session(name)
    refuse_in_fork(name)
    return session
