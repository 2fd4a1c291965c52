"""Opening of a user's storage argument: a path, a URL, a block's name, a block."""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, TypeAlias, TypeGuard

from prefect_torch.ckpt.storage.backends import open_spec
from prefect_torch.ckpt.storage.protocol import Storage, StorageSpec
from prefect_torch.ckpt.storage.specs.location import normalized, parse_location

StorageLike: TypeAlias = "str | PathLike[str] | StorageSpec | Storage | Any"


def parse_storage(storage: StorageLike) -> StorageSpec:
    """Return the specification with which every process opens `storage`.

    Args:
        storage: A local path, a URL, "block-type-slug/block-name", or a block. A directory that is named like a block is
            written "./s3-bucket/x".

    Raises:
        ValueError: If it is none of these, or a URL with a password in it.

    """
    if isinstance(storage, StorageSpec):
        return normalized(storage)
    if isinstance(storage, (str, PathLike)) and (spec := parse_location(storage)) is not None:
        return spec
    from prefect_torch.ckpt.storage.specs.blocks import (  # noqa: PLC0415 - it imports prefect, and nothing else here does
        credential_source_of,
        resolve_storage,
    )

    return replace(normalized(resolve_storage(storage)), credential_source=credential_source_of(storage))


def open_storage(storage: StorageLike) -> Storage:
    """Open `storage`; sends no request yet. An open storage is returned as it is.

    Raises:
        ValueError: If it cannot be opened.

    """
    return storage if is_open(storage) else open_spec(parse_storage(storage), _fresh_options)


def _fresh_options(credential_source: bytes) -> Mapping[str, str]:
    return parse_storage(pickle.loads(credential_source)).options  # noqa: S301 - pickled by this program's own leader


def is_open(storage: StorageLike) -> TypeGuard[Storage]:
    """Return whether `storage` implements the protocol's verbs itself."""
    return hasattr(storage, "put_file") and hasattr(storage, "list")
