"""The output of the ranks of an attempt or an evaluation, in log files of the run."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from threading import Lock

from prefect_torch.ckpt.runs.manifest import is_id
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.keys import is_key
from prefect_torch.ckpt.storage.parallel import AT_ONCE, for_each, read_all
from prefect_torch.ckpt.storage.synced.first_download import upload_waiting
from prefect_torch.ckpt.text import utc_now

from .parts.log_pieces import GrowingPart, list_parts, read_part
from .parts.merging import Merging

_PART_BYTES = 1 << 20
_MOST_UNSTORED_PARTS = 64  # a storage that fails for long must not fill the memory
_logger = logging.getLogger(__name__)
_PART = re.compile(r"rank-(?P<rank>[0-9]+)(\.(?P<number>[0-9]+))?")


class LogFiles:
    """The log files of the ranks of one attempt or evaluation, in parts of 1 MiB, since most storages cannot append.

    The newest part of a rank is stored in pieces while it grows, and whole once it is full, or at the end. No object is stored
    again, so a log costs the storage a few times its bytes, however slowly it grows. Lines may be appended from any thread.

    Args:
        run: The run.
        folder: Where they lie in its storage, a prefix of its layout.

    Attributes:
        num_lost: How many parts were dropped, since the storage failed for too long.

    """

    def __init__(self, run: Run, folder: str) -> None:
        self.num_lost = 0
        self._run, self._folder = run, folder
        self._newest: dict[int, GrowingPart] = {}
        self._unstored: dict[str, GrowingPart] = {}
        self._merging = Merging(run.storage, f"the logs of run {run.name!r}")
        self._changing = Lock()

    def remove_former(self) -> None:
        """Remove the files of an earlier evaluation of the same checkpoint under the same name; costs a listing.

        Where the storage refuses to delete them, they stay, with a warning: the new log has lines of theirs.
        """
        if former := self._run.keys(self._folder):
            try:
                self._run.storage.delete(former)
            except PermissionError as exc:
                _logger.warning("the log of an earlier evaluation stays among the lines of this one: %s", exc)

    def append(self, rank: int, lines: Sequence[str]) -> None:
        """Append lines to a rank's log, with the time; nothing is stored before `flush`."""
        now = utc_now()
        text = "".join(f"{now} {line}\n" for line in lines).encode(errors="backslashreplace")
        with self._changing:
            part = self._newest.setdefault(rank, GrowingPart(rank))
            if part.text and len(part.text) + len(text) > _PART_BYTES:
                self._fill(part)
                part = self._newest[rank] = GrowingPart(rank, part.number + 1)
            part.text += text
            self._unstored[part.name] = part
            while len(self._unstored) > len(self._newest) + _MOST_UNSTORED_PARTS:
                del self._unstored[next(iter(self._unstored))]
                self.num_lost += 1

    def close(self) -> None:
        """Store what was appended since the last time, also at the target of a synced directory; raises as `flush`."""
        with self._changing:
            for part in self._newest.values():
                self._fill(part)
        self.flush()
        upload_waiting(self._run.spec)

    def flush(self) -> None:
        """Store what was appended since the last time, up to 32 files at a time.

        Raises:
            StorageError, OSError: If the storage fails; the next call tries again.
            RuntimeError: If no thread is left; likewise.

        """
        with self._changing:
            unstored = tuple(self._unstored.values())
        for_each(unstored, self._store, AT_ONCE)
        self._merging.delete_replaced()

    def _fill(self, part: GrowingPart) -> None:
        part.is_full = True
        self._unstored[part.name] = part

    def _store(self, part: GrowingPart) -> None:
        with self._changing:
            text, is_full = bytes(part.text), part.is_full
        piece = part.following(self._folder, len(text), is_whole=is_full)
        if replaced := part.replaced_by(piece):
            self._merging.replace(replaced, piece.key, text[piece.begin :])
        else:
            self._run.storage.put_bytes(piece.key, text[piece.begin :])
        part.add(piece)
        with self._changing:
            if len(part.text) == len(text) and part.is_full == is_full:
                self._unstored.pop(part.name, None)


def read_logs(run: Run, folder: str, rank: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield the lines of the log files in a folder, each with the name of its rank, rank by rank.

    Args:
        run: The run.
        folder: Where they lie in its storage, a prefix of its layout.
        rank: Only the lines of this rank.

    """
    parts = list_parts(run, folder)
    wanted = sorted((it for it in parts if rank is None or _file(it) == f"rank-{rank}"), key=_order)
    for first in range(0, len(wanted), AT_ONCE):
        some = wanted[first : first + AT_ONCE]
        for part, text in zip(some, read_all(some, lambda it: read_part(run, folder, it, parts[it])), strict=True):
            lines = text.decode(errors="replace").removesuffix("\n").split("\n")  # not splitlines, which knows other ends, too
            yield from ((_file(part), line) for line in lines if text)


def delete_evaluation_logs(run: Run, is_deleted: Callable[[str], bool]) -> None:
    """Delete the logs of all evaluations of the checkpoints for whose id `is_deleted` returns true; costs a listing.

    Raises:
        StorageError, OSError: If the storage fails.

    """
    logs = run.layout.all_evaluation_logs
    by_checkpoint: dict[str, list[str]] = defaultdict(list)
    for key in run.keys(logs):
        _, _, below = key.removeprefix(logs).partition("/")
        checkpoint_id, _, file = below.partition("/")
        if is_id(checkpoint_id) and file and is_key(key):  # else another program's
            by_checkpoint[checkpoint_id].append(key)
    left = [key for it, keys in by_checkpoint.items() if is_deleted(it) for key in keys]
    if left:
        run.storage.delete(left)


def _file(part: str) -> str:
    return part.partition(".")[0]


def _order(part: str) -> tuple[bool, int, int, str]:
    """Return a key that sorts ranks by number, and files of others, such as a launcher's, after them."""
    match = _PART.fullmatch(part)
    return (True, 0, 0, part) if match is None else (False, int(match["rank"]), int(match["number"] or 0), part)
