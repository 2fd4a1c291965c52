"""The only module that decides which storage errors are worth another try, and for how long."""

import errno
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from prefect_torch.ckpt.errors import PAGE_OF_PROXY, StorageError

from .protocol import ObjectInfo, RetryPolicy, Splits, Storage, Transfer
from .server_codes import EXPIRED, UNKNOWN

if TYPE_CHECKING:
    from tenacity import RetryCallState

ErrorClass: TypeAlias = Literal["transient", "credentials", "final"]
T = TypeVar("T")

_TRANSIENT_ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,  # a mount with "intr" or "soft"
    errno.EIO,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.ENOLCK,
    errno.ENOTCONN,  # a FUSE filesystem whose process ended
    errno.EPIPE,
    errno.ESHUTDOWN,
    errno.ESTALE,  # an NFS server that restarted
    errno.ETIMEDOUT,
    # Linux' own: of BeeGFS, whose server does not answer or is unknown, and the second also of NFS, whose server failed.
    *(getattr(errno, name) for name in ("ECOMM", "EREMOTEIO") if hasattr(errno, name)),
}
# Codes, and the texts of AWS' other services and Azure; not as a part of a name, since keys may contain any words.
_EXPIRED = re.compile(
    rf"(?<![\w/.-])(?:{'|'.join(EXPIRED)}"
    r"|token has expired|token is expired|token included in the request is expired"
    r"|SSO session associated with this profile has expired"
    r"|signature not valid in the specified time frame|lifetime validation failed)(?![\w/-])",
    re.IGNORECASE,
)
_UNKNOWN = re.compile(rf"(?<![\w/.-])(?:{'|'.join(UNKNOWN)})(?![\w/-])", re.IGNORECASE)
# A deadline of 0 leaves one more try, too.
_LEAST_TRIES = 2
_LISTED_AT_ONCE = 1000
_MOST_DOUBLINGS = 60  # more would overflow, and the longest pause is reached long before
_jitter = random.Random()  # noqa: S311 - not used for secrets
_retries_end: ContextVar[threading.Event | None] = ContextVar("retries_end", default=None)
_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


class CredentialsExpiredError(PermissionError):
    """The storage refused credentials that were valid before: a new client may have fresh ones."""


class ClockSkewError(PermissionError):
    """The storage refused a request whose time differs from its own clock: set this machine's clock.

    That of a machine to which the storage has answered before is waited for.
    """


class NoCredentialsError(PermissionError):
    """No credentials were found for the storage, so no request was sent."""


class LoginError(ValueError):
    """The login of an AWS profile is incomplete, or its source failed: once it has been used, it may be usable again later."""


_LATER = (LoginError, *PAGE_OF_PROXY)  # other values are wrong for good, but the source of a login may work again later


def is_refusal(error: Exception) -> bool:
    """Return whether a storage denies an operation, as where nothing may be replaced, and not for a login or a clock."""
    return type(error) is PermissionError


def classify(error: BaseException) -> ErrorClass:
    """Return the class of `error` by its remedy: waiting, fresh credentials, or none."""
    if isinstance(error, LoginError):  # of a new connection to a storage that has been open before
        return "transient"
    if isinstance(error, (FileNotFoundError, ValueError)):  # first: their text quotes keys, which may contain any words
        return "final"
    if isinstance(error, CredentialsExpiredError) or _EXPIRED.search(str(error)) or _UNKNOWN.search(str(error)):
        return "credentials"
    if isinstance(error, (StorageError, ConnectionError, TimeoutError)):
        return "transient"
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return "transient"
    return "final"


@contextmanager
def retries_ended_by(event: threading.Event) -> Iterator[None]:
    """Retry storage operations of this context until `event` is set, and from then on try each once.

    A pause between two tries ends with the event, too; a try that is under way does not.
    """
    token = _retries_end.set(event)
    try:
        yield
    finally:
        _retries_end.reset(token)


