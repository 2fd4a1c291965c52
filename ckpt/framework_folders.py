"""A directory that a framework's ranks write together, and the part of it that each rank reports."""

import os
import re
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.context import TrainContext, context_or_none
from prefect_torch.ckpt.errors import CheckpointNotFoundError
from prefect_torch.ckpt.files.folder import scan_files
from prefect_torch.ckpt.reporting.agreement import Upload
from prefect_torch.ckpt.reporting.api import continues_own_run, get_checkpoint, lent_directories, newest_step
from prefect_torch.ckpt.storage.machine.mounts import is_local
from torch import distributed as dist

CHECKPOINT_NAME = "checkpoint"
_AS_STARTED = "make it in the training function, with the environment as it is, and start it with no other launcher"
_USUAL_PLACES = ("/tmp", "/var/tmp")  # noqa: S108 - what is made there is held, and has a name that nobody foresees
# The names that Transformers, Accelerate, torch.distributed.checkpoint and DeepSpeed give to the files of one rank.
_RANK_IN_NAME = re.compile(
    r"(?:^rng_state_|^random_states_|^dl_state_dict(?:_\d+)?_rank|^__|^(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank|zero_pp_rank_)(\d+)[._]"
)


@contextmanager
def needs_extra(extra: str, *packages: str) -> Iterator[None]:
    """Name the extra that installs `packages` if an import of the body finds one of them missing.

    Raises:
        ModuleNotFoundError: With the command that installs it.

    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name not in packages:
            raise
        raise ModuleNotFoundError(f"{exc}: pip install 'prefect-torch[{extra}]'", name=exc.name) from None


def check_world_size(name: str, size: int, context: TrainContext, advice: str = _AS_STARTED) -> None:
    """Raise unless a framework's object counts as many ranks as the training has.

    Args:
        name: The name of the object, for the error.
        size: The number of ranks that it counts.
        context: This rank's context.
        advice: How to correct the number; the default is for an object that finds its ranks by the environment.

    Raises:
        ValueError: If it counts another number.

    """
    if size != context.world_size:
        raise ValueError(f"the {name} counts {size} ranks but the training has {context.world_size}; {advice}")


def check_first_step(step: int, advice: str) -> None:
    """Raise if a framework's Trainer begins before the newest step of this training function.

    It may begin anew from a checkpoint of another run, such as with the weights alone.

    Args:
        step: The step that the Trainer begins with.
        advice: How the Trainer receives a checkpoint: "give ...".

    Raises:
        ValueError: If it begins before the checkpoint of this run that the attempt continues, or before a report of another
            Trainer: its own reports would be refused, or a restart would take them for those of the other Trainer.

    """
    if step >= newest_step():
        return
    restored = get_checkpoint() if continues_own_run() else None
    if restored is not None and step < restored.step:
        raise ValueError(
            f"the training continues from {restored.path} at step {restored.step}, but the Trainer begins with step {step}; "
            f"{advice}"
        )
    raise ValueError(
        f"this training function has reported step {newest_step()}, and another Trainer begins with step {step}: train once in "
        "a function, since a restart could not distinguish the checkpoints of the two; call train() for each"
    )


@contextmanager
def folder_of_all_ranks(context: TrainContext, upload: Upload, broadcast: Callable[[str], str]) -> Iterator[Path]:
    """Yield an empty directory with the same path on every rank, for `moved_part`: frameworks that shard write below that path.

    Args:
        context: This rank's context.
        upload: How the files are reported.
        broadcast: Returns rank 0's argument on every rank.

    Raises:
        FileNotFoundError: On every rank, if it would have to be temporary and the machines have no place for it in common.

    """
    lent = lent_directories()
    is_below_run = broadcast("yes" if context.world_rank == 0 and _belongs_below_run(context, upload) else "")
    temporary = None if is_below_run else _temporary_directory(context)
    folder = Path(broadcast(str(lent.make(temporary)) if context.world_rank == 0 else ""))
    if context.world_rank != 0:
        lent.join(folder, is_first=context.local_rank == 0)
    try:
        yield folder
    finally:
        lent.remove(folder)


def _belongs_below_run(context: TrainContext, upload: Upload) -> bool:
    """Return whether to write to the storage itself: if it is a directory, and this makes the training wait no longer.

    It waits until an async report has its files, which must not take as long as a file server does.
    """
    lent = lent_directories()
    folder = lent.run_folder
    if folder is None or not folder.is_dir() or not lent.can_link:  # without the run's directory, the report says what is wrong
        return False
    return upload == "sync" or (_has_one_machine(context) and is_local(folder))


def _temporary_directory(context: TrainContext) -> Path:
    """Return a directory for temporary files that exists on all machines, the first one's if possible; every rank calls it."""
    own = tempfile.gettempdir()
    if _has_one_machine(context) or not _are_connected():
        return Path(own)
    of_machines = dict.fromkeys(_gathered((own, socket.gethostname()), context))
    places = dict.fromkeys([*(place for place, _ in of_machines), *_USUAL_PLACES])
    usable = _gathered([place for place in places if Path(place).is_dir() and os.access(place, os.W_OK | os.X_OK)], context)
    for place in places:
        if all(place in of_rank for of_rank in usable):
            return Path(place)
    named = ", ".join(f"{place} on {machine}" for place, machine in of_machines)
    raise FileNotFoundError(
        f"the machines have no directory for temporary files in common: {named}; set TMPDIR to one that exists on all of them"
    )


