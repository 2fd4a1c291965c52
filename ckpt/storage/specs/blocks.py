"""Prefect blocks as storage: configuration and credentials, never the data path."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

import botocore.session  # type: ignore[import-untyped]  # ships no types
import cloudpickle
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect_aws.credentials import AwsCredentials, MinIOCredentials
from prefect_aws.s3 import S3Bucket
from prefect_torch.ckpt.storage.protocol import StorageSpec

from .aws import find_s3
from .boto3_config import client_options, hosts_of, is_unsigned
from .cloud_blocks import cloud_spec, is_cloud_block
from .location import BLOCK_SLUGS, is_block_slug, parse_location

KINDS_OF_BLOCKS = "CheckpointStorage, LocalFileSystem, RemoteFileSystem, S3Bucket, GcsBucket or AzureBlobStorageContainer"
# Options by which s3fs signs, encrypts or pays differently.
_OF_S3FS_ALONE = ("profile", "requester_pays", "s3_additional_kwargs")
_CLOSE = 0.75


class HasSpec(Protocol):
    """A block that itself knows how its storage is opened, as `CheckpointStorage` does."""

    def spec(self) -> StorageSpec:
        """Return the specification with which a process opens the storage."""
        ...


FileSystemBlock: TypeAlias = LocalFileSystem | RemoteFileSystem | S3Bucket


def resolve_storage(storage: Any) -> StorageSpec:
    """Return the specification with which every process opens the storage that a block describes.

    Args:
        storage: "block-type-slug/block-name" of a saved block, or a block.

    Raises:
        ValueError: If there is no such block, a field of it is misspelled, or checkpoints cannot be stored with its type.

    """
    block = _load(storage) if isinstance(storage, str) and is_block_slug(storage) else storage
    refuse_misspelled_fields(block)
    if isinstance(block, LocalFileSystem):
        return spec_of(block.basepath or ".")
    if isinstance(block, RemoteFileSystem):
        return _remote_spec(block)
    if isinstance(block, S3Bucket):
        return _s3_spec(block)
    if is_cloud_block(block):
        return cloud_spec(block)
    if is_spec_holder(block):
        return block.spec()
    raise ValueError(
        f"checkpoints cannot be stored with a {type(block).__name__}: give a path, a URL, or a {KINDS_OF_BLOCKS} block"
    )


def refuse_misspelled_fields(block: Any) -> None:
    """Raise ValueError if a block, or a block in it, has a value under a name that is close to that of an unset field.

    Prefect's blocks accept any name: checkpoints would be stored elsewhere, or without the credentials.
    """
    if not isinstance(block, Block):
        return
    unset = [name for name in type(block).model_fields if name not in block.model_fields_set]
    if isinstance(block, LocalFileSystem):  # which any mapping fits
        unset += ["bucket_name", "settings"]
    for name, value in (block.model_extra or {}).items():
        if value and (nearest := get_close_matches(name, unset, 1, _CLOSE)):
            kind = type(block).__name__
            raise ValueError(f"the block {kind} has no field {name!r}, which would be ignored; is {nearest[0]!r} meant?")
    for name in type(block).model_fields:
        refuse_misspelled_fields(getattr(block, name))


def is_spec_holder(block: Any) -> TypeGuard[HasSpec]:
    """Return whether `block` itself knows how its storage is opened."""
    return isinstance(block, Block) and hasattr(block, "spec")


def credential_source_of(storage: Any) -> bytes:
    """Return the source of fresh credentials of `storage`: the name of a saved block, else the block itself.

    A block with a profile or a role gives new keys each time; a block that holds keys, only if new ones are saved in it.
    """
    name = getattr(storage, "_block_document_name", None)
    is_saved = name is not None and not storage._is_anonymous  # noqa: SLF001 - Prefect has no public name for it
    credential_source: bytes = cloudpickle.dumps(f"{storage.get_block_type_slug()}/{name}" if is_saved else storage)
    return credential_source


def spec_of(location: str) -> StorageSpec:
    """Return the specification of a path, a URL, or "block-type-slug/block-name"."""
    spec = parse_location(location)
    return resolve_storage(location) if spec is None else spec


def _load(slug: str) -> Block:
    try:
        return cast("Block", Block.load(slug, _sync=True))  # type: ignore[call-arg]  # Prefect adds the argument at run time
    except ValueError as exc:
        if not isinstance(exc.__cause__, ObjectNotFound):
            raise
        saved = ", ".join(_saved_blocks()) or "none"
        raise ValueError(f"there is no block {slug!r}; saved are: {saved}; a directory of this name is './{slug}'") from None


def _saved_blocks() -> list[str]:
    with get_client(sync_client=True) as client:
        found = client.read_block_documents(include_secrets=False)
    slugs = [(document.block_type.slug if document.block_type else "", document.name) for document in found]
    return sorted(f"{slug}/{name}" for slug, name in slugs if slug in BLOCK_SLUGS)


def _s3_spec(block: S3Bucket) -> StorageSpec:
    folder = block.bucket_folder.strip("/")
    url = f"s3://{block.bucket_name}/{folder}" if folder else f"s3://{block.bucket_name}"
    credentials = block.credentials
    parameters = credentials.aws_client_parameters
    config = parameters.config or {}
    profile = None if isinstance(credentials, MinIOCredentials) else credentials.profile_name
    region = config.get("region_name") or credentials.region_name  # the order of boto3
    region, endpoint = _region_and_endpoint(profile, region, parameters.endpoint_url, config)
    options = {"aws_region": region, "aws_endpoint_url": endpoint}
    options.update({} if is_unsigned(config) else _aws_keys(credentials))
    options.update(_tls_options(parameters.verify_cert_path or parameters.verify))
    options.update(client_options(config, block.bucket_name, endpoint))
    return StorageSpec(url, {name: value for name, value in options.items() if value})


def _region_and_endpoint(
    profile: str | None, region: str | None, endpoint: str | None, config: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Return those of a block, or of its profile and settings, as boto3 finds them; other machines may lack the profile.

    Raises:
        ValueError: If this machine lacks it.

    """
    hosts = hosts_of(config)
    if profile is None:
        if endpoint is not None or not hosts:
            return region, endpoint
        region = region or os.environ.get("AWS_REGION")  # as without a block
    return find_s3(botocore.session.Session(profile=profile), region, endpoint, **hosts)


