"""Whether a storage lets a training do all it does: write, list, read, delete."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from prefect_torch.ckpt import Storage

from .findings import Finding
from .selection import open_new_place

_CONTENT = b"prefect-torch doctor"


def check_storage(text: str) -> Iterator[Finding]:
    """Write, list, read and delete a small object under a name that nobody has; leaves nothing behind."""
    try:
        storage = open_new_place(text)
    except Exception as exc:  # noqa: BLE001 - told, whatever it is
        yield Finding("storage", "wrong", f"{text}: {exc}", "give a path, a URL, or block-type-slug/block-name")
        return
    missing = _missing_folders(storage)
    started_s = time.monotonic()
    try:
        failed = _probe(storage, f"prefect-torch-doctor-{secrets.token_hex(4)}")
    finally:
        for folder in missing:
            with suppress(OSError):  # somebody uses it by now
                folder.rmdir()
    if failed is not None:
        yield failed
        return
    took_s = time.monotonic() - started_s
    yield Finding("storage", "ok", f"{storage.url}: wrote, listed, read and deleted in {took_s:.2f} s")


def _probe(storage: Storage, folder: str) -> Finding | None:
    key = f"{folder}/probe"

    def list_one() -> None:
        keys = [info.key for info in storage.list(f"{folder}/")]
        if keys != [key]:
            raise ValueError(f"it lists {keys} instead of {[key]}")

    def read() -> None:
        if (got := storage.get_bytes(key)) != _CONTENT:
            raise ValueError(f"it gives back {got!r} instead of {_CONTENT!r}")

    def list_none() -> None:
        if keys := [info.key for info in storage.list(f"{folder}/")]:
            raise ValueError(f"it still lists {keys}")

    verbs: list[tuple[str, Callable[[], None]]] = [
        ("write", lambda: storage.put_bytes(key, _CONTENT)),
        ("list", list_one),
        ("read", read),
        ("delete", lambda: storage.delete([key])),
        ("forget", list_none),
    ]
    for verb, act in verbs:
        try:
            act()
        except Exception as exc:  # noqa: BLE001 - told, whatever it is
            with suppress(Exception):
                storage.delete([key])
            advice = f"let this user {verb} there, or give other credentials"
            return Finding("storage", "wrong", f"{storage.url} does not {verb}: {exc}", advice)
    return None


def _missing_folders(storage: Storage) -> list[Path]:
    """Return the folders that the first write makes, the innermost first."""
    if "://" in storage.url:
        return []
    root = Path(storage.url)
    return [folder for folder in (root, *root.parents) if not folder.exists()]
