"""Whether a storage lets a training do all it does: write, list, read, delete."""

import errno
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from .errors import CheckpointError, StorageError
from .storage import RetryPolicy, Storage

Step: TypeAlias = Literal["write", "list", "read", "delete", "forget"]

PATIENCE = RetryPolicy(deadline_s=20.0)  # somebody waits for the answer; a training has two minutes
_CONTENT = b"prefect-torch probe"
_RIGHTS: dict[Step, str] = {
    "write": "s3:PutObject",
    "list": "s3:ListBucket",
    "read": "s3:GetObject",
    "delete": "s3:DeleteObject",
}


class StorageUnfitError(CheckpointError):
    """A storage does not do what trainings need: do as the message says.

    Attributes:
        found: What was wrong.
        advice: What to do.

    """

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(f"{found}; {advice}")
        self.found = found
        self.advice = advice

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.found, self.advice)


@dataclass(frozen=True, slots=True)
class StorageProbe:
    """What was tried at a storage, all of it with success.

    Attributes:
        url: Where.
        took_s: For how many seconds each step was tried, in their order; "forget" lists again after "delete".

    """

    url: str
    took_s: dict[Step, float]

    @property
    def total_s(self) -> float:
        """How long it took in all, in seconds."""
        return sum(self.took_s.values())


def probe_storage(storage: Storage) -> StorageProbe:
    """Write, list, read and delete a small object under a name that nobody has; nothing of it stays, no new folder either.

    Costs five requests. A storage that does not answer is given up as its own retries say.

    Raises:
        StorageUnfitError: With the first step that fails, and what to do.

    """
    folder = f"prefect-torch-probe-{secrets.token_hex(4)}"
    took_s: dict[Step, float] = {}
    with _no_new_folders(storage):
        for step, act in _steps(storage, folder):
            started_s = time.monotonic()
            try:
                act()
            except Exception as exc:
                if not isinstance(exc, StorageError):  # one that does not answer would only be waited for once more
                    with suppress(Exception):  # what stays behind is told less urgently than why
                        storage.delete([f"{folder}/probe"])
                raise StorageUnfitError(f"{storage.url} does not {step}: {exc}", _advice(step, exc, storage.url)) from exc
            took_s[step] = time.monotonic() - started_s
    return StorageProbe(storage.url, took_s)


def _steps(storage: Storage, folder: str) -> Iterator[tuple[Step, Callable[[], None]]]:
    key = f"{folder}/probe"

    def list_one() -> None:
        keys = [info.key for info in storage.list(f"{folder}/")]
        if keys != [key]:
            raise ValueError(f"it lists {keys} instead of {[key]}")

    def read() -> None:
        if (got := storage.get_bytes(key)) != _CONTENT:
            raise ValueError(f"it gives back {got!r} instead of {_CONTENT!r}")

    def list_none() -> None:
        if keys := [info.key for info in storage.list(f"{folder}/")]:
            raise ValueError(f"it still lists {keys}")

    yield "write", lambda: storage.put_bytes(key, _CONTENT)
    yield "list", list_one
    yield "read", read
    yield "delete", lambda: storage.delete([key])
    yield "forget", list_none


def _advice(step: Step, error: Exception, url: str) -> str:
    if isinstance(error, PermissionError):
        right = f"the right to {step}" + (f" ({_RIGHTS[step]})" if url.startswith("s3") and step in _RIGHTS else "")
        return f"let this user {step} there: {right} is missing, or give other credentials"
    if isinstance(error, FileNotFoundError) and "://" in url:
        return "create the bucket, or fix its name in the URL or the block"
    if isinstance(error, StorageError):
        return "check the endpoint's address and the network, or try again later"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or give another place"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "mount it writable, or give another place"
    return f"let this user {step} there, or give another place"


@contextmanager
def _no_new_folders(storage: Storage) -> Iterator[None]:
    """Remove the local folders that the first write makes."""
    root = Path(storage.url)
    missing = [] if "://" in storage.url else [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        yield
    finally:
        for folder in missing:  # the innermost first
            with suppress(OSError):  # somebody uses it by now
                folder.rmdir()
