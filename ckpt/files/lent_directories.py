"""Directories that a rank lends to its training function, so that what is written there is moved into the checkpoint."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.scratch import make_scratch, remove_scratch


class LentDirectories:
    """The directories lent by one rank of an attempt: on the storage's filesystem where that is local, else temporary ones.

    In the storage, they lie beside the run's checkpoints; garbage collection removes those of a killed rank.

    Args:
        run: The run.
        attempt: The attempt's number.

    """

    def __init__(self, run: Run, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._lent: dict[Path, bool] = {}  # whether each is temporary

    @contextmanager
    def lend(self) -> Iterator[Path]:
        """Yield a new, empty directory, and delete it with all that was not reported."""
        directory = self.make()
        try:
            yield directory
        finally:
            self.remove(directory)

    def make(self) -> Path:
        """Return a new, empty directory, to be removed."""
        place = self._run.storage.local_path(self._run.layout.unreported(self._attempt, secrets.token_hex(8)))
        if place is None:
            directory = make_scratch()
        else:
            directory = place.absolute()
            directory.mkdir(parents=True)
        self._lent[directory] = place is None
        return directory

    def remove(self, directory: Path) -> None:
        """Delete a directory that `make` returned."""
        if self._lent.pop(directory):
            remove_scratch(directory)
        else:
            shutil.rmtree(directory, ignore_errors=True)

    def holds(self, directory: Path) -> bool:
        """Return whether `directory` is one of them, or lies in one."""
        return any(directory.resolve().is_relative_to(lent.resolve()) for lent in self._lent)
