"""Directories of a checkpoint that are links: a deletion removes the link, and never what it leads to."""

from collections.abc import Collection
from contextlib import suppress

from prefect_torch.ckpt.runs.run import Run


def without_targets(run: Run, data: Collection[str]) -> list[str]:
    """Return the keys to delete of a checkpoint's data: for a linked directory the link, as its target may be another's."""
    links = {folder: _link_to(run, folder) for folder in {key.rpartition("/")[0] for key in data}}
    return sorted({links[key.rpartition("/")[0]] or key for key in data})


def _link_to(run: Run, folder: str) -> str | None:
    """Return the first link on the way to a directory of a checkpoint; None if there is none, or it leads out of the storage.

    The storage refuses the latter, and names its target.
    """
    key = run.layout.checkpoints.removesuffix("/")
    place = run.storage.local_path(key)
    if place is None:
        return None
    for name in folder.removeprefix(run.layout.checkpoints).split("/"):
        key, place = f"{key}/{name}", place / name
        if place.is_symlink():
            with suppress(PermissionError):
                run.storage.local_path(key)
                return key
            return None
    return None
