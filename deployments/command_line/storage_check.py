"""Whether a storage lets a training do all it does."""

from collections.abc import Iterator

from prefect_torch.ckpt.storage.probe import ListingOrder, StorageUnfitError, probe_storage

from .findings import Finding
from .selection import open_new_place

_ORDERS: dict[ListingOrder, str] = {
    "keys": "in the order of keys",
    "folders": "folder by folder",
    "none": "in no known order, so that the latest of more than a thousand checkpoints is found by listing them all",
}


def check_storage(text: str) -> Iterator[Finding]:
    """Write, list, read and delete small objects under a name that nobody has; leaves nothing behind."""
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
    found = f"{probe.url}: wrote, listed, read and deleted in {probe.total_s:.2f} s; lists {_ORDERS[probe.order]}"
    yield Finding("storage", "ok", found)