def _tls_options(verify: Any) -> dict[str, str | None]:
    """Return the options for boto3's `verify`: False, or a file of certificates, read since other machines may lack it."""
    return {
        "allow_invalid_certificates": "true" if verify is False else None,
        "root_certificate": None if verify is None or isinstance(verify, bool) else Path(verify).read_text(),
    }


def _aws_keys(credentials: AwsCredentials | MinIOCredentials) -> dict[str, str | None]:
    """Return the block's keys, those of its profile or role, or none, so that the machine's own are used."""
    if isinstance(credentials, MinIOCredentials):
        return {
            "aws_access_key_id": credentials.minio_root_user,
            "aws_secret_access_key": credentials.minio_root_password.get_secret_value(),
        }
    if credentials.profile_name is None and credentials.assume_role_arn is None:
        secret = credentials.aws_secret_access_key
        return {
            "aws_access_key_id": credentials.aws_access_key_id,
            "aws_secret_access_key": None if secret is None else secret.get_secret_value(),
            "aws_session_token": credentials.aws_session_token,
        }
    found = credentials.get_boto3_session().get_credentials()
    if found is None:  # the profile holds no keys, and boto3 does not read the variables where there is a profile
        return {}
    keys = found.get_frozen_credentials()
    return {
        "aws_access_key_id": keys.access_key,
        "aws_secret_access_key": keys.secret_key,
        "aws_session_token": keys.token,
    }


def _remote_spec(block: RemoteFileSystem) -> StorageSpec:
    """Return an fsspec block's location; s3fs' option names for S3 become the object store's.

    Raises:
        ValueError: If one of the options would make s3fs store or find objects differently.

    """
    settings = dict(block.settings)
    scheme, _, rest = block.basepath.partition("://")
    if scheme not in ("s3", "s3a"):
        return StorageSpec(block.basepath.rstrip("/"), settings)
    if ignored := [name for name in _OF_S3FS_ALONE if settings.get(name)]:
        raise ValueError(
            f"checkpoints in {block.basepath} are not stored through s3fs, so the block's settings {', '.join(ignored)} have "
            "no effect: remove them, or use an S3Bucket block"
        )
    client = {**(settings.get("client_kwargs") or {}), **settings}
    config = settings.get("config_kwargs") or {}
    region = client.get("region_name") or config.get("region_name")
    region, endpoint = _region_and_endpoint(None, region, client.get("endpoint_url"), config)
    options = {
        "aws_access_key_id": client.get("key") or client.get("aws_access_key_id"),
        "aws_secret_access_key": client.get("secret") or client.get("aws_secret_access_key"),
        "aws_session_token": client.get("token") or client.get("aws_session_token"),
        "aws_endpoint_url": endpoint,
        "aws_region": region,
        "aws_skip_signature": "true" if client.get("anon") else None,
        **client_options(config, rest.partition("/")[0], endpoint),
        **_tls_options(client.get("verify")),
    }
    return StorageSpec(block.basepath.rstrip("/"), {name: str(value) for name, value in options.items() if value})
