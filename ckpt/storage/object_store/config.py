"""From a URL and options to an open bucket: endpoint, region and credentials as the clouds' own tools find them."""

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import obstore.exceptions
import obstore.store
from prefect_torch.ckpt.storage.specs.aws import find_s3, has_credentials, has_virtual_hosts_alone, virtual_hosts
from prefect_torch.ckpt.storage.specs.location import ENDPOINT_VARIABLES

from .errors import first_reason

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Whole operations are retried around these. A small request has few, so that missing credentials are told soon; a part of a
# large object has some half a minute of pauses, lest a second in which a server refuses it transfers the whole object again.
_REQUEST_RETRIES: Any = {"max_retries": 3}
_PART_RETRIES: Any = {
    "max_retries": 12,
    "backoff": {"init_backoff": timedelta(milliseconds=500), "max_backoff": timedelta(seconds=5), "base": 3.0},
}
# From when a request was first sent, which a part on a slow line may have been a minute ago; a retry is not signed anew.
_LONGEST_RETRIES_S = 30.0
_LONGEST_PART_RETRIES_S = 300.0
# A download is one request: only a stalled one may be cut off, else a large object on a slow line could never be read.
_CLIENT_OPTIONS = {"timeout": "1d", "connect_timeout": "10s"}
_LONGEST_WAIT_S = 120.0
# The wait for the response to an upload begins before its first byte is sent, and the line may be shared by hundreds of others.
_UPLOAD_WAIT_S = 600.0
_DIRECTORY_BUCKET = "--x-s3"
_VIRTUAL = "aws_virtual_hosted_style_request"
# obstore asks for credentials again 5 min before they reach this age; botocore gives none that end within 10 min.
_CREDENTIALS_LAST = timedelta(minutes=10)
_HINTS = {  # by a part of object_store's text
    "Unable to decode service account file": (
        "; object_store knows neither workload identity federation nor impersonation: give a service account's key, in a "
        "GcsBucket block or by GOOGLE_APPLICATION_CREDENTIALS, or use the login of `gcloud auth application-default login` "
        "or of the machine"
    ),
    "Account must be specified": (
        "; the URL does not name the account: give AZURE_STORAGE_ACCOUNT_NAME, or an AzureBlobStorageContainer block"
    ),
}
_ENDPOINT_VARIABLES = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "GOOGLE_BASE_URL")
_ENDPOINT = re.compile(r"https?://[^\s/]\S*", re.IGNORECASE)  # any other makes object_store panic, with a BaseException
# object_store knows several names for one setting of S3 and rejects two of them together.
_ALIASES = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "token": "aws_session_token",
    "aws_token": "aws_session_token",
    "region": "aws_region",
    "default_region": "aws_region",
    "aws_default_region": "aws_region",
    "endpoint": "aws_endpoint_url",
    "endpoint_url": "aws_endpoint_url",
    "aws_endpoint": "aws_endpoint_url",
    "skip_signature": "aws_skip_signature",
}
# Settings of the HTTP client: among a store's own settings, they make obstore panic, with a BaseException
# (https://github.com/developmentseed/obstore/pull/755).
_OF_THE_CLIENT = {
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "read_timeout",
    "root_certificate",
    "timeout",
    "user_agent",
}


class ObjectStores(NamedTuple):
    """One bucket, opened for each kind of request.

    Attributes:
        quick: For small requests.
        reading: For the ranges of a large object, which are retried longer.
        uploading: For data, whose requests are retried longer, and their responses waited for longer.

    """

    quick: "ObjectStore"
    reading: "ObjectStore"
    uploading: "ObjectStore"


def open_object_stores(url: str, options: Mapping[str, str], deadline_s: float) -> ObjectStores:
    """Open the bucket at `url`; costs no request.

    Args:
        url: The bucket's URL.
        options: See `ObstoreStorage`.
        deadline_s: The longest wait for a byte of a response, 120 s at most, and the longest retries of a part, 300 s at most.

    Raises:
        ValueError: If the url or an option is invalid.

    """
    is_s3 = url.startswith(("s3://", "s3a://"))
    config: dict[str, Any] = {}
    client: Any = dict(_CLIENT_OPTIONS)
    for option, value in options.items():
        name = option.lower()
        if (setting := name.removeprefix("aws_")) in _OF_THE_CLIENT:
            client[setting] = value
        else:
            config[_ALIASES.get(name, name) if is_s3 else name] = value
    provider = _complete_s3(config, url.split("/")[2]) if is_s3 else _given_azure_login(config)
    is_directory_bucket = is_s3 and url.split("/")[2].endswith(_DIRECTORY_BUCKET)
    if is_directory_bucket and "aws_endpoint_url" not in config and not _is_set(config, "aws_s3_express", "s3_express"):
        config["aws_s3_express"] = "true"  # such a bucket has a host and sessions of its own
    if is_s3 and not _ENDPOINT.fullmatch(endpoint := config.get("aws_endpoint_url") or "https://s3"):
        raise ValueError(
            f"{url} cannot be opened: {endpoint.rpartition('@')[2]!r} is no address of a server: write http://HOST:PORT or "
            "https://HOST"
        )
    if is_s3 and "root_certificate" not in client and (bundle := os.environ.get("AWS_CA_BUNDLE")):
        client["root_certificate"] = _read_certificates(bundle)
    endpoints = [] if is_s3 else [os.environ.get(name, "") for name in _ENDPOINT_VARIABLES]  # which object_store reads
    if any(str(value).startswith("http://") for value in (*config.values(), *endpoints)):
        client["allow_http"] = "true"
    open_url: Any = obstore.store.from_url  # it has one overload per service, and the url selects the service

    few = {"retry_timeout": timedelta(seconds=min(deadline_s / 4, _LONGEST_RETRIES_S)), **_REQUEST_RETRIES}
    many = {"retry_timeout": timedelta(seconds=min(deadline_s, _LONGEST_PART_RETRIES_S)), **_PART_RETRIES}

    def open_waiting(longest_s: float, retries: Any) -> "ObjectStore":
        store: ObjectStore = open_url(
            re.sub("^gcs://", "gs://", url),
            config=config,
            client_options={"read_timeout": f"{longest_s:.0f}s", **client},
            retry_config=retries,
            credential_provider=provider,
        )
        return store

    try:
        wait_s = max(1.0, min(deadline_s, _LONGEST_WAIT_S))
        return ObjectStores(
            quick=open_waiting(wait_s, few), reading=open_waiting(wait_s, many), uploading=open_waiting(_UPLOAD_WAIT_S, many)
        )
    except (obstore.exceptions.BaseError, ValueError) as exc:  # the latter is for a URL, and does not name it
        hint = next((hint for reason, hint in _HINTS.items() if reason in str(exc)), "")
        raise ValueError(f"{url} cannot be opened: {first_reason(exc)}{hint}") from exc


