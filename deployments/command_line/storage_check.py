"""Whether a storage lets a training do all it does."""

from collections.abc import Iterator

from prefect_torch.ckpt.probe import StorageUnfitError, probe_storage

from .findings import Finding
from .selection import open_new_place


def check_storage(text: str) -> Iterator[Finding]:
    """Write, list, read and delete a small object under a name that nobody has; leaves nothing behind."""
    try:
        storage = open_new_place(text)
    except Exception as exc:  # noqa: BLE001 - told, whatever it is
        yield Finding("storage", "wrong", str(exc), "give a path, a URL, or block-type-slug/block-name")
        return
    try:
        probe = probe_storage(storage)
    except StorageUnfitError as exc:
        yield Finding("storage", "wrong", exc.found, exc.advice)
        return
    yield Finding("storage", "ok", f"{probe.url}: wrote, listed, read and deleted in {probe.total_s:.2f} s")
