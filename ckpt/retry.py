"""Which storage errors are worth another try, and how long: the one place that knows."""

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    stop_all,
    wait_random_exponential,
)

from .errors import StorageError
from .storage import ObjectInfo, RetryPolicy, Storage, Transfer

ErrorClass: TypeAlias = Literal["transient", "credentials", "final"]
T = TypeVar("T")

_TRANSIENT_ERRNOS = {
    errno.EAGAIN,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ESTALE,  # an NFS server that restarted
    errno.ETIMEDOUT,
}
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html#ErrorCodeList
_EXPIRED = (
    "expiredtoken",
    "requestexpired",
    "tokenrefreshrequired",
    "token has expired",
    "token included in the request is expired",
    "sso session associated with this profile has expired",
)
# A transfer may outlast the deadline before it first fails, and is still worth one more try.
_LEAST_TRIES = 2
_LISTED_AT_ONCE = 1000


class CredentialsExpiredError(PermissionError):
    """The storage refused credentials that were good before: a new client may have fresh ones."""


def classify(error: BaseException) -> ErrorClass:
    """Say what helps: waiting, fresh credentials, or nothing."""
    if isinstance(error, (FileNotFoundError, ValueError)):  # first: their text quotes keys, which may hold any words
        return "final"
    if isinstance(error, CredentialsExpiredError) or any(words in str(error).lower() for words in _EXPIRED):
        return "credentials"
    if isinstance(error, (StorageError, ConnectionError, TimeoutError)):
        return "transient"
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return "transient"
    return "final"


class RetryingStorage:
    """A storage that tries again what may work later, and opens itself anew when its credentials have expired.

    Each verb raises StorageError once the deadline has passed, and at once what no retry can help.

    Args:
        reopen: Opens the storage, reading its credentials anew.
        policy: How patient to be.

    """

    def __init__(self, reopen: Callable[[], Storage], policy: RetryPolicy) -> None:
        self._reopen = reopen
        self._policy = policy
        self._storage = reopen()
        self._one_replaces = threading.Lock()

    @property
    def url(self) -> str:
        """Where this is, without secrets."""
        return self._storage.url

    def put_file(self, key: str, path: Path) -> Transfer:
        """Store the file at `path`."""
        return self._retry("storing", key, lambda storage: storage.put_file(key, path))

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Store `parts` as one object."""
        return self._retry("storing", key, lambda storage: storage.put_buffers(key, parts))

    def get_file(self, key: str, path: Path) -> Transfer:
        """Write the object to `path`."""
        return self._retry("reading", key, lambda storage: storage.get_file(key, path))

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object."""
        self._retry("storing", key, lambda storage: storage.put_bytes(key, data))

    def get_bytes(self, key: str) -> bytes:
        """Return a small object."""
        return self._retry("reading", key, lambda storage: storage.get_bytes(key))

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        """Fill `into` from `start` on."""
        return self._retry("reading", key, lambda storage: storage.get_range(key, start, into))

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects below `prefix`, going on after the last one when a page fails."""
        listing: Iterator[ObjectInfo] | None = None

        def next_page(storage: Storage) -> tuple[ObjectInfo, ...]:
            nonlocal listing
            begun, listing = listing or storage.list(prefix, after=after), None
            page = tuple(islice(begun, _LISTED_AT_ONCE))
            listing = begun  # only now: one that failed has ended, and the next try begins another after the last page
            return page

        while page := self._retry("listing", prefix, next_page):
            yield from page
            after = page[-1].key

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        return self._retry("reading", key, lambda storage: storage.size(key))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        all_keys = tuple(keys)
        if all_keys:
            self._retry("deleting", all_keys[0], lambda storage: storage.delete(all_keys))

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Remove what interrupted puts left behind."""
        self._retry("cleaning", prefix, lambda storage: storage.remove_interrupted(prefix, older_than_s))

    def local_path(self, key: str) -> Path | None:
        """Return where `key` can be read in place, if anywhere."""
        return self._storage.local_path(key)

    def _retry(self, doing: str, key: str, call: Callable[[Storage], T]) -> T:
        started_s = time.monotonic()
        reopened = False
        used = self._storage

        def call_newest() -> T:
            nonlocal used
            used = self._storage
            return call(used)

        def is_worth_retrying(error: BaseException) -> bool:
            nonlocal reopened
            kind = classify(error)
            if kind == "credentials" and not reopened:
                reopened = True
                self._replace(used)
                return True
            return kind == "transient"

        def give_up(state: RetryCallState) -> T:
            assert state.outcome is not None
            error = state.outcome.exception()
            raise StorageError(
                f"{doing} {self.url}/{key} failed {state.attempt_number} times in "
                f"{time.monotonic() - started_s:.0f} s; the last error: {error}"
            ) from error

        retrying = Retrying(
            retry=retry_if_exception(is_worth_retrying),
            stop=stop_all(stop_after_delay(self._policy.deadline_s), stop_after_attempt(_LEAST_TRIES)),
            wait=wait_random_exponential(multiplier=self._policy.first_wait_s, max=self._policy.longest_wait_s),
            retry_error_callback=give_up,
        )
        return retrying(call_newest)

    def _replace(self, expired: Storage) -> None:
        with self._one_replaces:
            if self._storage is expired:  # else another thread was first
                self._storage = self._reopen()
