"""The storage that a user chooses in a form or in code, and the settings of a site for all storages."""

import re
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Annotated, Any

from prefect.settings.base import PrefectBaseSettings, build_settings_config
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.storage.blocks import StorageBlock
from prefect_torch.ckpt.storage.location import URL_WITH_LOGIN, is_block_slug, refuse_password
from prefect_torch.ckpt.storage.opening import StorageLike, parse_storage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, WrapSerializer

_FIELDS_OF_BLOCKS = {"location", "file_system", "basepath", "bucket_name"}
_SECRET = re.compile(r"pass|secret|token|credential|auth|(^|_)key$", re.IGNORECASE)
_MASK = "**********"  # pydantic's, of a SecretStr


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
    raise ValueError(
        f"checkpoints cannot be stored with a {type(storage).__name__}: give a path, a URL, 'block-type-slug/block-name', or a "
        "CheckpointStorage, LocalFileSystem, RemoteFileSystem or S3Bucket block"
    )


def _refuse_passwords(block: Any) -> None:
    fields = block if isinstance(block, Mapping) else dict(block)
    for name in _FIELDS_OF_BLOCKS & fields.keys():
        if isinstance(fields[name], str):
            refuse_password(fields[name])
        elif isinstance(fields[name], (StorageBlock, Mapping)):
            _refuse_passwords(fields[name])


def _mask_settings(storage: Any, handler: SerializerFunctionWrapHandler) -> Any:
    """Return a block as Prefect stores and shows it, masked: the settings of a RemoteFileSystem have no secret types."""
    return _masked(handler(storage))


def _masked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _MASK if _SECRET.search(name) and isinstance(it, str) else _masked(it) for name, it in value.items()}


_Text = Annotated[str, Field(title="Path or URL", json_schema_extra={"minLength": 1, "pattern": rf"^(?!{URL_WITH_LOGIN})"})]
StorageChoice = Annotated[_Text | StorageBlock, BeforeValidator(check_choice), WrapSerializer(_mask_settings)]


class TorchSettings(PrefectBaseSettings):
    """Settings of this package: `PREFECT_INTEGRATIONS_TORCH_…`, or `[integrations.torch]` in prefect.toml."""

    model_config = build_settings_config(("integrations", "torch"))

    storage_deadline_s: float = Field(
        default=RetryPolicy().deadline_s,
        ge=0,
        description="For how many seconds operations on a storage that does not answer are retried.",
    )
    storage_first_wait_s: float = Field(
        default=RetryPolicy().first_wait_s, ge=0, description="The longest first pause between two tries, in seconds."
    )
    storage_longest_wait_s: float = Field(
        default=RetryPolicy().longest_wait_s, ge=0, description="What a pause between two tries grows to at most, in seconds."
    )

    def retry_policy(self) -> RetryPolicy:
        """Return the retry policy of storage operations."""
        return RetryPolicy(self.storage_deadline_s, self.storage_first_wait_s, self.storage_longest_wait_s)


def configured_storage(storage: StorageLike, deadline_s: float | None = None) -> StorageSpec:
    """Return what every process needs to open `storage`, with the retry policy of the settings.

    Args:
        storage: A path, a URL, "block-type-slug/block-name", or a block; a spec keeps its retry policy.
        deadline_s: Replaces the setting.

    """
    if isinstance(storage, StorageSpec):
        return storage
    policy = TorchSettings().retry_policy()
    return replace(parse_storage(storage), retry=policy if deadline_s is None else replace(policy, deadline_s=deadline_s))
