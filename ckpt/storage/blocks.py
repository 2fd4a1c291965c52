"""Prefect blocks as storage: configuration and credentials, never the data path."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias, cast

import cloudpickle
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect_aws.credentials import AwsCredentials, MinIOCredentials
from prefect_aws.s3 import S3Bucket
from pydantic import Field, HttpUrl, SecretStr, field_validator

from .backends import open_spec
from .location import BLOCK_SLUGS, is_block_slug, normalized, parse_location
from .probe import PROBE_RETRY_POLICY, StorageProbe, probe_storage
from .protocol import StorageSpec


class CheckpointStorage(Block):
    """Configure the location of trainings' checkpoints.

    Example:
        Load a saved block, check that the storage does what trainings need, and pass it to a training:
        ```python
        from prefect_torch.ckpt.storage.blocks import CheckpointStorage
        from prefect_torch.flows import RunConfig, train

        storage = CheckpointStorage.load("NAME")
        storage.check()
        train("my_training:train_fn", run=RunConfig(storage=storage))
        ```

    """

    _block_type_name = "Checkpoint Storage"
    _block_type_slug = "checkpoint-storage"
    _description = "Where trainings keep their checkpoints: a directory, a bucket, or a path below another block."
    _documentation_url = cast("HttpUrl", "https://docs.prefect.io/v3/concepts/blocks")
    # Prefect takes no data: URL; this one is pinned to a commit, and every server that shows its own file systems shows it.
    _logo_url = cast("HttpUrl", LocalFileSystem._logo_url)  # noqa: SLF001 - Prefect has no public name for it

    location: str = Field(
        default="",
        title="Location",
        description="A local path or a URL such as s3://bucket/prefix; a path below the file system's own location when one is "
        "chosen.",
    )
    file_system: LocalFileSystem | RemoteFileSystem | S3Bucket | None = Field(
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
    def _tell_apart(cls, value: Any) -> Any:
        """Choose the type by the fields: Prefect stores a nested block without it, and any block fits a LocalFileSystem."""
        if not isinstance(value, Mapping):
            return value
        if "bucket_name" in value:
            return S3Bucket.model_validate(value)
        return (RemoteFileSystem if "settings" in value else LocalFileSystem).model_validate(value)

    def check(self) -> StorageProbe:
        """Write, list, read and delete small objects there, all of which are removed; return the steps and their durations.

        Costs a dozen requests; a storage that does not answer fails after about twenty seconds.

        Raises:
            StorageUnfitError: If a step fails; it names the step, the reason and the remedy.
            ValueError: If the location is invalid.

        """
        return probe_storage(open_spec(replace(normalized(self.spec()), retry=PROBE_RETRY_POLICY)))

    def spec(self) -> StorageSpec:
        """Return the specification with which a process opens this storage."""
        if self.file_system is None:
            spec = _spec_of(self.location)
            return spec if self.password is None else _with_password(spec, self.password.get_secret_value())
        if self.password is not None:
            raise ValueError("the block has a file system and a password: the password belongs to the file system's own fields")
        spec = resolve_storage(self.file_system)
        below = self.location.strip("/")
        return StorageSpec(f"{spec.url.rstrip('/')}/{below}", spec.options) if below else spec


def _with_password(spec: StorageSpec, password: str) -> StorageSpec:
    if "@" not in spec.url.partition("://")[2].partition("/")[0]:
        raise ValueError(
            f"the block has a password, but its location names no user: {spec.url} should be as sftp://user@host/path"
        )
    return replace(spec, options={**spec.options, "password": password})


StorageBlock: TypeAlias = CheckpointStorage | LocalFileSystem | RemoteFileSystem | S3Bucket


def resolve_storage(storage: Any) -> StorageSpec:
    """Return the specification with which every process opens the storage that a block describes.

    Args:
        storage: "block-type-slug/block-name" of a saved block, or a block.

    Raises:
        ValueError: If there is no such block, or checkpoints cannot be stored with its type.

    """
    block = _load(storage) if isinstance(storage, str) and is_block_slug(storage) else storage
    if isinstance(block, CheckpointStorage):
        return block.spec()
    if isinstance(block, LocalFileSystem):
        return _spec_of(block.basepath or ".")
    if isinstance(block, RemoteFileSystem):
        return _remote_spec(block)
    if isinstance(block, S3Bucket):
        return _s3_spec(block)
    raise ValueError(
        f"checkpoints cannot be stored with a {type(block).__name__}: give a path, a URL, or a CheckpointStorage, "
        "LocalFileSystem, RemoteFileSystem or S3Bucket block"
    )


def credential_source_of(storage: Any) -> bytes:
    """Return the source of fresh credentials of `storage`: the name of a saved block, else the block itself.

    A block with a profile or a role gives new keys each time; one with keys of its own only if new ones are saved in it.
    """
    name = getattr(storage, "_block_document_name", None)
    is_saved = name is not None and not storage._is_anonymous  # noqa: SLF001 - Prefect has no public name for it
    credential_source: bytes = cloudpickle.dumps(f"{storage.get_block_type_slug()}/{name}" if is_saved else storage)
    return credential_source


def _spec_of(location: str) -> StorageSpec:
    spec = parse_location(location)
    return resolve_storage(location) if spec is None else spec


def _load(slug: str) -> Block:
    try:
        return cast("Block", Block.load(slug, _sync=True))  # type: ignore[call-arg]  # Prefect adds the argument at run time
    except ValueError as exc:
        if not isinstance(exc.__cause__, ObjectNotFound):
            raise
        saved = ", ".join(_saved_blocks()) or "none"
        raise ValueError(f"there is no block {slug!r}; saved are: {saved}; a directory of this name is './{slug}'") from exc


def _saved_blocks() -> list[str]:
    with get_client(sync_client=True) as client:
        found = client.read_block_documents(include_secrets=False)
    slugs = [(document.block_type.slug if document.block_type else "", document.name) for document in found]
    return sorted(f"{slug}/{name}" for slug, name in slugs if slug in BLOCK_SLUGS)


def _s3_spec(block: S3Bucket) -> StorageSpec:
    folder = block.bucket_folder.strip("/")
    url = f"s3://{block.bucket_name}/{folder}" if folder else f"s3://{block.bucket_name}"
    credentials = block.credentials
    options = {
        "aws_region": credentials.region_name,
        "aws_endpoint_url": credentials.aws_client_parameters.endpoint_url,
    }
    if isinstance(credentials, MinIOCredentials):
        options["aws_access_key_id"] = credentials.minio_root_user
        options["aws_secret_access_key"] = credentials.minio_root_password.get_secret_value()
    else:
        options.update(_aws_keys(credentials))
    parameters = credentials.aws_client_parameters
    if not parameters.verify:
        options["allow_invalid_certificates"] = "true" if parameters.verify is False else None
    if ((parameters.config or {}).get("s3") or {}).get("addressing_style") == "virtual":
        options["aws_virtual_hosted_style_request"] = "true"
    return StorageSpec(url, {name: value for name, value in options.items() if value})


def _aws_keys(credentials: AwsCredentials) -> dict[str, str | None]:
    """Return the block's keys, those of its profile or role, or none, so that the machine's own are used."""
    if credentials.profile_name is None and credentials.assume_role_arn is None:
        secret = credentials.aws_secret_access_key
        return {
            "aws_access_key_id": credentials.aws_access_key_id,
            "aws_secret_access_key": None if secret is None else secret.get_secret_value(),
            "aws_session_token": credentials.aws_session_token,
        }
    keys = credentials.get_boto3_session().get_credentials().get_frozen_credentials()
    return {
        "aws_access_key_id": keys.access_key,
        "aws_secret_access_key": keys.secret_key,
        "aws_session_token": keys.token,
    }


def _remote_spec(block: RemoteFileSystem) -> StorageSpec:
    """Return an fsspec block's location; s3fs' option names for S3 become the object store's."""
    settings = dict(block.settings)
    if block.basepath.partition("://")[0] not in ("s3", "s3a"):
        return StorageSpec(block.basepath.rstrip("/"), settings)
    client = {**(settings.get("client_kwargs") or {}), **settings}
    options = {
        "aws_access_key_id": client.get("key") or client.get("aws_access_key_id"),
        "aws_secret_access_key": client.get("secret") or client.get("aws_secret_access_key"),
        "aws_session_token": client.get("token") or client.get("aws_session_token"),
        "aws_endpoint_url": client.get("endpoint_url"),
        "aws_region": client.get("region_name"),
        "aws_skip_signature": "true" if client.get("anon") else None,
    }
    return StorageSpec(block.basepath.rstrip("/"), {name: str(value) for name, value in options.items() if value})
