"""The space that a run keeps on a local disk for the records without which a full one cannot be freed: claims and marks.

A trial uses its sweep's. Any process may give up a part, and the next claim or deletion with enough room writes it again.
"""

from collections.abc import Callable
from pathlib import Path

from prefect_torch.ckpt.errors import is_of_full_disk
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.local_files.reserve import give_up_part, keep_reserve, remove_reserve


def keep_space(run: Run) -> None:
    """Write the reserve, or what is missing of it, if there is room; no effect in a bucket."""
    if (folder := _folder(run)) is not None:
        keep_reserve(folder)


def put_despite_full_disk(run: Run, put: Callable[[], None]) -> None:
    """Call `put`, and again for each part of the reserve that is given up because there is no space.

    Raises:
        OSError: If there is no space, and nothing to give up.

    """
    while True:
        try:
            put()
        except OSError as exc:
            folder = _folder(run) if is_of_full_disk(exc) else None
            if folder is None or not give_up_part(folder):
                raise
        else:
            return


def give_up_space(run: Run) -> None:
    """Remove the reserve of a run that is deleted."""
    if (folder := _folder(run)) is not None:
        remove_reserve(folder)


def _folder(run: Run) -> Path | None:
    return run.storage.local_path(run.name.partition("/")[0])
