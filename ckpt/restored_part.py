"""What a framework's callback has stored of a checkpoint, for the attempt that continues it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect_torch.ckpt.reporting.api import get_checkpoint

from .context import context_or_none
from .errors import CheckpointNotFoundError


@contextmanager
def restored_part(name: str, reporter: str) -> Iterator[Path | None]:
    """Yield the path of `name`, verified, in the checkpoint that this attempt continues; there until the block ends.

    None on a fresh start, and outside of a training function.

    Args:
        name: A file or folder of the checkpoint.
        reporter: What stores it there, for the error.

    Raises:
        CheckpointNotFoundError: If the checkpoint holds no `name`.
        CheckpointCorruptError: If a file differs from what was committed.

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
