"""S3, Google Cloud Storage and Azure through obstore, the Python binding of Rust's object_store."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
import obstore.exceptions
import obstore.store
import xxhash

from .errors import StorageError
from .keys import check_key
from .retry import CredentialsExpiredError, classify
from .storage import ObjectInfo, Transfer

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

_PART_BYTES = 8 * 2**20
_MAX_PARTS = 10_000  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_CONCURRENT_PARTS = 4
_DELETE_AT_ONCE = 1000
# Of single requests, so that one lost part does not send a whole file again; whole operations are retried around this.
_REQUEST_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
_CLIENT_OPTIONS = {"timeout": "300s", "connect_timeout": "10s"}
_STATUS = re.compile(r"\b(?:status|status code|response)\D{0,12}(?P<status>[1-5]\d\d)\b", re.IGNORECASE)


class ObstoreStorage:
    """Objects in a bucket; a put is atomic and durable when it returns, as the service promises.

    Args:
        url: `s3://bucket/prefix`, `gs://…` or `az://…`.
        options: object_store's configuration keys, such as `aws_endpoint_url`; the environment's AWS_… variables count where
            they say nothing, then boto3's own search for credentials.

    Raises:
        ValueError: If the url or an option cannot be one.

    """

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self._url = url.rstrip("/")
        self._store = _open(self._url, dict(options))

    @property
    def url(self) -> str:
        """Where this is, without secrets."""
        return self._url

    def put_file(self, key: str, path: Path) -> Transfer:
        """Store the file at `path`: one request up to 8 MiB, else parts, four at a time."""
        size = path.stat().st_size
        if size <= _PART_BYTES:
            data = path.read_bytes()
            self._call(key, lambda: obstore.put(self._store, check_key(key), data, use_multipart=False))
            return Transfer(len(data), xxhash.xxh3_128_hexdigest(data))
        part_bytes = max(_PART_BYTES, -(-size // _MAX_PARTS))
        parts = _DigestedParts(path, part_bytes)
        self._call(
            key,
            lambda: obstore.put(
                self._store, check_key(key), iter(parts), chunk_size=part_bytes, max_concurrency=_CONCURRENT_PARTS
            ),
        )
        return Transfer(parts.bytes, parts.digest.hexdigest())

    def get_file(self, key: str, path: Path) -> Transfer:
        """Write the object to `path`."""
        digest = xxhash.xxh3_128()
        total = 0

        def fetch() -> None:
            nonlocal total
            with path.open("wb", buffering=0) as target:
                for chunk in obstore.get(self._store, check_key(key)).stream(min_chunk_size=2**20):
                    data = memoryview(chunk)
                    digest.update(data)
                    total += len(data)
                    while data:
                        data = data[target.write(data) :]

        self._call(key, fetch)
        return Transfer(total, digest.hexdigest())

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object."""
        self._call(key, lambda: obstore.put(self._store, check_key(key), data, use_multipart=False))

    def get_bytes(self, key: str) -> bytes:
        """Return a small object."""
        return self._call(key, lambda: bytes(obstore.get(self._store, check_key(key)).bytes()))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects below `prefix`, a request per thousand."""
        pages = self._call(prefix, lambda: obstore.list(self._store, prefix.rstrip("/") or None, offset=after))
        while True:
            page = self._call(prefix, lambda: next(pages, None))
            if page is None:
                return
            for info in page:
                yield ObjectInfo(info["path"], info["size"], info["last_modified"].timestamp())

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        return self._call(key, lambda: obstore.head(self._store, check_key(key))["size"])

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, a thousand with a request."""
        paths = [check_key(key) for key in keys]
        for start in range(0, len(paths), _DELETE_AT_ONCE):
            batch = paths[start : start + _DELETE_AT_ONCE]
            with contextlib.suppress(FileNotFoundError):
                self._call(batch[0], partial(obstore.delete, self._store, batch))

    def local_path(self, key: str) -> Path | None:
        """Return None: a bucket is read through its service."""
        del key
        return None

    def _call(self, key: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except obstore.exceptions.BaseError as exc:
            raise _translate(exc, f"{self._url}/{key}") from exc


class _DigestedParts:
    """The parts of a file, digested as they are taken."""

    def __init__(self, path: Path, part_bytes: int) -> None:
        self._path = path
        self._part_bytes = part_bytes
        self.digest = xxhash.xxh3_128()
        self.bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb", buffering=0) as file:
            while part := file.read(self._part_bytes):
                self.digest.update(part)
                self.bytes += len(part)
                yield part


def _open(url: str, options: dict[str, str]) -> "ObjectStore":
    config: dict[str, Any] = dict(options)
    client: Any = dict(_CLIENT_OPTIONS)
    if config.pop("allow_invalid_certificates", None):
        client["allow_invalid_certificates"] = True
    provider = None
    if url.startswith(("s3://", "s3a://")):
        endpoint = config.get("aws_endpoint_url") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            config["aws_endpoint_url"] = endpoint
            client["allow_http"] = endpoint.startswith("http://")
        if not any(config.get(name) or os.environ.get(name.upper()) for name in ("aws_region", "aws_default_region")):
            config["aws_region"] = "us-east-1"
        provider = _boto3_credentials(config)
    open_url: Any = obstore.store.from_url  # its overloads are one per service, and the url decides which
    try:
        store: ObjectStore = open_url(
            url, config=config, client_options=client, retry_config=_REQUEST_RETRIES, credential_provider=provider
        )
    except obstore.exceptions.BaseError as exc:
        raise ValueError(f"{url} cannot be opened: {_first_line(exc)}") from exc
    return store


def _boto3_credentials(config: dict[str, Any]) -> Any:
    """Return boto3's search for credentials (profiles, SSO, roles; they refresh), where nothing nearer names any."""
    named = ("aws_access_key_id", "aws_skip_signature", "aws_web_identity_token_file")
    if any(config.get(name) or os.environ.get(name.upper()) for name in named):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - boto3 takes a while to import
    except ImportError:  # boto3 is missing; object_store looks for a role of the machine by itself
        return None
    try:
        return Boto3CredentialProvider()
    except ValueError:  # boto3 finds none either
        return None


def _translate(error: Exception, where: str) -> Exception:
    """Return what the Storage protocol promises for object_store's `error`."""
    text = _first_line(error)
    if classify(error) == "credentials":
        return CredentialsExpiredError(f"the credentials for {where} have expired: {text}")
    if "NoSuchBucket" in str(error):
        return FileNotFoundError(f"the bucket of {where} does not exist: create it, or fix the storage's URL")
    if isinstance(error, obstore.exceptions.NotFoundError):
        return FileNotFoundError(f"{where} does not exist")
    status = _STATUS.search(str(error))
    code = int(status["status"]) if status else 0
    refused = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError)
    if isinstance(error, refused) or code in (401, 403):
        return PermissionError(f"access to {where} is refused: check the credentials and their policy ({text})")
    if 300 <= code < 500 and code not in (408, 409, 425, 429):  # noqa: PLR2004 - HTTP's classes of status codes
        return OSError(f"{where}: {text}")
    return StorageError(f"{where}: {text}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:500]
