"""The storage that a user chooses in a form or in code."""

import re
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from types import NoneType
from typing import Annotated, Any

from prefect.blocks.core import Block
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.blocks import StorageBlock
from prefect_torch.ckpt.storage.opening import StorageLike, parse_storage
from prefect_torch.ckpt.storage.specs.blocks import KINDS_OF_BLOCKS
from prefect_torch.ckpt.storage.specs.cloud_blocks import is_cloud_block
from prefect_torch.ckpt.storage.specs.location import (
    MASK,
    URL,
    URL_WITH_LOGIN,
    is_block_slug,
    refuse_password,
    without_password,
)
from pydantic import BeforeValidator, Field, InstanceOf, SerializerFunctionWrapHandler, WrapSerializer
from pydantic.json_schema import SkipJsonSchema

from .run_form import PathObject
from .settings import TorchSettings
from .sync import SyncConfig

_FIELDS_OF_BLOCKS = {"location", "file_system", "basepath", "bucket_name"}
_SECRET = re.compile(r"pass|secret|token|credential|auth|connection_string|(^|_)(key|pwd|sas)$", re.IGNORECASE)


def check_choice(storage: Any) -> Any:
    """Return `storage` if its text or type can be that of a storage; nothing is opened and no block is loaded.

    Raises:
        ValueError: If it cannot be.

    """
    if isinstance(storage, PathLike):
        return parse_storage(storage).url
    if isinstance(storage, str):
        if not is_block_slug(storage):
            parse_storage(storage)
        return storage
    # Without this check, a mapping without any field of a block is a LocalFileSystem, which needs none: the working directory.
    if isinstance(storage, StorageBlock) or (isinstance(storage, Mapping) and _FIELDS_OF_BLOCKS & storage.keys()):
        _refuse_passwords(storage)
        return storage
    if is_cloud_block(storage):
        return storage
    raise ValueError(
        f"checkpoints cannot be stored with a {type(storage).__name__}: give a path, a URL, 'block-type-slug/block-name', or a "
        f"{KINDS_OF_BLOCKS} block"
    )


def _refuse_passwords(block: Any) -> None:
    fields = block if isinstance(block, Mapping) else dict(block)
    for name in _FIELDS_OF_BLOCKS & fields.keys():
        if isinstance(fields[name], str):
            refuse_password(fields[name])
        elif isinstance(fields[name], (StorageBlock, Mapping)):
            _refuse_passwords(fields[name])


def _mask_settings(storage: Any, handler: SerializerFunctionWrapHandler) -> Any:
    return masked(handler(storage))


def masked(value: Any) -> Any:
    """Return an encoded block as Prefect stores and shows it: the settings of a RemoteFileSystem have no secret types."""
    if isinstance(value, dict):
        return {name: MASK if _is_secret(name, it) else masked(it) for name, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(it) for it in value]
    return without_password(value) if isinstance(value, str) else value


def _is_secret(name: Any, value: Any) -> bool:
    """Return whether a value is masked for its name; of a dict, the values are."""
    return _SECRET.search(str(name)) is not None and not isinstance(value, (dict, bool, NoneType))


_Text = Annotated[str, Field(title="Path or URL", json_schema_extra={"minLength": 1, "pattern": rf"^(?!{URL_WITH_LOGIN})"})]
# An object of another integration's block: a form shows only those that this package can name, and takes "gcs-bucket/NAME".
_CloudBlock = SkipJsonSchema[InstanceOf[Block]]
StorageChoice = Annotated[  # with a path for type checkers only: `check_choice` has made a text of it
    _Text | StorageBlock | _CloudBlock | PathObject, BeforeValidator(check_choice), WrapSerializer(_mask_settings)
]


def configured_storage(storage: StorageLike, deadline_s: float | None = None, sync: SyncConfig | None = None) -> StorageSpec:
    """Return what every process needs to open `storage`, with the retry policy of the settings.

    Args:
        storage: A path, a URL, "block-type-slug/block-name", or a block; a spec keeps its retry policy.
        deadline_s: Replaces the setting.
        sync: How the path is copied to where other machines reach it; None if it need not be.

    Raises:
        ValueError: If `sync` is given and the storage is no path.

    """
    if isinstance(storage, StorageSpec):
        return storage
    policy = TorchSettings().retry_policy()
    spec = replace(parse_storage(storage), retry=policy if deadline_s is None else replace(policy, deadline_s=deadline_s))
    if sync is None:
        return spec
    if URL.match(spec.url):
        raise ValueError(f"sync copies a directory of each node, and the storage is {spec.url}: give a local path")
    return replace(spec, options=sync.transport().options())
