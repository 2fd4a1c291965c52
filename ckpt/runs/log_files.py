"""The output of the ranks of an attempt or an evaluation, in log files of the run."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

from prefect_torch.ckpt.runs.layout import log_name
from prefect_torch.ckpt.runs.manifest import is_id
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.keys import is_key
from prefect_torch.ckpt.storage.parallel import AT_ONCE, for_each
from prefect_torch.ckpt.storage.synced.first_download import upload_waiting
from prefect_torch.ckpt.text import utc_now

_PART_BYTES = 1 << 20
_MOST_UNSTORED_PARTS = 64  # a storage that fails for long must not fill the memory
_logger = logging.getLogger(__name__)
_NAME = re.compile(r"rank-(?P<rank>[0-9]+)(\.(?P<part>[0-9]+))?\.log")


@dataclass(slots=True)
class _Part:
    number: int = 0
    text: bytearray = field(default_factory=bytearray)


class LogFiles:
    """The log files of the ranks of one attempt or evaluation, in parts of 1 MiB, since most storages cannot append.

    The newest part of a rank is written again while it grows. Lines may be appended from any thread.

    Args:
        run: The run.
        folder: Where they lie in its storage, a prefix of its layout.

    Attributes:
        num_lost: How many parts were dropped, since the storage failed for too long.

    """

    def __init__(self, run: Run, folder: str) -> None:
        self.num_lost = 0
        self._run, self._folder = run, folder
        self._newest: dict[int, _Part] = {}
        self._unstored: dict[str, bytearray] = {}
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
            part = self._newest.setdefault(rank, _Part())
            if part.text and len(part.text) + len(text) > _PART_BYTES:
                part = self._newest[rank] = _Part(part.number + 1)
            part.text += text
            self._unstored[self._folder + log_name(rank, part.number)] = part.text
            while len(self._unstored) > len(self._newest) + _MOST_UNSTORED_PARTS:
                del self._unstored[next(iter(self._unstored))]
                self.num_lost += 1

    def close(self) -> None:
        """Store what was appended since the last time, also at the target of a synced directory; raises as `flush`."""
        self.flush()
        upload_waiting(self._run.spec)

    def flush(self) -> None:
        """Store what was appended since the last time, up to 32 files at a time.

        Raises:
            StorageError, OSError: If the storage fails; the next call tries again.
            RuntimeError: If no thread is left; likewise.

        """
        with self._changing:
            unstored = tuple(self._unstored)
        for_each(unstored, self._store, AT_ONCE)

    def _store(self, key: str) -> None:
        with self._changing:
            text = self._unstored.get(key)
            stored = None if text is None else bytes(text)
        if stored is None:
            return
        self._run.storage.put_bytes(key, stored)
        with self._changing:
            if len(self._unstored.get(key, b"")) == len(stored):
                del self._unstored[key]


def read_logs(run: Run, folder: str, rank: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield the lines of the log files in a folder, each with the name of its rank, rank by rank.

    Args:
        run: The run.
        folder: Where they lie in its storage, a prefix of its layout.
        rank: Only the lines of this rank.

    """
    names = [key.removeprefix(folder) for key in run.keys(folder)]
    for name in sorted(names, key=_order):
        file = name.partition(".")[0]
        if rank is None or file == f"rank-{rank}":
            text = run.storage.get_bytes(folder + name).decode(errors="replace")
            for line in text.removesuffix("\n").split("\n") if text else ():  # not splitlines, which knows other ends, too
                yield file, line


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


def _order(name: str) -> tuple[bool, int, int, str]:
    """Return a key that sorts ranks by number, and files of others, such as a launcher's, after them."""
    match = _NAME.fullmatch(name)
    return (True, 0, 0, name) if match is None else (False, int(match["rank"]), int(match["part"] or 0), name)
