"""Links in a run's directory: a deletion removes a link in a checkpoint, and never what a link leads to."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from prefect_torch.ckpt.runs.run import Run


def own_folder(run: Run, prefix: str) -> Path | None:
    """Return the directory at a prefix of the run, from which files may be deleted by their paths.

    None in a bucket, and if a link below the storage's first name leads there: what it holds may be another run's.

    Raises:
        PermissionError: If a link leads out of the storage.

    """
    key = prefix.removesuffix("/")
    folder = run.storage.local_path(key)
    if folder is None or any(it.is_symlink() for it in [folder, *folder.parents][: key.count("/")]):
        return None
    return folder


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
