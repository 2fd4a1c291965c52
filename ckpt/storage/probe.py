"""A probe of the operations that a training needs from a storage: write, list, read, delete."""

import errno
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from prefect_torch.ckpt.errors import CheckpointError, StorageError
from prefect_torch.ckpt.storage.object_store.listing import ServerOrder
from prefect_torch.ckpt.storage.specs.location import canonical, is_bucket

from .protocol import Storage
from .retry import ClockSkewError, NoCredentialsError

Step: TypeAlias = Literal["write", "list", "read", "write 8 MiB", "delete", "forget"]
ListingOrder: TypeAlias = Literal["keys", "folders", "none"]

_CONTENT = b"prefect-torch probe"
_LARGE_BYTES = 8 * 2**20 + 1  # a bucket takes it in two parts, the first as large as those of any file of up to 80 GB
_NAMES = ("a.json", "a/b.json", "a-c/d", "b.json", "c")  # each known order of listings sorts these differently
_MOUNTED = "if a bucket is mounted there, give the bucket itself, as s3://bucket/prefix; else another location"
_ADVICE: dict[int | None, str] = {
    errno.ENOSPC: "free some space, or give another location",
    errno.EDQUOT: "free some space, or give another location",
    errno.EROFS: "mount it writable, or give another location",
    errno.ENOSYS: _MOUNTED,
    errno.ENOTSUP: _MOUNTED,
}
_REMEDIES: dict[type[Exception], str] = {
    ClockSkewError: "have NTP set this machine's clock",
    NoCredentialsError: "give them to this process, or another location",
}
_READS_LATE = "switch off the cache that answers reads, or give another location"  # the object was stored, and listed
_LARGER_REQUESTS = "let the proxy or gateway before it accept requests of 8 MiB (nginx: client_max_body_size 9m)"
_TOO_LARGE = re.compile(r"\b413[ ,]")  # a status, as every library writes it: its text follows
_RIGHTS: dict[str, dict[Step, str]] = {
    "s3": {
        "write": "s3:PutObject",
        "list": "s3:ListBucket",
        "read": "s3:GetObject",
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html#mpuAndPermissions
        "write 8 MiB": "s3:PutObject for uploads in parts, and kms:Decrypt where KMS encrypts them",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "write": "storage.objects.create",
        "list": "storage.objects.list",
        "read": "storage.objects.get",
        "write 8 MiB": "storage.multipartUploads.create",
        "delete": "storage.objects.delete",
    },
}


class StorageUnfitError(CheckpointError):
    """A storage lacks an operation that trainings need; the message names the remedy.

    Attributes:
        found: The failure.
        advice: The remedy.

    """

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found}; {advice}")
        self.found = found
        self.advice = advice

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.found, self.advice)


@dataclass(frozen=True, slots=True)
class StorageProbe:
    """The steps tried at a storage, all of them successful.

    Attributes:
        url: The storage's location.
        took_s: The duration of each step in seconds, in their order; "forget" lists again after "delete".
        order: The order of its listings: by whole "keys", by "folders" and their content, or "none" of these. Any order
            will do; with "none", finding the latest of more than a thousand checkpoints lists them all.

    """

    url: str
    took_s: dict[Step, float]
    order: ListingOrder = "keys"

    @property
    def total_s(self) -> float:
        """The total duration in seconds."""
        return sum(self.took_s.values())


def probe_storage(storage: Storage, *, quick: bool = False) -> StorageProbe:
    """Write, list, read and delete small objects and one of 8 MiB under an unused name; no object and no new directory remains.

    A listing must contain each object just stored, each one after the key that it begins after, and no deleted one.
    Costs some 20 requests. A storage that does not answer fails by its own retry policy.

    Args:
        storage: The storage.
        quick: Leave out the object of 8 MiB, which takes a slow line many seconds. A bucket that forbids uploads in parts, or
            has a proxy before it that limits the size of requests, then passes.

    Raises:
        StorageUnfitError: With the first step that fails, and the remedy.

    """
    trial = _Trial(storage, f"prefect-torch-probe-{secrets.token_hex(4)}/", quick=quick)
    took_s: dict[Step, float] = {}
    with _no_new_folders(storage):
        for step, act in trial.steps():
            started_s = time.monotonic()
            try:
                act()
            except Exception as exc:
                if not isinstance(exc, StorageError):  # a storage that does not answer would only delay the error again
                    with suppress(Exception):  # leftovers matter less than the reason
                        storage.delete(trial.keys)
                raise StorageUnfitError(f"{storage.url} does not {step}: {exc}", _advice(step, exc, storage.url)) from exc
            took_s[step] = time.monotonic() - started_s
    return StorageProbe(storage.url, took_s, trial.order)


