"""Which runs a storage holds."""

from collections.abc import Iterator
from contextlib import suppress

from prefect_torch.ckpt.storage.opening import StorageLike, open_storage

from .layout import Layout, check_run_name


def list_runs(storage: StorageLike) -> Iterator[str]:
    """Yield the names of the runs in `storage`, sorted; a listing, and a request each, however many checkpoints they have.

    Args:
        storage: A local path, a URL, "block-type-slug/block-name", a block, or an open storage.

    """
    opened = open_storage(storage)
    for folder in sorted(set(opened.folders(""))):
        if not _is_run_name(folder):
            continue
        with suppress(FileNotFoundError):  # somebody else's folder
            opened.size(Layout(folder).run_info)
            yield folder


def _is_run_name(name: str) -> bool:
    try:
        check_run_name(name)
    except ValueError:
        return False
    return True
