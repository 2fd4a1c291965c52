"""The Trainer's directories on one machine: files that an earlier attempt left there, copies, and their rotation."""

import re
import shutil
from pathlib import Path

from accelerate.utils import broadcast_object_list
from prefect_torch.ckpt.context import TrainContext
from prefect_torch.ckpt.framework_folders import files_in
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

_Version = tuple[int, int, int]  # of a file's content: inode, time, size


def output_dir(args: TrainingArguments) -> Path:
    """Return the directory that the Trainer writes to."""
    assert args.output_dir is not None  # TrainingArguments has replaced None
    return Path(args.output_dir)


class SavedFolders:
    """The directories `checkpoint-<step>` that a Trainer saves on this machine, which need not share them with the others.

    Args:
        args: The Trainer's arguments.
        context: This rank's context.
        step: The step that the Trainer begins with. An earlier attempt may have left directories of later steps, to which the
            Trainer writes without deleting what they hold.

    """

    def __init__(self, args: TrainingArguments, context: TrainContext, step: int) -> None:
        self._args, self._context = args, context
        later = [folder for folder in self._folders() if _step_of(folder) > step]
        self._left = {path: _version(path) for folder in later for path in folder.rglob("*") if path.is_file()}

    def folder(self, step: int) -> Path:
        """Return the directory of a step."""
        return output_dir(self._args) / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def written_files(self, folder: Path) -> list[str]:
        """Return the files in `folder` that the Trainer has written since it began, once all ranks have."""
        return [path for path in files_in(folder) if self._left.get(folder / path) != _version(folder / path)]

    def rotate(self) -> None:
        """Delete the directories that the Trainer has rotated on rank 0's machine alone; every rank calls it after a save."""
        if self._context.local_world_size == self._context.world_size or not self._args.save_total_limit:
            return
        kept = [[folder.name for folder in self._folders()]]
        broadcast_object_list(kept)
        if self._context.local_rank == 0 and not self._args.should_save:
            for folder in self._folders():
                if folder.name not in kept[0]:
                    shutil.rmtree(folder, ignore_errors=True)  # as the Trainer does

    def _folders(self) -> list[Path]:
        return [path for path in output_dir(self._args).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _step_of(path) >= 0]


def _step_of(folder: Path) -> int:
    match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", folder.name)
    return int(match[1]) if match else -1


def _version(path: Path) -> _Version:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
