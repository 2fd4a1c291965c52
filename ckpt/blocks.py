"""The Prefect block with the location of checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

from prefect.blocks.core import Block
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect_aws.s3 import S3Bucket
from prefect_torch.ckpt.checkpoint_store import CheckpointStore
from prefect_torch.ckpt.storage.backends import open_spec
from prefect_torch.ckpt.storage.probe import StorageProbe, StorageUnfitError, probe_storage
from prefect_torch.ckpt.storage.protocol import INTERACTIVE_RETRY_POLICY, StorageSpec
from prefect_torch.ckpt.storage.specs.blocks import FileSystemBlock, refuse_misspelled_fields, resolve_storage, spec_of
from prefect_torch.ckpt.storage.specs.location import normalized
from pydantic import Field, HttpUrl, SecretStr, field_validator

_TYPE = "block_type_slug"  # which Prefect adds; its blocks take any other field, too, and ignore it

__all__ = ["CheckpointStorage", "StorageBlock", "StorageUnfitError"]


class CheckpointStorage(Block):
    """Configure the location of trainings' checkpoints.

    Example:
        Load a saved block, check that the storage does what trainings need, and pass it to a training:
        ```python
        from prefect_torch.ckpt.blocks import CheckpointStorage
        from prefect_torch.flows import RunConfig, train

        storage = CheckpointStorage.load("BLOCK_NAME")
        storage.check()
        train("my_training:train_fn", run=RunConfig(name="first", storage=storage))
        print(storage.get_store("first").latest())
        ```

    """

    _block_type_name = "Checkpoint Storage"
    _block_type_slug = "checkpoint-storage"
    _description = "Where trainings keep their checkpoints: a directory, a bucket, or a path below another block."
    _documentation_url = cast("HttpUrl", "https://docs.prefect.io/v3/concepts/blocks")
    # Prefect accepts no data: URL. This one is pinned to a commit, and a server that shows Prefect's own file systems shows it.
    _logo_url = cast("HttpUrl", LocalFileSystem._logo_url)  # noqa: SLF001 - Prefect has no public name for it

    location: str = Field(
        default="",
        title="Location",
        description="A local path or a URL such as s3://bucket/prefix; a path below the file system's own location when one is "
        "chosen.",
    )
    file_system: FileSystemBlock | None = Field(
        default=None,
        title="File system",
        description="The block that holds the location and the credentials, if any is needed.",
    )

    password: SecretStr | None = Field(
        default=None,
        title="Password",
        description="For a location with a user, such as sftp://user@host/path; only when no file system is chosen.",
    )

    @field_validator("file_system", mode="before")
    @classmethod
    def _choose_type(cls, value: Any) -> Any:
        """Choose the type by the fields: Prefect stores a nested block without its type, and all fit a LocalFileSystem."""
        if not isinstance(value, Mapping):
            return value
        if "bucket_name" in value:
            return S3Bucket.model_validate(value)
        return (RemoteFileSystem if "settings" in value else LocalFileSystem).model_validate(value)

    def check(self) -> StorageProbe:
        """Write, list, read and delete small objects and one of 8 MiB here, and return the steps and their durations.

        No object remains. Costs some 20 requests; a storage that does not answer fails after about twenty seconds.

        Raises:
            StorageUnfitError: If a step fails; it names the step, the reason and the remedy.
            ValueError: If the location is invalid.

        """
        return probe_storage(open_spec(replace(normalized(self.spec()), retry=INTERACTIVE_RETRY_POLICY)))

    def get_store(self, run: str) -> CheckpointStore:
        """Open the checkpoints of `run` in this storage; sends no request.

        Args:
            run: The run's name, as in `RunConfig(name=...)`.

        Raises:
            ValueError: If the location or the name is invalid.

        """
        return CheckpointStore.open(self, run)

    def spec(self) -> StorageSpec:
        """Return the specification with which a process opens this storage.

        Raises:
            ValueError: If the location is invalid, a field is unknown, checkpoints cannot be stored with the file system, or a
                password is given with a file system, or with a location without a user.

        """
        refuse_misspelled_fields(self)
        if unknown := [repr(name) for name, value in (self.model_extra or {}).items() if value and name != _TYPE]:
            lack = "no location, and " if not self.location and self.file_system is None else ""
            fields = ", ".join(type(self).model_fields)
            raise ValueError(f"the block has {lack}{', '.join(unknown)}, which is none of its fields: {fields}")
        if self.file_system is None:
            spec = spec_of(self.location)
            return spec if self.password is None else _with_password(spec, self.password.get_secret_value())
        if self.password is not None:
            raise ValueError("the block has a file system and a password: the password belongs to the file system's own fields")
        spec = resolve_storage(self.file_system)
        below = self.location.strip("/")
        return StorageSpec(f"{spec.url.rstrip('/')}/{below}", spec.options) if below else spec


def _with_password(spec: StorageSpec, password: str) -> StorageSpec:
    if "@" not in spec.url.partition("://")[2].partition("/")[0]:
        raise ValueError(
            f"the block has a password, but its location names no user: {spec.url} should look like sftp://user@host/path"
        )
    return replace(spec, options={**spec.options, "password": password})


StorageBlock: TypeAlias = CheckpointStorage | FileSystemBlock
