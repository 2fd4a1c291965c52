"""Abandoned multipart uploads to S3: their parts take space that no listing of objects shows."""

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from obstore.store import S3Store

from .waits import Waits, waits_of

_TRIES = 3  # of a request
_TRUE = ("1", "true", "on", "yes", "y")  # as object_store reads it
_logger = logging.getLogger(__name__)
_logged: set[str] = set()  # the prefixes for which this process has logged it: a training prunes again and again


def abort_stale_uploads(store: S3Store, prefix: str, older_than_s: float, deadline_s: float) -> int:
    """Abort the uploads below `prefix` without a new part for `older_than_s` by the server's clock; return their number.

    Costs a request per thousand uploads, and one for each that began so long ago, through boto3, since object_store cannot list
    them. If a server or a policy does not allow listing them, or no byte of a response arrives within `deadline_s` and three
    tries, they are left to the bucket's lifecycle rule
    (https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpu-abort-incomplete-mpu-lifecycle-config.html).
    """
    import botocore.exceptions  # type: ignore[import-untyped]  # noqa: PLC0415 - takes a while to import

    below = "/".join(part for part in (store.prefix, prefix) if part)
    try:
        http: dict[str, Any] = dict(store.client_options or {})
        with _verify(http) as verify:
            client = _client(store, verify, http.get("proxy_url"), _waits(store, deadline_s))
            with suppress(client.exceptions.NoSuchUpload):  # rclone's error for a bucket without uploads
                return _abort_below(client, store, below, timedelta(seconds=older_than_s))
            return 0
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as exc:
        level = logging.DEBUG if below in _logged else logging.INFO
        _logged.add(below)
        _logger.log(
            level, "unfinished uploads to %s cannot be aborted, and are left to the bucket's lifecycle rule: %s", below, exc
        )
        return 0


def _waits(store: S3Store, deadline_s: float) -> Waits:
    """Return the waits of the store's own client, cut so that all tries end with the deadline; a try has a second at least."""
    waits, longest_s = waits_of(store), max(1.0, deadline_s / _TRIES)
    return Waits(min(waits.connect_s, longest_s), min(waits.read_s, longest_s))


def _abort_below(client: Any, store: S3Store, below: str, age: timedelta) -> int:
    aborted, payer = 0, _payer(store)
    pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=store.config.get("bucket"), Prefix=below, **payer)
    for page in pages:
        date = page["ResponseMetadata"]["HTTPHeaders"].get("date")  # RFC 9110, 6.6.1: a server without a clock sends none
        now = datetime.now(timezone.utc) if date is None else parsedate_to_datetime(date)
        for upload in page.get("Uploads", []):
            if upload["Initiated"] <= now - age and _newest_part(client, page["Bucket"], upload, payer) <= now - age:
                with suppress(client.exceptions.NoSuchUpload):  # it was completed, or aborted by another process
                    client.abort_multipart_upload(
                        Bucket=page["Bucket"], Key=upload["Key"], UploadId=upload["UploadId"], **payer
                    )
                    aborted += 1
    return aborted


def _payer(store: S3Store) -> dict[str, str]:
    """Return the parameter that a requester-pays bucket demands, if object_store is configured to send it."""
    pays = dict(store.config).get("request_payer") or os.environ.get("AWS_REQUEST_PAYER", "")
    return {"RequestPayer": "requester"} if str(pays).lower() in _TRUE else {}


def _newest_part(client: Any, bucket: str, upload: Mapping[str, Any], payer: Mapping[str, str]) -> datetime:
    """Return when the newest part was stored; if there is none, or a server or a policy does not list them, when it began."""
    import botocore.exceptions  # noqa: PLC0415 - takes a while to import

    asked = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"], **payer}
    pages = client.get_paginator("list_parts").paginate(**asked)
    began: datetime = upload["Initiated"]
    try:
        return max((part["LastModified"] for page in pages for part in page.get("Parts", [])), default=began)
    except botocore.exceptions.HTTPClientError:  # no answer is no reason to abort what may still be under way
        raise
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
        return began


@contextmanager
def _verify(http: Mapping[str, Any]) -> Iterator[bool | str]:
    """Yield boto3's `verify` for the settings of object_store's client: boto3 takes certificates from a file alone."""
    certificates = http.get("root_certificate")
    if certificates is None:
        yield str(http.get("allow_invalid_certificates")).lower() != "true"
        return
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(certificates if isinstance(certificates, bytes) else str(certificates).encode())
        file.flush()
        yield file.name


def _client(store: S3Store, verify: bool | str, proxy: str | None, waits: Waits) -> Any:
    import boto3  # type: ignore[import-untyped]  # noqa: PLC0415 - takes a while to import
    from botocore.config import Config  # type: ignore[import-untyped]  # noqa: PLC0415 - takes a while to import

    config: dict[str, Any] = dict(store.config)
    is_virtual = str(config.get("virtual_hosted_style_request")).lower() == "true"
    endpoint = config.get("endpoint")
    if is_virtual and endpoint is not None:  # object_store wants the bucket in it, and boto3 itself puts it there
        endpoint = endpoint.replace(f"://{config.get('bucket')}.", "://", 1)
    return boto3.Session().client(  # the process's own session would keep the first content of a credentials file
        "s3",
        endpoint_url=endpoint,
        region_name=config.get("region"),
        aws_access_key_id=config.get("access_key_id"),
        aws_secret_access_key=config.get("secret_access_key"),
        aws_session_token=config.get("session_token"),
        verify=verify,
        config=Config(
            s3={"addressing_style": "virtual" if is_virtual else "path"},
            retries={"total_max_attempts": _TRIES},
            connect_timeout=waits.connect_s,
            read_timeout=waits.read_s,
            proxies=None if proxy is None else {"http": proxy, "https": proxy},
        ),
    )
