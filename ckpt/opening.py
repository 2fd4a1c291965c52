"""From what a person writes to an open storage: a path, a URL, a block's name, a block."""

import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard
from urllib.parse import unquote

from .storage import Storage, StorageSpec

StorageLike: TypeAlias = "str | PathLike[str] | StorageSpec | Storage | Any"

_BUCKETS = {"s3", "s3a", "gs", "gcs"}
_OBJECT_STORES = _BUCKETS | {"az", "azure", "abfs", "abfss", "adl"}  # whose URLs say container@account
_BLOCK_SLUGS = {
    "checkpoint-storage",
    "local-file-system",
    "remote-file-system",
    "s3-bucket",
    "gcs-bucket",
    "azure-blob-storage-container",
}
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://(?P<rest>.*)", re.DOTALL)
_ONE_SLASH = re.compile(rf"(?:{'|'.join(sorted(_OBJECT_STORES))}|file|memory|sftp|ssh|ftp|hdfs|smb):/", re.IGNORECASE)
# What begins with a host's port, or an address in brackets, is no user with a password. As a form's JSON schema says it, too.
URL_WITH_LOGIN = r"[A-Za-z][A-Za-z0-9+.-]*://[^/:@\[]*:(?!\d+(/|$))[^@]*@"
_PASSWORD = re.compile(URL_WITH_LOGIN)


def parse_storage(storage: StorageLike) -> StorageSpec:
    """Return what every process needs to open `storage`.

    Args:
        storage: A local path, a URL, "block-type-slug/block-name", or a block. A folder that is named like a block is
            written "./s3-bucket/x".

    Raises:
        ValueError: If it is none of these, or a URL with a password in it.

    """
    if isinstance(storage, StorageSpec):
        return _normalized(storage)
    if isinstance(storage, (str, PathLike)):
        text = os.fspath(storage)
        if not text:
            raise ValueError("storage is empty: give a path, a URL, 'block-type-slug/block-name', or a block")
        if _URL.match(text):
            return _normalized(StorageSpec(text))
        if isinstance(storage, PathLike) or not is_block_slug(text):
            return StorageSpec(_absolute(text))
    from .blocks import renewal_of, resolve_storage  # noqa: PLC0415 - the one module here that imports prefect

    return replace(_normalized(resolve_storage(storage)), renewal=renewal_of(storage))


def open_storage(storage: StorageLike) -> Storage:
    """Open `storage`; asks the storage nothing yet. An open storage is returned as it is.

    Raises:
        ValueError: If it is nothing that can be opened.

    """
    if is_open(storage):
        return storage
    spec = parse_storage(storage)
    match = _URL.match(spec.url)
    from .retry import RetryingStorage  # noqa: PLC0415 - each backend loads only what it needs

    if match is None:
        from .local_storage import LocalStorage  # noqa: PLC0415 - as above

        return RetryingStorage(lambda: LocalStorage(Path(spec.url)), spec.retry)
    options = _options(spec)
    if match["scheme"] in _OBJECT_STORES:
        from .obstore_storage import ObstoreStorage  # noqa: PLC0415 - as above

        return RetryingStorage(lambda: ObstoreStorage(spec.url, next(options)), spec.retry)
    from .fsspec_storage import FsspecStorage  # noqa: PLC0415 - as above

    return RetryingStorage(lambda: FsspecStorage(spec.url, next(options)), spec.retry)


def refuse_password(text: str) -> None:
    """Raise unless `text`, as a URL, shows no password: it would be shown wherever the URL is.

    Raises:
        ValueError: With the way to give it, and without the password.

    """
    if _PASSWORD.match(text):
        scheme = text.partition("://")[0].lower()
        way = (
            f"save a CheckpointStorage block with {scheme}://user@host/folder and the password in its field, or log in by a key"
        )
        if scheme in _OBJECT_STORES:
            way = "give them as a block, as environment variables or in a profile"
        raise ValueError(
            f"the {scheme}:// URL holds credentials, which Prefect stores and shows with a flow run's parameters: {way}"
        )


def is_open(storage: StorageLike) -> TypeGuard[Storage]:
    """Say whether `storage` speaks the verbs itself."""
    return hasattr(storage, "put_file") and hasattr(storage, "list")


def _options(spec: StorageSpec) -> Iterator[dict[str, str]]:
    """Yield the options to open `spec` with, and after the first time, when those have expired, fresh ones from its block."""
    yield spec.options
    while True:
        if spec.renewal is None:  # what is not in the options, the client looks for anew by itself
            yield spec.options
        else:
            yield parse_storage(pickle.loads(spec.renewal)).options  # noqa: S301 - from our own leader


def is_block_slug(text: str) -> bool:
    """Say whether `text` names a saved block."""
    slug, _, name = text.partition("/")
    return slug in _BLOCK_SLUGS and bool(name) and "/" not in name


def _absolute(path: str) -> str:
    if _ONE_SLASH.match(path):
        raise ValueError(
            f"{path.partition('/')[0]}/… is a URL that lost a slash, as in pathlib.Path('s3://…'): give the URL as a string"
        )
    return str(Path(path).expanduser().absolute())


def _normalized(spec: StorageSpec) -> StorageSpec:
    """Return `spec` with a lower-case scheme and no last slash."""
    match = _URL.match(spec.url)
    if match is None:
        return spec
    refuse_password(spec.url)
    scheme, rest = match["scheme"].lower(), match["rest"]
    if scheme in ("file", "local"):
        return replace(spec, url=_file_path(rest), options={})
    if scheme in ("http", "https"):
        raise ValueError(
            f"{scheme}:// cannot be written to: give an S3 server's address as the block's endpoint_url, or in "
            "AWS_ENDPOINT_URL, and the storage as s3://bucket/folder"
        )
    if scheme in _BUCKETS and "@" in rest.partition("/")[0]:
        raise ValueError(
            f"the {scheme}:// URL holds credentials, which would be shown wherever the URL is: give them as a block, as "
            "environment variables or in a profile"
        )
    if scheme in _OBJECT_STORES and ("?" in rest or "#" in rest):
        raise ValueError(f"{scheme}://{re.split('[?#]', rest)[0]} goes on with '?' or '#': write %3F or %23 in a folder's name")
    return replace(spec, url=f"{scheme}://{rest.rstrip('/')}")


def _file_path(rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(f"file://{rest} names no absolute path: write file:///folder, or the path alone")
    return f"/{unquote(path).strip('/')}"
