"""S3, Google Cloud Storage and Azure through obstore, the Python binding of Rust's object_store."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import obstore
import obstore.exceptions
import xxhash
from obstore.store import ObjectStore, S3Store
from prefect_torch.ckpt.errors import MalformedRecordError, StorageError
from prefect_torch.ckpt.storage.digest import RunningDigest, split, write_all
from prefect_torch.ckpt.storage.keys import check_key
from prefect_torch.ckpt.storage.parallel import AT_ONCE, for_each
from prefect_torch.ckpt.storage.protocol import MOST_RECORD_BYTES, ObjectInfo, Splits, Transfer

from .config import open_object_stores, promises_key_order
from .errors import denies_object, first_reason, has_no_upload, is_unexplained, refuses_request, translate
from .listing import LISTED_AT_ONCE, BucketListing
from .ranged_reads import read_in_order, read_range_with_status_200

T = TypeVar("T")

_PART_BYTES = 8 * 2**20
_QUICK_BYTES = 2**20  # a record of more, such as the archive of a working directory, takes a slow line its time
_MAX_PARTS = 10_000  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html
_CONCURRENT_PARTS = 4
_DELETE_AT_ONCE = 1000
_NO_NAMES = "invalid DeleteObjects response: missing field `Key`"  # object_store's text; JuiceFS' gateway names no object


class ObstoreStorage:
    """Objects in a bucket; a put is atomic and durable when it returns, as the service promises.

    Args:
        url: `s3://bucket/prefix`, `gs://…` or `az://…`.
        options: object_store's configuration keys, such as `aws_endpoint_url`; for missing ones the environment's AWS_…
            variables apply, then boto3's own search for credentials.
        deadline_s: After how many seconds without a byte a request is given up, 120 at most; ten minutes for an upload, whose
            wait begins before its first byte is sent, unless it is a record of up to 1 MiB.

    Raises:
        ValueError: If the url or an option is invalid.

    """

    def __init__(self, url: str, options: Mapping[str, str], deadline_s: float = 120.0) -> None:
        self._url = url.rstrip("/")
        self._options = dict(options)
        self._deadline_s = deadline_s
        self._store, self._reading, self._uploading = open_object_stores(self._url, self._options, deadline_s)
        self._deleting = self._store
        self._has_answered = False
        self._sends_ranges_with_status_200 = False
        is_documented = promises_key_order(self._store)
        self._listing = BucketListing(self._url, self._pages, self._exists, is_documented=is_documented)

    @property
    def url(self) -> str:
        """The storage's location, without secrets."""
        return self._url

    def put_file(self, key: str, path: Path) -> Transfer:
        """Store the file at `path`: one request up to 8 MiB, else parts, four concurrently."""
        size = path.stat().st_size
        if size <= _PART_BYTES:
            return self._put_whole(key, path.read_bytes())
        with path.open("rb", buffering=0) as file:
            return self._put_parts(key, size, lambda part_bytes: iter(partial(file.read, part_bytes), b""))

    def put_files(self, files: Mapping[str, str | Path], *, owned: bool = False) -> dict[str, Transfer]:
        """Store several files, eight concurrently; their local copies stay."""
        del owned
        return dict(zip(files, for_each(files.items(), lambda file: self.put_file(file[0], Path(file[1]))), strict=True))

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Store `parts` as one object: one request up to 8 MiB, else parts of it from memory, four concurrently."""
        size = sum(len(part) for part in parts)
        if size <= _PART_BYTES:
            return self._put_whole(key, b"".join(parts))
        return self._put_parts(key, size, lambda part_bytes: split(parts, part_bytes))

    def _put_whole(self, key: str, data: bytes) -> Transfer:
        self._call(key, lambda: obstore.put(self._uploading, check_key(key), data, use_multipart=False))
        return Transfer(len(data), xxhash.xxh3_128_hexdigest(data))

    def get_file(self, key: str, path: Path, expected: int | None = None) -> Transfer:
        """Write the object to `path`, in concurrent ranges, unless it has another size than `expected`."""
        size = self.size(key)
        if expected not in (None, size):
            return Transfer(size, "")
        with path.open("wb", buffering=0) as target:  # into the page cache: a downloaded file is read next
            return self._read(key, size, lambda data: write_all(target, data))

    def digest(self, key: str) -> Transfer:
        """Return the size and digest of the object, in concurrent ranges."""
        return self._read(key, self.size(key), lambda _: None)

    def _read(self, key: str, size: int, take: Callable[[memoryview], None]) -> Transfer:
        digest = RunningDigest()

        def take_digested(data: memoryview) -> None:
            digest.update(data)
            take(data)

        read_in_order(size, partial(self._get_range, self._reading, key), take_digested)
        got = digest.transfer()
        if got.bytes < size:
            raise StorageError(f"{self._url}/{key}: {got.bytes} bytes came of the {size} that it has")
        return got

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object.

        Raises:
            OSError: EFBIG for one of more than 1 GiB, which `get_bytes` would refuse.

        """
        if len(data) > MOST_RECORD_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), f"{self._url}/{key}")
        store = self._store if len(data) <= _QUICK_BYTES else self._uploading
        self._call(key, lambda: obstore.put(store, check_key(key), data, use_multipart=False))

    def get_bytes(self, key: str) -> bytes:
        """Return a small object.

        Raises:
            MalformedRecordError: If it has more than 1 GiB: it is not small, and would fill the memory.

        """
        found = self._call_for(key, lambda: obstore.get(self._store, check_key(key)))
        if (size := found.meta["size"]) > MOST_RECORD_BYTES:
            raise MalformedRecordError(f"{self._url}/{key} has {size} bytes, and a record {MOST_RECORD_BYTES} at most")
        return self._call(key, lambda: bytes(found.bytes()))

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        """Copy the object's bytes from `start` on into `into`, with one request, and return their number."""
        return self._get_range(self._store, key, start, into)

    def _get_range(self, store: ObjectStore, key: str, start: int, into: memoryview) -> int:
        if not into:
            return 0
        if self._sends_ranges_with_status_200:
            return self._get_range_with_status_200(key, start, into)
        try:
            data = self._call_for(key, lambda: obstore.get_range(store, check_key(key), start=start, length=len(into)))
        except PermissionError:
            raise
        except (OSError, StorageError) as exc:
            if "non-partial response" in str(exc):
                self._sends_ranges_with_status_200 = True
                return self._get_range_with_status_200(key, start, into)
            left = max(0, self.size(key) - start)
            if left >= len(into):
                raise
            return self._get_range(store, key, start, into[:left])  # some servers refuse a range that extends beyond the end
        view = memoryview(data)
        if len(view) > len(into):
            raise StorageError(f"{self._url}/{key}: {len(view)} bytes came instead of {len(into)}")
        into[: len(view)] = view
        return len(view)

    def _get_range_with_status_200(self, key: str, start: int, into: memoryview) -> int:
        count = read_range_with_status_200(self._store, check_key(key), start, into)
        return self._skim(key, start, into) if count is None else count

    def _skim(self, key: str, start: int, into: memoryview) -> int:
        """Read a range by reading everything before it, from a server that sends whole objects only."""
        chunks = self._call(key, lambda: obstore.get(self._store, check_key(key)).stream(min_chunk_size=2**20))
        done, position = 0, 0
        while done < len(into) and (chunk := self._call(key, lambda: next(chunks, None))) is not None:
            wanted = memoryview(chunk)[max(0, start - position) :][: len(into) - done]
            into[done : done + len(wanted)] = wanted
            done, position = done + len(wanted), position + len(memoryview(chunk))
        return done

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects below `prefix`, a request per thousand; between splits concurrently where the order allows it.

        Raises:
            OSError: If the server loses objects between two pages.

        """
        yield from self._listing.list(prefix, after, splits)

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the prefixes directly below `prefix`, a request per thousand."""
        below = _below(prefix)
        yield from self._folders(prefix, below) or self._folders(prefix, below)  # an empty response is confirmed, as in `list`

    def _folders(self, prefix: str, below: str | None) -> Sequence[str]:
        found = self._call(prefix, lambda: obstore.list_with_delimiter(self._store, below))
        return [path.rpartition("/")[2] for path in found["common_prefixes"]]

    def size(self, key: str) -> int:
        """Return an object's size in bytes; where a HEAD fails, the response to a GET says why."""
        check_key(key)
        try:
            return self._answered(lambda: obstore.head(self._store, key)["size"])
        except (obstore.exceptions.BaseError, OSError) as exc:
            if not is_unexplained(exc):
                raise self._translated(key, exc) from None
        return self._call_for(key, lambda: obstore.get(self._store, key).meta["size"])

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, a thousand per request; one per request if the server refuses bulk deletes.

        Some S3 servers do not support bulk deletes (Alibaba's OSS), and Ceph 16 requires a right to the bucket for them, which
        a policy for its objects does not grant. JuiceFS' gateway deletes, and names no object in its response.
        """
        paths = [check_key(key) for key in keys]
        for start in range(0, len(paths), _DELETE_AT_ONCE):
            batch = paths[start : start + _DELETE_AT_ONCE]
            try:
                self._delete(self._deleting, batch)
                continue
            except (OSError, StorageError) as exc:
                if not isinstance(self._store, S3Store) or not (refuses_request(exc) or _NO_NAMES in str(exc)):
                    raise
            singly = open_object_stores(self._url, {**self._options, "aws_disable_bulk_delete": "true"}, self._deadline_s).quick
            self._delete(singly, batch)
            self._deleting = singly

    def _delete(self, store: ObjectStore, batch: Sequence[str]) -> None:
        try:
            self._call(batch[0], partial(obstore.delete, store, batch))
        except FileNotFoundError:  # S3 ignores a missing object; other services stop there and leave the rest
            for_each(batch, partial(self._delete_one, store), AT_ONCE)

    def _delete_one(self, store: ObjectStore, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call(path, partial(obstore.delete, store, path))

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Abort unfinished multipart uploads to S3.

        Azure discards them itself, after a week. Google keeps them until a lifecycle rule of the bucket deletes them
        (https://cloud.google.com/storage/docs/multipart-uploads).
        """
        if isinstance(self._store, S3Store):
            from .multipart_uploads import abort_stale_uploads  # noqa: PLC0415 - boto3, only for removing uploads

            abort_stale_uploads(self._store, prefix, older_than_s, self._deadline_s)

    def reopened(self) -> "ObstoreStorage":
        """Return this storage with a new connection."""
        again = ObstoreStorage(self._url, self._options, self._deadline_s)
        again._has_answered = self._has_answered
        return again

    def local_path(self, key: str) -> Path | None:
        """Return None: a bucket is read through its service."""
        del key
        return None

    def _pages(self, prefix: str, after: str | None) -> Iterator[tuple[ObjectInfo, ...]]:
        below = _below(prefix)
        pages = obstore.list(self._store, below, offset=after, chunk_size=LISTED_AT_ONCE)  # the first page is the first request
        ends: set[str] = set()
        while page := self._call(prefix, lambda: next(pages, None)):
            if (end := page[-1]["path"]) in ends:
                raise StorageError(f"the server of {self._url} lists one page below {prefix} again and again")
            ends.add(end)
            yield tuple(ObjectInfo(info["path"], info["size"], info["last_modified"].timestamp()) for info in page)

    def _exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def _put_parts(self, key: str, size: int, cut: Callable[[int], Iterator[bytes | memoryview]]) -> Transfer:
        part_bytes = max(_PART_BYTES, -(-size // _MAX_PARTS))
        digest = RunningDigest()
        parts = digest.passed(cut(part_bytes))
        check_key(key)
        try:
            self._answered(
                lambda: obstore.put(self._uploading, key, parts, chunk_size=part_bytes, max_concurrency=_CONCURRENT_PARTS)
            )
        except (obstore.exceptions.BaseError, OSError) as exc:
            is_lost, translated = has_no_upload(exc), self._translated(key, exc)
            if is_lost and translated is not exc:
                translated = StorageError(f"{translated}; the upload of {key} is stored again, though it may be complete")
            raise translated from None
        return digest.transfer()

    def _call(self, key: str, request: Callable[[], T]) -> T:
        try:
            return self._answered(request)
        except (obstore.exceptions.BaseError, OSError) as exc:
            raise self._translated(key, exc) from None  # its text has the reason

    def _answered(self, request: Callable[[], T]) -> T:
        """Return what a request returns; from then on it is known that there are credentials, for `_translated`."""
        result = request()
        self._has_answered = True
        return result

    def _call_for(self, key: str, request: Callable[[], T]) -> T:
        """Request an object; a refused one that is not listed counts as missing.

        S3 answers that nothing is there only if this user may list the whole bucket, not if a policy allows a prefix alone
        (https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html).
        """
        try:
            return self._call(key, request)
        except PermissionError as exc:
            if not denies_object(exc) or not self._is_unlisted(key):
                raise
        raise FileNotFoundError(f"{self._url}/{key} does not exist")

    def _is_unlisted(self, key: str) -> bool:
        """Return whether two listings of the key's folder succeed and leave the key out; one is not enough, as in `list`."""
        folder = _below(key.rpartition("/")[0])
        with contextlib.suppress(obstore.exceptions.BaseError, OSError):
            found = [obstore.list_with_delimiter(self._store, folder)["objects"] for _ in range(2)]
            return all(info["path"] != key for objects in found for info in objects)
        return False

    def _translated(self, key: str, error: Exception) -> Exception:
        if isinstance(error, OSError) and error.errno is not None:
            return error  # of the local file; obstore's own have no number
        translated = translate(error, f"{self._url}/{key}", has_answered=self._has_answered)
        error.args = (first_reason(error),)  # the server's whole response may quote the request with its session token
        return translated


def _below(prefix: str) -> str | None:
    return check_key(prefix.removesuffix("/")) if prefix else None
