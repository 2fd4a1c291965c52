"""The object-store verbs that every backend speaks: string keys, whole objects, nothing renamed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How patient to be with a storage.

    Attributes:
        deadline_s: After how many seconds in all to give up, once there were two tries; a try is never cut short.
        first_wait_s: The longest first pause; pauses double and are drawn at random from 0 to their length ("full jitter",
            https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter).
        longest_wait_s: What a pause grows to at most.

    """

    deadline_s: float = 120.0
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """Everything a process needs to open a storage; travels to the ranks, shows no secret.

    Attributes:
        url: An absolute local path, or a URL (`s3://bucket/prefix`, `gs://…`, `az://…`, `memory://…`).
        options: What the backend's client takes besides: endpoint, region, credentials.
        retry: How patient to be with it.
        renewal: The block that the options come from, or its name, pickled by this program: where to find fresh credentials.

    """

    url: str
    options: dict[str, str] = field(default_factory=dict, repr=False)
    retry: RetryPolicy = RetryPolicy()
    credential_source: bytes | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object as a listing tells it.

    Attributes:
        key: Relative to the storage's url.
        bytes: Its size.
        modified_s: When it was written (seconds since the epoch, the storage's clock).

    """

    key: str
    bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """What moved.

    Attributes:
        bytes: How many.
        digest: xxh3-128 of them, 32 hexadecimal digits, computed from the very bytes that were sent or received.

    """

    bytes: int
    digest: str


class Storage(Protocol):
    """A place for objects.

    A key is one or more names joined with "/". A verb that returned has taken effect for every reader; one that raised
    may or may not have. All raise FileNotFoundError for what is missing, PermissionError for what is refused, and
    StorageError for what may work later. Implementations are safe to share between threads.
    """

    @property
    def url(self) -> str:
        """Where this is, without secrets."""
        ...

    def put_file(self, key: str, path: Path) -> Transfer:
        """Store the file at `path`; durable when this returns."""
        ...

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Store `parts`, one after the other, as one object, straight from memory; durable when this returns.

        Whoever calls leaves the memory as it is until then. Parts are bytes (format "B"), and may be empty.
        """
        ...

    def get_file(self, key: str, path: Path) -> Transfer:
        """Write the object to `path`, whose folder exists."""
        ...

    def digest(self, key: str) -> Transfer:
        """Return the size and digest of the object, read in full and kept nowhere."""
        ...

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        """Fill `into` with the object's bytes from `start` on, and return how many there were: fewer where it ends before."""
        ...

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object, replacing what was there; a reader sees the old one or the new one, whole."""
        ...

    def get_bytes(self, key: str) -> bytes:
        """Return a small object."""
        ...

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with `prefix`, in any order; one may come twice.

        Every put that returned is among them, and nothing that a delete removed.

        Args:
            prefix: Empty, or ends with "/"; folders below it are walked, too.
            after: A key directly below `prefix`, which need not exist: an object whose name sorts before it is left out, and
                so is one in a folder whose name does. Servers sort by whole keys or by names, folder for folder, so a
                folder whose name is this one's, or its beginning, may be left out or not.

        """
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the folders directly below `prefix`, in any order; a folder without objects may be among them.

        `prefix` is empty or ends with "/". Costs a request per thousand, however much lies in the folders.
        """
        ...

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; one that is missing already is no error."""
        ...

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Remove what puts below `prefix` left behind that were interrupted longer ago than this; no object is touched."""
        ...

    def reopened(self) -> "Storage":
        """Return this storage by a new connection, past what this one may have got wrong and kept; asks nothing yet."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Return the file or folder that holds `key` when this machine can read it in place, else None."""
        ...