@contextmanager
def ended_by(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before each storage request of this context, and at each piece of a file: what it raises ends the body.

    A command that syncs a directory is killed then; a function that does so is left behind.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def raise_if_ended() -> None:
    """Raise what the `check` of this context raises, if it has one."""
    if (check := _check.get()) is not None:
        check()


class RetryingStorage:
    """A storage that retries operations that may succeed later, and reopens itself when its credentials have expired.

    Each verb raises StorageError once the deadline has passed, and immediately any error that no retry can help.

    Args:
        reopen: Opens the storage, reading its credentials anew.
        policy: The retry policy.
        opened: The open storage; None opens it.
        renews: Whether its credentials have a source that somebody may renew, such as a file. Expired ones are then read again
            until the deadline, since a job may renew them a little too late; so are ones that the server does not know, if it
            has accepted some before. All others are read again once.

    """

    def __init__(
        self, reopen: Callable[[], Storage], policy: RetryPolicy, opened: Storage | None = None, *, renews: bool = False
    ) -> None:
        self._reopen = reopen
        self._policy = policy
        self._renews = renews
        self._has_answered = False
        self._storage = reopen() if opened is None else opened
        self._one_replaces = threading.Lock()
        self._not_replaced: tuple[float, str] | None = None  # when that last failed, and why

    @property
    def url(self) -> str:
        """The storage's location, without secrets."""
        return self._storage.url

    def put_file(self, key: str, path: Path) -> Transfer:
        """Store the file at `path`."""
        return self._retry("storing", key, lambda storage: storage.put_file(key, path))

    def put_files(self, files: Mapping[str, str | Path], *, owned: bool = False) -> dict[str, Transfer]:
        """Store several files; a retry stores all of them."""
        return self._retry("storing", next(iter(files), ""), lambda storage: storage.put_files(files, owned=owned))

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Store `parts` as one object."""
        return self._retry("storing", key, lambda storage: storage.put_buffers(key, parts))

    def get_file(self, key: str, path: Path, expected: int | None = None) -> Transfer:
        """Write the object to `path`, unless it has another size than `expected`."""
        return self._retry("reading", key, lambda storage: storage.get_file(key, path, expected))

    def digest(self, key: str) -> Transfer:
        """Return the size and digest of the object."""
        return self._retry("reading", key, lambda storage: storage.digest(key))

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object."""
        self._retry("storing", key, lambda storage: storage.put_bytes(key, data))

    def get_bytes(self, key: str) -> bytes:
        """Return a small object."""
        return self._retry("reading", key, lambda storage: storage.get_bytes(key))

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        """Fill `into` from `start` on."""
        return self._retry("reading", key, lambda storage: storage.get_range(key, start, into))

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        """Yield the objects below `prefix`; if a page fails, list again from the beginning, and yield the remaining ones.

        The position at which the failed listing would have continued is unknown: the next listing may have another order.
        """
        listing: Iterator[ObjectInfo] | None = None
        seen: set[str] = set()

        def next_page(storage: Storage) -> tuple[ObjectInfo, ...]:
            nonlocal listing
            begun, listing = listing or storage.list(prefix, after=after, splits=splits), None
            page = tuple(islice((info for info in begun if info.key not in seen), _LISTED_AT_ONCE))
            listing = begun  # only now: a failed listing has ended, and the next try begins another
            seen.update(info.key for info in page)
            return page

        while page := self._retry("listing", prefix, next_page):
            yield from page

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the prefixes directly below `prefix`."""
        yield from self._retry("listing", prefix, lambda storage: tuple(storage.folders(prefix)))

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        return self._retry("reading", key, lambda storage: storage.size(key))

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects."""
        all_keys = tuple(keys)
        if all_keys:
            self._retry("deleting", all_keys[0], lambda storage: storage.delete(all_keys))

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Remove the leftovers of interrupted puts."""
        self._retry("cleaning", prefix, lambda storage: storage.remove_interrupted(prefix, older_than_s))

    def reopened(self) -> "RetryingStorage":
        """Return this storage as its backend reopens it: by another connection, and past the page cache."""
        again = self._retry("opening", "", lambda storage: storage.reopened())
        return RetryingStorage(self._reopen, self._policy, again, renews=self._renews)

    def local_path(self, key: str) -> Path | None:
        """Return the local path at which `key` can be read in place, or None."""
        return self._retry("reading", key, lambda storage: storage.local_path(key))

    def do(self, doing: str, key: str, call: Callable[[Storage], T]) -> T:
        """Call an operation that only one backend has, with the retries of every verb; `doing` and `key` are for messages."""
        return self._retry(doing, key, call)

    def _retry(self, doing: str, key: str, call: Callable[[Storage], T]) -> T:
        raise_if_ended()
        started_s = time.monotonic()
        used = self._storage
        try:
            result = call(used)
        except Exception as exc:
            if self._classify(exc) == "final":
                raise
            result = self._retry_after(exc, call, _Call(doing, key, used, started_s))
        self._has_answered = True
        return result

    def _retry_after(self, first: Exception, call: Callable[[Storage], T], asked: "_Call") -> T:
        """Retry after the first try failed, which tenacity counts as its first, until the deadline, which counts from here.

        The first try may have been a transfer that went well for minutes.
        """
        from tenacity import (  # noqa: PLC0415 - 60 ms, which a failing storage can better afford than every rank's start
            Retrying,
            retry_if_exception,
            sleep_using_event,
            stop_after_attempt,
            stop_after_delay,
            stop_all,
            stop_any,
            stop_when_event_set,
        )

        failed: Exception | None = first

        def call_newest() -> T:
            nonlocal failed
            if failed is not None:
                error, failed = failed, None
                raise error
            if asked.must_renew:
                self._replace(asked.used)
                asked.must_renew = False
            raise_if_ended()
            asked.used = self._storage
            return call(asked.used)

        def plan_next_try(error: BaseException) -> bool:
            kind = self._classify(error)
            if kind == "credentials" and (not asked.has_renewed or self._may_be_renewed(error)):
                asked.must_renew = asked.has_renewed = True
                return True
            return kind == "transient"

        def give_up(state: "RetryCallState") -> T:
            assert state.outcome is not None
            error = state.outcome.exception()
            raise StorageError(
                f"{asked.doing} {self.url}/{asked.key} failed {state.attempt_number} times in "
                f"{time.monotonic() - asked.started_s:.0f} s; the last error: {error}"
            ) from error

        end = _retries_end.get() or threading.Event()
        patient = stop_all(stop_after_delay(self._policy.deadline_s), stop_after_attempt(_LEAST_TRIES))
        retrying = Retrying(
            retry=retry_if_exception(plan_next_try),
            stop=stop_any(patient, stop_when_event_set(end)),
            sleep=sleep_using_event(end),
            wait=lambda state: _draw_wait_s(self._policy, state.attempt_number),
            retry_error_callback=give_up,
        )
        return retrying(call_newest)

    def _classify(self, error: BaseException) -> ErrorClass:
        """Return the class of `error`, given what this storage has answered before."""
        if isinstance(error, ClockSkewError) and self._has_answered:  # a resumed VM's clock is behind until NTP sets it
            return "transient"
        return classify(error)

    def _may_be_renewed(self, refused: BaseException) -> bool:
        text = str(refused)
        is_unknown = _UNKNOWN.search(text) is not None and _EXPIRED.search(text) is None
        return self._renews and (self._has_answered or not is_unknown)

    def _replace(self, expired: Storage) -> None:
        began_s = time.monotonic()
        with self._one_replaces:
            if self._storage is not expired:  # another thread was first
                return
            if self._not_replaced is not None and self._not_replaced[0] > began_s:  # and failed, after a minute of retries
                raise StorageError(self._not_replaced[1])
            try:
                self._storage = self._reopen()
            except Exception as exc:  # Prefect's API or the service that issues keys failed: it may work again soon
                if isinstance(exc, ValueError) and not isinstance(exc, _LATER):  # such as of a block that was deleted
                    raise
                failure = f"the credentials for {self.url} have run out and cannot be read anew: {exc}"
                self._not_replaced = time.monotonic(), failure
                raise StorageError(failure) from exc


def with_retries(storage: Storage, doing: str, key: str, call: Callable[[Storage], T]) -> T:
    """Return what `call` returns; retry it as the storage retries its own requests.

    Args:
        storage: The storage; if it does not retry, `call` is called once.
        doing: What `call` does, for the error.
        key: The key that it concerns, for the error.
        call: Receives the storage without retries.

    """
    return storage.do(doing, key, call) if isinstance(storage, RetryingStorage) else call(storage)


def _draw_wait_s(policy: RetryPolicy, num_tries: int) -> float:
    """Draw a pause; tenacity's own would draw from the process's generator, whose numbers belong to the training."""
    longest_s = min(policy.longest_wait_s, policy.first_wait_s * 2 ** min(num_tries - 1, _MOST_DOUBLINGS))
    return _jitter.uniform(0.0, longest_s)


@dataclass
class _Call:
    """One call of a verb.

    Attributes:
        doing: What it does, for messages.
        key: The key that it is about.
        used: The storage that was used last.
        started_s: When it began, by a monotonic clock.
        must_renew: Whether the credentials are to be read anew before the next try.
        has_renewed: Whether they were, or are to be: a later refusal is final, unless somebody may renew them.

    """

    doing: str
    key: str
    used: Storage
    started_s: float
    must_renew: bool = False
    has_renewed: bool = False
