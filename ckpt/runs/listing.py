"""The runs in a storage."""

from collections.abc import Iterator
from contextlib import suppress

from prefect_torch.ckpt.storage.opening import StorageLike, open_storage

from .layout import Layout, check_run_name


def list_runs(storage: StorageLike) -> Iterator[str]:
    """Yield the names of the runs in `storage`, sorted; one listing, and one request per run at any number of checkpoints.

    Args:
        storage: A local path, a URL, "block-type-slug/block-name", a block, or an open storage.

    """
    opened = open_storage(storage)
    for folder in sorted(set(opened.folders(""))):
        if not _is_run_name(folder):
            continue
        with suppress(FileNotFoundError):  # another program's directory
            opened.size(Layout(folder).run_info)
            yield folder


def _is_run_name(name: str) -> bool:
    try:
        check_run_name(name)
    except ValueError:
        return False
    return True
