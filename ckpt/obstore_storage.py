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
_LISTED_AT_ONCE = 1000
# Of single requests, so that one lost part does not send a whole file again; whole operations are retried around this.
_REQUEST_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
# A download is one request: only a silent one may be cut off, else a large object on a slow line could never be read.
_CLIENT_OPTIONS = {"timeout": "1d", "read_timeout": "120s", "connect_timeout": "10s"}
# object_store knows several names for one setting and refuses two of them at once.
_ALIASES = {
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "region": "aws_region",
    "default_region": "aws_region",
    "aws_default_region": "aws_region",
    "endpoint": "aws_endpoint_url",
    "endpoint_url": "aws_endpoint_url",
    "aws_endpoint": "aws_endpoint_url",
    "skip_signature": "aws_skip_signature",
}
_PASSING = {408, 409, 425, 429}  # what HTTP says of a moment, not of the request
_METADATA_HOST = "169.254.169.254"  # where clouds tell machines their role: the last place that is asked for credentials
_STATUS = re.compile(r"\b(?:status|status code|response)\D{0,12}(?P<status>[1-5]\d\d)\b", re.IGNORECASE)
_ANSWER = re.compile(r"<(?P<name>Code|Message)>(?P<text>[^<]*)<")


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
            chunks = obstore.get(self._store, check_key(key)).stream(min_chunk_size=2**20)
            with path.open("wb", buffering=0) as target:
                for chunk in chunks:
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
        below = prefix.rstrip("/") or None
        pages = self._call(prefix, lambda: obstore.list(self._store, below, offset=after, chunk_size=_LISTED_AT_ONCE))
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
            try:
                self._call(batch[0], partial(obstore.delete, self._store, batch))
            except FileNotFoundError:  # S3 does not mind one that is missing; others stop there and leave the rest
                for path in batch:
                    with contextlib.suppress(FileNotFoundError):
                        self._call(path, partial(obstore.delete, self._store, path))

    def local_path(self, key: str) -> Path | None:
        """Return None: a bucket is read through its service."""
        del key
        return None

    def _call(self, key: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except (obstore.exceptions.BaseError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno is not None:
                raise  # of the local file; obstore's own have no number
            translated = _translate(exc, f"{self._url}/{key}")
            exc.args = (_reason(exc),)  # the server's whole answer may quote the request with its session token
            raise translated from exc


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
    config: dict[str, Any] = {_ALIASES.get(name, name): value for name, value in options.items()}
    client: Any = dict(_CLIENT_OPTIONS)
    client["allow_invalid_certificates"] = config.pop("allow_invalid_certificates", "") == "true"
    provider = _complete_s3(config) if url.startswith(("s3://", "s3a://")) else None
    client["allow_http"] = any(str(value).startswith("http://") for value in config.values())
    open_url: Any = obstore.store.from_url  # its overloads are one per service, and the url decides which
    try:
        store: ObjectStore = open_url(
            re.sub("^gcs://", "gs://", url),
            config=config,
            client_options=client,
            retry_config=_REQUEST_RETRIES,
            credential_provider=provider,
        )
    except obstore.exceptions.BaseError as exc:
        raise ValueError(f"{url} cannot be opened: {_reason(exc)}") from exc
    return store


def _complete_s3(config: dict[str, Any]) -> Any:
    """Fill in the endpoint and the region as AWS' own tools find them, and return where credentials come from, if not there."""
    provider, profile_endpoint = (None, None) if _names_credentials(config) else _from_boto3()
    for endpoint in (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"), profile_endpoint):
        if endpoint:
            config.setdefault("aws_endpoint_url", endpoint)
    has_region = provider is not None and "region" in provider.config
    if not has_region and not _is_set(config, "aws_region", "aws_default_region"):
        config["aws_region"] = "us-east-1"
    return provider


def _names_credentials(config: Mapping[str, Any]) -> bool:
    return _is_set(config, "aws_access_key_id", "aws_skip_signature", "aws_web_identity_token_file")


def _is_set(config: Mapping[str, Any], *names: str) -> bool:
    return any(config.get(name) or os.environ.get(name.upper()) for name in names)


def _from_boto3() -> tuple[Any, str | None]:
    """Return boto3's search for credentials (profiles, SSO, roles; they refresh) and the endpoint of its profile."""
    try:
        import boto3  # type: ignore[import-untyped]  # noqa: PLC0415 - ships no types, takes a while to import
        import botocore.exceptions  # type: ignore[import-untyped]  # noqa: PLC0415 - as above
        import botocore.session  # type: ignore[import-untyped]  # noqa: PLC0415 - as above
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - as above
    except ImportError:  # boto3 is missing; object_store looks for a role of the machine by itself
        return None, None
    session = botocore.session.Session()
    try:
        provider = Boto3CredentialProvider(boto3.Session(botocore_session=session))
        return provider, session.get_scoped_config().get("endpoint_url")
    except botocore.exceptions.ProfileNotFound as exc:
        raise ValueError(f"{exc}: fix AWS_PROFILE, or add the profile to ~/.aws/config") from exc
    except ValueError:  # boto3 finds none either
        return None, None


def _translate(error: Exception, where: str) -> Exception:
    """Return what the Storage protocol promises for object_store's `error`."""
    text, reason = str(error), _reason(error)
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return FileNotFoundError(f"the bucket of {where} does not exist: create it, or fix the storage's URL")
    if isinstance(error, (obstore.exceptions.NotFoundError, FileNotFoundError)):
        return FileNotFoundError(f"{where} does not exist")
    if classify(error) == "credentials":
        return CredentialsExpiredError(f"the credentials for {where} have expired: {reason}")
    if _METADATA_HOST in text:
        return PermissionError(
            f"no credentials were found for {where}: give a block, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile; "
            "for a public bucket aws_skip_signature"
        )
    return _translate_status(error, where, reason)


def _translate_status(error: Exception, where: str, reason: str) -> Exception:
    status = _STATUS.search(str(error))
    code = int(status["status"]) if status else 0
    refused = (obstore.exceptions.PermissionDeniedError, obstore.exceptions.UnauthenticatedError)
    if isinstance(error, refused) or code in (401, 403):
        return PermissionError(f"access to {where} is refused: check the credentials and their policy ({reason})")
    if (300 <= code < 500 and code not in _PASSING) or code == 501:  # noqa: PLR2004 - HTTP's classes of status codes
        return OSError(f"{where}: {reason}")
    return StorageError(f"{where}: {reason}")


def _reason(error: Exception) -> str:
    """Return the first line without its URL's query, which may be signed, and the code and message of the server's answer."""
    text = str(error).strip()
    line = re.sub(r"\?\S*", "", text.partition("\n")[0].partition("<")[0])[:500].rstrip(": ")
    answer = {found["name"]: found["text"] for found in reversed(list(_ANSWER.finditer(text)))}
    return ": ".join([line, *(answer[name][:300] for name in ("Code", "Message") if name in answer)])
