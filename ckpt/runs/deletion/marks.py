"""Marks of pending deletions: two processes that each write first and then look cannot miss each other.

The deleting process writes a mark, then looks for anything that forbids the deletion (a pin, a manifest), and then deletes.
The forbidding process writes its pin or manifest, then looks for a mark, then checks that everything is still there. In any
order, one of the two sees the other and gives way. No conditional write is needed, which some storages do not offer
(https://en.wikipedia.org/wiki/Dekker%27s_algorithm). Each of the two puts a witness, an object of its own, beside the
objects that it then lists. A listing without the witness is that of a gateway in the storage's place, or lags behind.
"""

import secrets
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from prefect_torch.ckpt.errors import StorageError
from prefect_torch.ckpt.runs.layout import stem
from prefect_torch.ckpt.runs.run import Run, pinned_among
from prefect_torch.ckpt.storage.keys import is_key
from prefect_torch.ckpt.storage.machine.clocks import Stopwatch
from prefect_torch.ckpt.storage.protocol import ObjectInfo, Storage
from prefect_torch.ckpt.storage.retry import ended_by, with_retries
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.ckpt.text import utc_now

from .reserve import keep_space, put_despite_full_disk

STALE_S = 3600.0  # by the storage's clock: an older mark is that of a process that was killed
_RENEW_S = STALE_S / 6
_HOLDS_S = STALE_S / 3  # since it was written: no try of a deletion begins later, and the last one may take long


@dataclass(frozen=True, slots=True)
class _Mark:
    """The part of a mark that other processes need: the ids of the checkpoints to delete."""

    checkpoints: list[str]


class _MarkExpiredError(Exception):
    """So much time has passed since the mark was written that whatever forbids the deletion may have come in the meantime."""


class DeletionMark:
    """The mark of one deletion, renewed while the deletion goes on.

    Args:
        run: The run.
        ids: The checkpoints to delete.

    """

    def __init__(self, run: Run, ids: Iterable[str]) -> None:
        self._run = run
        self._ids = list(ids)
        self._token: str | None = None
        self._since_put = Stopwatch()

    @property
    def is_due(self) -> bool:
        """Whether a mark must be written before anything else is deleted."""
        return self._token is None or self._since_put.elapsed_s > _RENEW_S

    def renew(self) -> None:
        """Write the mark; the caller must look for pins and manifests afterwards."""
        old, token, since_put = self._token, secrets.token_hex(8), Stopwatch()
        run = self._run
        put_despite_full_disk(run, lambda: self._put(token, self._ids))
        self._token, self._since_put = token, since_put
        put_despite_full_disk(run, lambda: run.records.put_json(run.layout.pins_witness(token), {}))
        if old is not None:
            self._run.storage.delete(_keys(self._run, old))

    def pinned(self) -> frozenset[str]:
        """Return the ids of the pinned checkpoints, by a listing that can be believed; the mark must be written.

        Raises:
            StorageError: If listings of pins do not show this deletion's witness until the retries end.

        """
        assert self._token is not None
        layout = self._run.layout
        listed = _list_with(self._run, layout.pins, layout.pins_witness(self._token), "pinned checkpoints")
        return pinned_among(info.key for info in listed)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Delete in the body only while the mark holds: then a storage that does not answer is tried no more.

        Raises:
            StorageError: If it has not answered before.

        """

        def check() -> None:
            if self._since_put.elapsed_s > _HOLDS_S:
                raise _MarkExpiredError

        try:
            with ended_by(check):
                yield
        except _MarkExpiredError as exc:
            raise StorageError(
                f"{self._run.storage.url} has not answered for {_HOLDS_S / 60:.0f} minutes: what was to be deleted stays, as "
                "somebody may need it by now"
            ) from exc

    def withdraw(self) -> None:
        """Let the mark name no checkpoint: nothing may be deleted, so the mark itself stays."""
        if self._token is not None:
            with suppress(StorageError, OSError):  # it ends in an hour
                self._put(self._token, [])

    def _put(self, token: str, ids: list[str]) -> None:
        self._run.records.put(self._run.layout.deletion(token), {"checkpoints": ids, "marked_at": utc_now()})

    def remove(self) -> None:
        """Remove the mark: the deletion is complete, or will not happen."""
        if self._token is not None:
            self._run.storage.delete(_keys(self._run, self._token))
            self._token = None
            keep_space(self._run)


def _keys(run: Run, token: str) -> list[str]:
    """Return the keys of a deletion; the mark is last, since it leads to the witness if a process is killed in between."""
    return [run.layout.pins_witness(token), run.layout.deletion(token)]


@contextmanager
def marked(run: Run, ids: Iterable[str]) -> Iterator[DeletionMark]:
    """Yield the mark of a deletion, removed after it; after an error it stays, since requests may still be under way."""
    mark = DeletionMark(run, ids)
    yield mark
    mark.remove()


def is_marked(run: Run, checkpoint_id: str) -> bool:
    """Return whether another process is about to delete `checkpoint_id`; costs a put, a listing, and a deletion.

    Its witness proves the listing, and shows the storage's clock. Each current deletion costs one more small read.

    Raises:
        StorageError: If listings of marks do not show the witness until the retries end.

    """
    with witnessed(run) as witness:
        listed = _list_with(run, run.layout.deletions, witness, "checkpoints that a prune deletes")
    now_s = next(info.modified_s for info in listed if info.key == witness)
    fresh = (info.key for info in listed if info.modified_s > now_s - STALE_S and stem(info.key) != stem(witness))
    return any(checkpoint_id in _ids_at(run, key, {checkpoint_id}) for key in fresh)


@contextmanager
def witnessed(run: Run) -> Iterator[str]:
    """Yield the key of a witness, an object beside the marks of the run, removed afterwards; costs a put and a deletion."""
    witness = run.layout.deletions_witness(secrets.token_hex(8))
    run.records.put_json(witness, {"checkpoints": []})  # older versions take it for a mark, of no checkpoint
    try:
        yield witness
    finally:
        with suppress(StorageError, OSError):  # garbage collection removes it as it does the mark of a killed process
            run.storage.delete([witness])


def _list_with(run: Run, prefix: str, witness: str, what: str) -> list[ObjectInfo]:
    """Return the objects below `prefix`, by a listing that shows `witness`, which was put just before."""

    def list_once(storage: Storage) -> list[ObjectInfo]:
        listed = [info for info in storage.list(prefix) if is_key(info.key)]
        if witness not in {info.key for info in listed}:
            raise StorageError(
                f"{storage.url} does not list {witness}, which was put just before: something before the storage answers "
                f"listings in its place, or they lag behind, so that {what} cannot be distinguished from others"
            )
        return listed

    return with_retries(run.storage, "listing", prefix, list_once)


def remove_stale_marks(run: Run, now_s: float) -> None:
    """Remove the marks of processes that were killed; `now_s` is the storage's clock."""
    stale = [info.key for info in run.storage.list(run.layout.deletions) if info.modified_s < now_s - STALE_S]
    keys = [key for mark in filter(is_key, stale) for key in (run.layout.pins_witness(stem(mark)), mark)]
    run.storage.delete(filter(is_key, keys))


def _ids_at(run: Run, key: str, unreadable: Collection[str]) -> Collection[str]:
    """Return the ids of a mark: none if it was removed since, `unreadable` if it is damaged, as it may hold any id."""
    if find_size(run.storage, key) is None:
        return ()
    found = run.records.get(_Mark, key, "the mark of a deletion")
    return unreadable if found is None else found.checkpoints
