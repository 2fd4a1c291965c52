"""Lightning's checkpoint written into its file itself: no copy in memory, and nothing elsewhere that a kill leaves behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy


class _DirectIO(TorchCheckpointIO):
    """Writes nothing atomically: what it writes to is reported, and the manifest is the commit."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | PathLike[str], storage_options: Any = None) -> None:  # noqa: ARG002 - Lightning's signature
        """Write `checkpoint` to `path`."""
        torch.save(checkpoint, path)


@contextmanager
def direct_writes(strategy: Strategy) -> Iterator[None]:
    """Have Lightning's usual CheckpointIO write into the files that it is given; another one stays as it is.

    It would serialize a checkpoint in memory, and write that to a file of its own in the temporary directory, which it then
    moves.
    """
    usual = strategy.checkpoint_io
    if type(usual) is not TorchCheckpointIO:
        yield
        return
    strategy.checkpoint_io = _DirectIO()
    try:
        yield
    finally:
        strategy.checkpoint_io = usual
