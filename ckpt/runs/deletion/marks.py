"""Marks of pending deletions: two processes that each write first and look then cannot miss each other.

The deleting process writes a mark, then looks for anything that forbids the deletion (a pin, a manifest), and then deletes.
The forbidding process writes its pin or manifest, then looks for a mark, then checks that everything is still there. In any
order, one of the two sees the other and gives way. No conditional write is needed, which some storages do not offer
(https://en.wikipedia.org/wiki/Dekker%27s_algorithm).
"""

import secrets
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.keys import is_key
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.ckpt.text import utc_now

STALE_S = 3600.0  # by the storage's clock: an older mark is that of a process that was killed
_RENEW_S = STALE_S / 6


class DeletionMark:
    """The mark of one deletion, renewed while the deletion goes on.

    Args:
        run: The run.
        ids: The checkpoints to delete.

    """

    def __init__(self, run: Run, ids: Iterable[str]) -> None:
        self._run = run
        self._ids = list(ids)
        self._key: str | None = None
        self._put_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a mark must be written before anything else is deleted."""
        return self._key is None or time.monotonic() - self._put_s > _RENEW_S

    def renew(self) -> None:
        """Write the mark; the caller must look for pins and manifests afterwards."""
        old, key, now_s = self._key, self._run.layout.deletion(secrets.token_hex(8)), time.monotonic()
        self._run.put_json(key, {"checkpoints": self._ids, "marked_at": utc_now()})
        self._key, self._put_s = key, now_s
        if old is not None:
            self._run.storage.delete([old])

    def remove(self) -> None:
        """Remove the mark: the deletion is complete, or will not happen."""
        if self._key is not None:
            self._run.storage.delete([self._key])
            self._key = None


@contextmanager
def marked(run: Run, ids: Iterable[str]) -> Iterator[DeletionMark]:
    """Yield the mark of a deletion, removed after it; after an error it stays, since requests may still be under way."""
    mark = DeletionMark(run, ids)
    yield mark
    mark.remove()


def is_marked(run: Run, checkpoint_id: str, witness: str) -> bool:
    """Return whether another process is about to delete `checkpoint_id`; one listing, and a small read per current deletion.

    Args:
        run: The run.
        checkpoint_id: The checkpoint.
        witness: The key of an object that the caller has just put; its modification time gives the storage's clock.

    """
    marks = [info for info in run.storage.list(run.layout.deletions) if is_key(info.key)]
    if not marks:
        return False
    folder = f"{witness.rpartition('/')[0]}/"
    now_s = next((info.modified_s for info in run.storage.list(folder) if info.key == witness), 0.0)
    fresh = (info.key for info in marks if info.modified_s > now_s - STALE_S)
    return any(checkpoint_id in _ids_at(run, key, {checkpoint_id}) for key in fresh)


def remove_stale_marks(run: Run, now_s: float) -> None:
    """Remove the marks of processes that were killed; `now_s` is the storage's clock."""
    stale = [info.key for info in run.storage.list(run.layout.deletions) if info.modified_s < now_s - STALE_S]
    run.storage.delete(filter(is_key, stale))


def _ids_at(run: Run, key: str, unreadable: Collection[str]) -> Collection[str]:
    """Return the ids of a mark: none if it was removed since, `unreadable` if it is torn, as it may hold any."""
    if find_size(run.storage, key) is None:
        return ()
    found = (run.get_json(key) or {}).get("checkpoints")
    return found if isinstance(found, list) else unreadable