class _Trial:
    """The steps of a probe below `prefix`."""

    def __init__(self, storage: Storage, prefix: str, *, quick: bool) -> None:
        self._storage = storage
        self._prefix = prefix
        self._small = [f"{prefix}{name}" for name in _NAMES]
        self._large = [] if quick else [f"{prefix}large"]
        self.keys = [*self._small, *self._large]
        self.order: ListingOrder = "none"

    def steps(self) -> Iterator[tuple[Step, Callable[[], None]]]:
        yield "write", self._write
        yield "list", self._list
        yield "read", self._read
        for key in self._large:
            yield "write 8 MiB", partial(self._write_large, key)
        yield "delete", lambda: self._storage.delete(self.keys)
        yield "forget", self._forget

    def _write(self) -> None:
        for key in self._small[:-1]:
            self._storage.put_bytes(key, _CONTENT)

    def _list(self) -> None:
        self._expect(self._listed(), self._small[:-1])
        self._storage.put_bytes(self._small[-1], _CONTENT)
        self._expect(listed := self._listed(), self._small)
        after, behind = f"{self._prefix}b", self._small[-2:]
        if missing := sorted(set(behind) - set(self._listed(after))):
            raise ValueError(f"listing after {after}, it leaves out {missing}")
        order = ServerOrder(is_documented=False)
        order.see(None, listed)
        self.order = "keys" if order.by_keys else "folders" if order.by_names else "none"

    def _read(self) -> None:
        if (got := self._storage.get_bytes(self._small[0])) != _CONTENT:
            raise ValueError(f"it gives back {got!r} instead of {_CONTENT!r}")
        self._expect_size(self._small[0], len(_CONTENT))
        with suppress(FileNotFoundError):
            self._storage.size(f"{self._prefix}missing")
            raise ValueError("it reports an object that was never stored")

    def _write_large(self, key: str) -> None:
        self._storage.put_buffers(key, [memoryview(bytes(_LARGE_BYTES))])
        self._expect_size(key, _LARGE_BYTES)

    def _forget(self) -> None:
        if keys := set(self._listed()) & set(self.keys):  # some servers list folders, also those that have become empty
            raise ValueError(f"it still lists {sorted(keys)}")

    def _listed(self, after: str | None = None) -> list[str]:
        return [info.key for info in self._storage.list(self._prefix, after=after)]

    def _expect(self, listed: list[str], stored: list[str]) -> None:
        if set(listed) != set(stored):
            raise ValueError(f"it lists {sorted(listed)} instead of {sorted(stored)}, which were stored just before")

    def _expect_size(self, key: str, stored: int) -> None:
        if (size := self._storage.size(key)) != stored:
            raise ValueError(f"it reports a size of {size} for {stored} bytes")


def _advice(step: Step, error: Exception, url: str) -> str:
    if (remedy := _remedy_of_itself(step, error)) is not None:
        return remedy
    if isinstance(error, PermissionError):
        name = _RIGHTS.get(canonical(url).partition("://")[0], {}).get(step)
        right = f"the right to {step}" + (f" ({name})" if name else "")
        return f"let this user {step} there: {right} is missing, or give other credentials"
    if isinstance(error, FileNotFoundError) and "://" in url:
        what = "the bucket" if is_bucket(url) else "what the URL names"
        return _READS_LATE if step in ("read", "write 8 MiB") else f"create {what}, or fix its name in the URL or the block"
    if isinstance(error, StorageError):
        return "check the endpoint's address and the network, or try again later"
    if isinstance(error, OSError) and (error.errno in _ADVICE or (error.errno is None and is_bucket(url))):
        return _ADVICE.get(error.errno, "change the setting that the error names, or give another location")
    lists_wrong = step in ("list", "forget") and isinstance(error, ValueError)
    what = "switch off the cache that answers listings" if lists_wrong else f"let this user {step} there"
    return f"{what}, or give another location"


def _remedy_of_itself(step: Step, error: Exception) -> str | None:
    """Return the remedy of an error that has only one, whatever the storage is."""
    is_too_large = step == "write 8 MiB" and _TOO_LARGE.search(str(error)) is not None
    return _LARGER_REQUESTS if is_too_large else _REMEDIES.get(type(error))


@contextmanager
def _no_new_folders(storage: Storage) -> Iterator[None]:
    """Remove the local directories that the first write creates."""
    root = Path(storage.url)
    missing = [] if "://" in storage.url else [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in missing:  # the innermost first
            with suppress(OSError):  # another process uses it by now
                folder.rmdir()
