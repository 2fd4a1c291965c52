"""Which runs a storage holds."""

import os
from collections.abc import Iterator
from contextlib import suppress

from .layout import Layout, check_run_name
from .opening import StorageLike, open_storage
from .storage import Storage

_AFTER_SLASH = chr(ord("/") + 1)


def list_runs(storage: StorageLike) -> Iterator[str]:
    """Yield the names of the runs in `storage`; two requests each, however many checkpoints they have.

    Args:
        storage: A local path, a URL, "block-type-slug/block-name", a block, or an open storage.

    """
    opened = open_storage(storage)
    for folder in _folders(opened):
        if not _is_run_name(folder):
            continue
        with suppress(FileNotFoundError):  # somebody else's folder
            opened.size(Layout(folder).run_info)
            yield folder


def _folders(storage: Storage) -> Iterator[str]:
    if (local := storage.local_path("folder")) is not None:  # where one may not be allowed to look into every folder
        with suppress(FileNotFoundError), os.scandir(local.parent) as entries:
            yield from sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return
    after: str | None = None
    while (info := next(storage.list("", after=after), None)) is not None:
        folder, is_below, _ = info.key.partition("/")
        if is_below:
            yield folder
        after = f"{folder}{_AFTER_SLASH}" if is_below else info.key  # what sorts behind all that is in the folder


def _is_run_name(name: str) -> bool:
    try:
        check_run_name(name)
    except ValueError:
        return False
    return True
