"""Which runs a storage holds."""

from collections.abc import Iterator

from .layout import Layout, check_run_name
from .opening import StorageLike, open_storage

_AFTER_SLASH = chr(ord("/") + 1)


def list_runs(storage: StorageLike) -> Iterator[str]:
    """Yield the names of the runs in `storage`; two requests each, however many checkpoints they have.

    Args:
        storage: A local path, a URL, "block-type-slug/block-name", a block, or an open storage.

    """
    opened = open_storage(storage)
    after: str | None = None
    while (info := next(opened.list("", after=after), None)) is not None:
        folder, is_below, _ = info.key.partition("/")
        if is_below and _is_run_name(folder):
            try:
                opened.size(Layout(folder).run_info)
            except FileNotFoundError:  # somebody else's folder
                pass
            else:
                yield folder
        after = f"{folder}{_AFTER_SLASH}" if is_below else info.key  # what sorts behind all that is in the folder


def _is_run_name(name: str) -> bool:
    try:
        check_run_name(name)
    except ValueError:
        return False
    return True
