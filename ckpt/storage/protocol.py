"""The storage protocol: the verbs of every backend, with string keys, whole objects, and no rename."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

Splits: TypeAlias = Callable[[], Sequence[str]]
MOST_RECORD_BYTES = 2**30  # the most that `get_bytes` reads: a manifest of a million files, whose paths may be long


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retry policy of a storage.

    Attributes:
        deadline_s: How many seconds after the first failure to give up, but not before two tries; a try is never cut short.
        first_wait_s: The longest first pause; pauses double and are drawn at random from 0 to their length ("full jitter",
            https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter).
        longest_wait_s: The longest pause.

    """

    deadline_s: float = 120.0
    first_wait_s: float = 0.2
    longest_wait_s: float = 10.0


INTERACTIVE_RETRY_POLICY = RetryPolicy(deadline_s=20.0)  # a person waits for the result; a training has two minutes


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """Everything that a process needs to open a storage; it is sent to the ranks, and its repr shows no secret.

    Attributes:
        url: An absolute local path, or a URL (`s3://bucket/prefix`, `gs://…`, `az://…`, `memory://…`).
        options: The other arguments of the backend's client: endpoint, region, credentials.
        retry: The storage's retry policy.
        credential_source: The block that the options come from, or its name, pickled by this program: the source of fresh
            credentials.

    """

    url: str
    options: dict[str, str] = field(default_factory=dict, repr=False)
    retry: RetryPolicy = RetryPolicy()
    credential_source: bytes | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object in a listing.

    Attributes:
        key: Relative to the storage's url.
        bytes: Its size.
        modified_s: The time of its last write (seconds since the epoch, the storage's clock).

    """

    key: str
    bytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """The size and digest of transferred bytes.

    Attributes:
        bytes: The number of bytes.
        digest: xxh3-128 of them, 32 hexadecimal digits, computed from the very bytes that were sent or received.

    """

    bytes: int
    digest: str


class Storage(Protocol):
    """A store of objects.

    A key is one or more names joined with "/". A verb that returned has taken effect for every reader; one that raised
    may or may not have. All raise FileNotFoundError for a missing object, PermissionError for a refused access, and
    StorageError for a transient error. Implementations are safe to share between threads.
    """

    @property
    def url(self) -> str:
        """The storage's location, without secrets."""
        ...

    def put_file(self, key: str, path: Path) -> Transfer:
        """Store the file at `path`; durable when this returns."""
        ...

    def put_files(self, files: Mapping[str, str | Path], *, owned: bool = False) -> dict[str, Transfer]:
        """Store several files, by key; all are durable when this returns; where possible at a lower cost than one by one.

        After an error, or if the process dies, any of them may be stored, also in part: no reader may know their keys yet.

        Args:
            files: The path of each file, by its key; use strings for many files, since a `Path` costs as much as a small write.
            owned: Whether the storage may give them a second name (a hard link) instead of copying: the caller removes the
                first one, once they are part of a checkpoint, before anybody writes to them again.

        """
        ...

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Store `parts`, one after the other, as one object, straight from memory; durable when this returns.

        The caller leaves the memory unchanged until then. Parts are bytes (format "B"), and may be empty.
        """
        ...

    def get_file(self, key: str, path: Path, expected: int | None = None) -> Transfer:
        """Write the object to `path`, whose directory exists.

        Args:
            key: Its key.
            path: The file to write.
            expected: The size that it should have, in bytes. One of another size is not read, since it could fill the disk: the
                result has its size, and no digest. None if any is right.

        """
        ...

    def digest(self, key: str) -> Transfer:
        """Return the size and digest of the object, which is read in full and not kept."""
        ...

    def get_range(self, key: str, start: int, into: memoryview) -> int:
        """Fill `into` with the object's bytes from `start` on, and return their number: fewer if the object ends before."""
        ...

    def put_bytes(self, key: str, data: bytes) -> None:
        """Store a small object, replacing the old one; a reader sees the old one or the new one, whole."""
        ...

    def get_bytes(self, key: str) -> bytes:
        """Return a small object."""
        ...

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        """Yield every object whose key starts with `prefix`, in any order; an object may be yielded twice.

        The objects of all puts that returned are among them, and none that a delete removed.

        Args:
            prefix: Empty, or ends with "/"; longer prefixes below it are included.
            after: A key directly below `prefix`, which need not exist. Objects whose names sort before it are left out, and so
                are objects below a prefix whose name sorts before it. Servers sort by whole keys, or name by name, so objects
                below a prefix whose name is this key's name, or the beginning of it, may be left out or not.
            splits: Called for a long listing, if at all. It returns sorted keys directly below `prefix`, which need not exist,
                and between which the rest of the listing may be requested concurrently.

        """
        ...

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the prefixes directly below `prefix`, in any order; one without objects may be among them.

        `prefix` is empty or ends with "/". Costs a request per thousand, whatever the number of objects below them.
        """
        ...

    def size(self, key: str) -> int:
        """Return an object's size in bytes."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; a missing one is no error."""
        ...

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Remove the leftovers below `prefix` of puts that were interrupted more than `older_than_s` ago, but no object."""
        ...

    def reopened(self) -> "Storage":
        """Return this storage with a new connection and without cached state, which may be wrong; sends no request yet."""
        ...

    def local_path(self, key: str) -> Path | None:
        """Return the file or directory that holds `key` if this machine can read it in place, else None."""
        ...