@contextmanager
def moved_part(
    folder: Path, context: TrainContext, files: Collection[str], barrier: Callable[[], object]
) -> Iterator[Checkpoint | None]:
    """Yield this rank's part of a `folder_of_all_ranks`, from which its files are moved away; see `part_of_rank`.

    Args:
        folder: The directory, complete: every rank has written its files.
        context: This rank's context.
        files: Those files in it that belong to the checkpoint.
        barrier: Returns once every rank has called it.

    """
    paths = _files_of_rank(files, context)
    barrier()  # no rank may find files that are being moved
    if not paths:
        yield None
        return
    lent = lent_directories()
    with lent.lend(lent.parent_of(folder)) as part:
        for path in paths:
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).rename(part / path)
        yield Checkpoint.from_directory(part)


@contextmanager
def part_of_rank(
    folder: Path, context: TrainContext, upload: Upload, files: Collection[str] | None = None
) -> Iterator[Checkpoint | None]:
    """Yield this rank's part of `folder`; the ranks' parts together are the whole directory. Every rank calls it.

    A rank reports the files that are named after it, such as `rng_state_1.pth`, and the first rank of each machine reports
    all other files there, except those that rank 0's machine has, too: copies, or the same files in a shared directory. So
    each file has one owner. Nothing is moved or deleted in `folder`: a report copies its files, into `checkpoint/`.

    Args:
        folder: The directory, complete: every rank has written its files.
        context: This rank's context.
        upload: How the files are reported.
        files: Those files in `folder` that belong to the checkpoint; None for all.

    Yields:
        None if no file is this rank's.

    """
    paths = _files_of_rank(files_in(folder) if files is None else files, context)
    if not paths:
        yield None
        return
    is_copied_there = upload == "async" and _belongs_below_run(context, upload)
    temporary = None if is_copied_there else Path(tempfile.gettempdir())
    with lent_directories().lend(temporary) as part:
        for path in paths:
            target = part / CHECKPOINT_NAME / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to((folder / path).resolve())
        yield Checkpoint.from_directory(part)


def _files_of_rank(files: Collection[str], context: TrainContext) -> list[str]:
    return [path for path in _reported_here(files, context) if _owner(path, context) == context.world_rank]


def files_in(folder: Path) -> list[str]:
    """Return the paths of the files in a directory; none if it does not exist, as on a machine whose ranks write nothing."""
    return scan_files(folder) if folder.is_dir() else []


def _reported_here(seen: Collection[str], context: TrainContext) -> Collection[str]:
    """Return the files that are reported from this machine, of those that it sees; every rank calls it."""
    if _has_one_machine(context) or not _are_connected():
        return seen
    first = context.world_rank - context.local_rank
    own = [path for path in seen if _rank_in(path) in range(first, first + context.local_world_size)]
    on_first_machine: list[Any] = [seen if context.world_rank == 0 else None]
    dist.broadcast_object_list(on_first_machine)
    on_others = _gathered(own if first and context.local_rank == 0 else [], context)
    if first == 0:
        return sorted({*seen}.difference(*on_others))
    return sorted({*seen}.difference(on_first_machine[0]).union(own))


def _has_one_machine(context: TrainContext) -> bool:
    return context.local_world_size == context.world_size


def _are_connected() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gathered(value: Any, context: TrainContext) -> list[Any]:
    """Return the values of all ranks, in their order."""
    values: list[Any] = [None] * context.world_size
    dist.all_gather_object(values, value)
    return values


def _owner(path: str, context: TrainContext) -> int | None:
    """Return the rank that reports `path` from this machine; None for a file of an earlier attempt with more ranks."""
    first = context.world_rank - context.local_rank
    rank = first if (named := _rank_in(path)) is None else named
    if rank >= context.world_size:
        return None
    return rank if first <= rank < first + context.local_world_size else first


def _rank_in(path: str) -> int | None:
    named = _RANK_IN_NAME.search(path.rpartition("/")[2])
    return None if named is None else int(named[1])


@contextmanager
def restored_part(name: str, reporter: str) -> Iterator[Path | None]:
    """Yield the path of `name`, verified, in the checkpoint that this attempt continues; it exists until the block ends.

    Yields None on a fresh start, and outside of a training function.

    Args:
        name: A file or directory of the checkpoint.
        reporter: The callback or function that stores it there, for the error.

    Raises:
        CheckpointNotFoundError: If the checkpoint holds no `name`.
        CheckpointCorruptError: If a file differs from the committed one.

    """
    checkpoint = None if context_or_none() is None else get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as directory:
        path = Path(directory, name)
        if not path.exists():
            raise CheckpointNotFoundError(f"{checkpoint.path} holds no {name}: {reporter} did not report it")
        yield path
