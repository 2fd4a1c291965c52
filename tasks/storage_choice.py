"""The storage that a person chooses in a form or writes down: a path, a URL, a saved block."""

from collections.abc import Mapping
from os import PathLike
from typing import Annotated, Any

from prefect_torch.ckpt.blocks import StorageBlock
from prefect_torch.ckpt.opening import is_block_slug, parse_storage
from pydantic import BeforeValidator, Field

_FIELDS_OF_BLOCKS = {"location", "file_system", "basepath", "bucket_name"}


def check_choice(storage: Any) -> Any:
    """Return `storage`, which may be one as far as its words tell; nothing is opened and no block is loaded.

    Raises:
        ValueError: If it cannot be.

    """
    if isinstance(storage, PathLike):
        return parse_storage(storage).url
    if isinstance(storage, str):
        if not is_block_slug(storage):
            parse_storage(storage)
        return storage
    # Else what has no field of any block would be taken for a LocalFileSystem, which needs none: the working folder.
    if isinstance(storage, StorageBlock) or (isinstance(storage, Mapping) and _FIELDS_OF_BLOCKS & storage.keys()):
        return storage
    raise ValueError(
        f"checkpoints cannot be stored with a {type(storage).__name__}: give a path, a URL, 'block-type-slug/block-name', or a "
        "CheckpointStorage, LocalFileSystem, RemoteFileSystem or S3Bucket block"
    )


StorageChoice = Annotated[
    Annotated[str, Field(title="Path or URL", json_schema_extra={"minLength": 1})] | StorageBlock, BeforeValidator(check_choice)
]
