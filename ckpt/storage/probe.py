"""Whether a storage lets a training do all it does: write, list, read, delete."""

import errno
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from prefect_torch.ckpt.errors import CheckpointError, StorageError

from .object_store_listing import ServerOrder
from .protocol import RetryPolicy, Storage
from .retry import ClockSkewError

Step: TypeAlias = Literal["write", "list", "read", "delete", "forget"]
ListingOrder: TypeAlias = Literal["keys", "folders", "none"]

PATIENCE = RetryPolicy(deadline_s=20.0)  # somebody waits for the answer; a training has two minutes
_CONTENT = b"prefect-torch probe"
_NAMES = ("a.json", "a/b.json", "a-c/d", "b.json", "c")  # of which each of the known orders of listings makes another row
_ADVICE: dict[int | None, str] = {
    errno.ENOSPC: "free some space, or give another place",
    errno.EDQUOT: "free some space, or give another place",
    errno.EROFS: "mount it writable, or give another place",
}
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
        order: How it lists: by whole "keys", by "folders" and what is in them, or in an order that is "none" of these. Any
            will do; where it is none, finding the latest of more than a thousand checkpoints lists them all.

    """

    url: str
    took_s: dict[Step, float]
    order: ListingOrder = "keys"

    @property
    def total_s(self) -> float:
        """How long it took in all, in seconds."""
        return sum(self.took_s.values())


def probe_storage(storage: Storage) -> StorageProbe:
    """Write, list, read and delete small objects under a name that nobody has; nothing of it stays, no new folder either.

    A listing must tell what was put just before, leave out nothing behind the key it begins after, and tell nothing deleted.
    Costs a dozen requests. A storage that does not answer is given up as its own retries say.

    Raises:
        StorageUnfitError: With the first step that fails, and what to do.

    """
    trial = _Trial(storage, f"prefect-torch-probe-{secrets.token_hex(4)}/")
    took_s: dict[Step, float] = {}
    with _no_new_folders(storage):
        for step, act in trial.steps():
            started_s = time.monotonic()
            try:
                act()
            except Exception as exc:
                if not isinstance(exc, StorageError):  # one that does not answer would only be waited for once more
                    with suppress(Exception):  # what stays behind is told less urgently than why
                        storage.delete(trial.keys)
                raise StorageUnfitError(f"{storage.url} does not {step}: {exc}", _advice(step, exc, storage.url)) from exc
            took_s[step] = time.monotonic() - started_s
    return StorageProbe(storage.url, took_s, trial.order)


class _Trial:
    """The steps of a probe below `prefix`."""

    def __init__(self, storage: Storage, prefix: str) -> None:
        self._storage = storage
        self._prefix = prefix
        self.keys = [f"{prefix}{name}" for name in _NAMES]
        self.order: ListingOrder = "none"

    def steps(self) -> Iterator[tuple[Step, Callable[[], None]]]:
        yield "write", self._write
        yield "list", self._list
        yield "read", self._read
        yield "delete", lambda: self._storage.delete(self.keys)
        yield "forget", self._forget

    def _write(self) -> None:
        for key in self.keys[:-1]:
            self._storage.put_bytes(key, _CONTENT)

    def _list(self) -> None:
        self._expect(self._listed(), self.keys[:-1])
        self._storage.put_bytes(self.keys[-1], _CONTENT)
        self._expect(listed := self._listed(), self.keys)
        after, behind = f"{self._prefix}b", self.keys[-2:]
        if missing := sorted(set(behind) - set(self._listed(after))):
            raise ValueError(f"asked for what sorts after {after}, it leaves out {missing}")
        order = ServerOrder(is_documented=False)
        order.see(None, listed)
        self.order = "keys" if order.by_keys else "folders" if order.by_names else "none"

    def _read(self) -> None:
        if (got := self._storage.get_bytes(self.keys[0])) != _CONTENT:
            raise ValueError(f"it gives back {got!r} instead of {_CONTENT!r}")

    def _forget(self) -> None:
        if keys := self._listed():
            raise ValueError(f"it still lists {sorted(keys)}")

    def _listed(self, after: str | None = None) -> list[str]:
        return [info.key for info in self._storage.list(self._prefix, after=after)]

    def _expect(self, listed: list[str], stored: list[str]) -> None:
        if set(listed) != set(stored):
            raise ValueError(f"it lists {sorted(listed)} instead of {sorted(stored)}, which were stored just before")


def _advice(step: Step, error: Exception, url: str) -> str:
    if isinstance(error, ClockSkewError):
        return "have NTP set this machine's clock"
    if isinstance(error, PermissionError):
        right = f"the right to {step}" + (f" ({_RIGHTS[step]})" if url.startswith("s3") and step in _RIGHTS else "")
        return f"let this user {step} there: {right} is missing, or give other credentials"
    if isinstance(error, FileNotFoundError) and "://" in url:
        return "create the bucket, or fix its name in the URL or the block"
    if isinstance(error, StorageError):
        return "check the endpoint's address and the network, or try again later"
    if isinstance(error, OSError) and error.errno in _ADVICE:
        return _ADVICE[error.errno]
    lists_wrong = step in ("list", "forget") and isinstance(error, ValueError)
    what = "switch off what answers listings from a cache" if lists_wrong else f"let this user {step} there"
    return f"{what}, or give another place"


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
