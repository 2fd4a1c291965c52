"""From what a person writes to an open storage: a path, a URL, a block's name, a block."""

import os
import re
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from .storage import Storage, StorageSpec

StorageLike: TypeAlias = "str | PathLike[str] | StorageSpec | Storage | Any"

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl"}
_BLOCK_SLUGS = {
    "checkpoint-storage",
    "local-file-system",
    "remote-file-system",
    "s3-bucket",
    "gcs-bucket",
    "azure-blob-storage-container",
}
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://")


def parse_storage(storage: StorageLike) -> StorageSpec:
    """Return what every process needs to open `storage`.

    Args:
        storage: A local path, a URL, "block-type-slug/block-name", or a block. A folder that is named like a block is
            written "./s3-bucket/x".

    Raises:
        ValueError: If it is none of these.

    """
    if isinstance(storage, StorageSpec):
        return storage
    if isinstance(storage, (str, PathLike)):
        text = os.fspath(storage)
        if not text:
            raise ValueError("storage is empty: give a path, a URL, 'block-type-slug/block-name', or a block")
        if _URL.match(text):
            return _parse_url(text)
        if not is_block_slug(text):
            return StorageSpec(str(Path(text).expanduser().absolute()))
    from .blocks import resolve_storage  # noqa: PLC0415 - the one module here that imports prefect

    return resolve_storage(storage)


def open_storage(storage: StorageLike) -> Storage:
    """Open `storage`; costs no request. An open storage is returned as it is.

    Raises:
        ValueError: If it is nothing that can be opened.

    """
    if hasattr(storage, "put_file") and hasattr(storage, "list"):
        return cast("Storage", storage)
    spec = parse_storage(storage)
    match = _URL.match(spec.url)
    if match is None:
        from .local_storage import LocalStorage  # noqa: PLC0415 - each backend loads only what it needs

        return LocalStorage(Path(spec.url))
    from .retry import RetryingStorage, RetryPolicy  # noqa: PLC0415 - as above

    if match["scheme"].lower() in _OBJECT_STORES:
        from .obstore_storage import ObstoreStorage  # noqa: PLC0415 - as above

        return RetryingStorage(lambda: ObstoreStorage(spec.url, spec.options), RetryPolicy())
    from .fsspec_storage import FsspecStorage  # noqa: PLC0415 - as above

    return RetryingStorage(lambda: FsspecStorage(spec.url, spec.options), RetryPolicy())


def is_block_slug(text: str) -> bool:
    """Say whether `text` names a saved block."""
    slug, _, name = text.partition("/")
    return slug in _BLOCK_SLUGS and bool(name) and "/" not in name


def _parse_url(url: str) -> StorageSpec:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return StorageSpec(unquote(parts.path) or "/")
    return StorageSpec(url.rstrip("/") if parts.path.strip("/") or parts.netloc else url)