def _read_certificates(bundle: str) -> str:
    try:
        return Path(bundle).read_text()
    except OSError as exc:
        raise ValueError(f"AWS_CA_BUNDLE names a file that cannot be read: {exc}") from exc


def promises_key_order(store: "ObjectStore") -> bool:
    """Return whether the service documents that it lists in the order of keys; other servers' listings must prove it.

    S3 does (https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html), except for directory buckets; so does
    Google Cloud Storage (https://cloud.google.com/storage/docs/json_api/v1/objects/list).
    """
    if isinstance(store, obstore.store.S3Store):
        return "endpoint" not in store.config and not str(store.config.get("bucket")).endswith(_DIRECTORY_BUCKET)
    return isinstance(store, obstore.store.GCSStore)


def _complete_s3(config: dict[str, Any], bucket: str) -> Any:
    """Fill in the endpoint and the region as AWS' own tools find them; return a provider of credentials.

    None leaves them to object_store: those in variables, or an unsigned request.

    Raises:
        ValueError: If the AWS profile does not exist, or it, its login or a variable is invalid.

    """
    has_endpoint = "aws_endpoint_url" in config
    provider = _find_place_and_login(config)
    endpoint = config.get("aws_endpoint_url")
    is_virtual = not has_endpoint and config.get(_VIRTUAL) == "true"  # a block's; an endpoint in the options has the bucket
    if is_virtual or has_virtual_hosts_alone(bucket, endpoint):
        config.pop(_VIRTUAL, None)
        config.update(virtual_hosts(bucket, endpoint))
    return provider


def _find_place_and_login(config: dict[str, Any]) -> Any:
    for name, variables in (("aws_endpoint_url", ENDPOINT_VARIABLES), ("aws_region", ("AWS_REGION",))):
        if value := next(filter(None, map(os.environ.get, variables)), None):
            config.setdefault(name, value)
    has_login = _is_set(config, "aws_access_key_id", "aws_skip_signature") or "aws_web_identity_token_file" in config
    if has_login and {"aws_endpoint_url", "aws_region"} <= config.keys():
        return _given_keys(config)
    import botocore.session  # type: ignore[import-untyped]  # noqa: PLC0415 - ships no types, takes a while to import

    session = botocore.session.Session()
    if has_login and session.profile is not None and session.profile not in session.available_profiles:
        session = botocore.session.Session(session_vars={"profile": (None, None, None, None)})  # variables are copied
    region, endpoint = find_s3(session, config.get("aws_region"), config.get("aws_endpoint_url"))
    config.setdefault("aws_region", region or "us-east-1")
    if endpoint is not None:
        config.setdefault("aws_endpoint_url", endpoint)
    return _given_keys(config) if has_login else _from_boto3(session)


def _is_set(config: Mapping[str, Any], *names: str) -> bool:
    return any(config.get(name) or os.environ.get(name.upper()) for name in names)


def _given_keys(config: Mapping[str, Any]) -> Any:
    """Return a provider of the keys in the options, or None; object_store would add the token of AWS_SESSION_TOKEN to them."""
    keys = {name: config.get(f"aws_{name}") for name in ("access_key_id", "secret_access_key")}
    if not all(keys.values()):
        return None
    return lambda: {**keys, "token": config.get("aws_session_token") or None, "expires_at": None}


def _from_boto3(session: Any) -> Any:
    """Return a provider of the credentials that boto3 finds (profiles, SSO, roles; they refresh), or None if it finds none.

    Raises:
        LoginError: If the login of the AWS profile is invalid.

    """
    return partial(_fetch, session) if has_credentials(session) else None  # object_store itself looks for a role of the machine


def _fetch(session: Any) -> Any:
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - takes a while to import

    return Boto3CredentialProvider(session, ttl=_CREDENTIALS_LAST)()  # the session caches the credentials that it has found


def _given_azure_login(config: Mapping[str, Any]) -> Any:
    """Return a provider of the account key or SAS in the options, or None; object_store prefers several variables to them."""
    for option, name in (("azure_storage_account_key", "access_key"), ("azure_storage_sas_key", "sas_token")):
        if value := config.get(option):
            return lambda: {name: value, "expires_at": None}
    return None
