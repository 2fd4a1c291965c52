"""Choosing the lines of ranks that go to Prefect, and storing all lines as files beside the run."""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context

from prefect_torch.ckpt import StorageError
from prefect_torch.ckpt.runs.log_files import LogFiles
from prefect_torch.ckpt.storage.retry import is_refusal
from prefect_torch.tasks.options.config import LogLevel, LogRanks
from prefect_torch.tasks.prefect_api.outage import WAITING_LINES
from prefect_torch.tasks.rank.spec import RankSpec
from prefect_torch.tasks.run_logs import get_run_logger

from .log_levels import LEVELS, LineLevels

_FLUSH_S = 10.0
_LAST_LINES = 50


class RankLog:
    """The lines of one rank.

    Args:
        rank: Its number.
        level: The lowest level of the lines that go to Prefect.
        files: Where all lines are stored; None for nowhere.
        prefix: The beginning of its lines in Prefect.

    """

    def __init__(self, rank: int, level: int = logging.NOTSET, files: LogFiles | None = None, prefix: str = "") -> None:
        self._rank, self._level, self._files, self._prefix = rank, level, files, prefix
        self._levels = LineLevels()
        self._withheld: deque[tuple[int, str]] = deque(maxlen=_LAST_LINES)

    def write(self, lines: Sequence[str]) -> None:
        """Log the lines in Prefect that belong there, each at its level, in the current task run; keep all for the files."""
        if not lines:
            return
        if self._files is not None:
            self._files.append(self._rank, lines)
        for line in lines:
            level = self._levels.level_of(line)
            if level >= self._level:
                self._log(level, line)
            else:
                self._withheld.append((level, line))
        WAITING_LINES.bound()

    def write_all(self) -> None:
        """Log every line in Prefect from now on, and the last ones that were withheld: the rank has failed, or hangs."""
        withheld, self._level = list(self._withheld), logging.NOTSET
        self._withheld.clear()
        for level, line in withheld:
            self._log(level, line)

    def _log(self, level: int, line: str) -> None:
        get_run_logger().log(max(level, logging.INFO), "%s%s", self._prefix, line)  # below INFO, Prefect would drop it


class RankLogs:
    """The lines of the ranks of an attempt or an evaluation.

    Args:
        ranks: The ranks whose lines go to Prefect.
        level: The lowest level of the lines that do; None for all.
        files: Where all lines are stored; None for nowhere.

    """

    def __init__(self, ranks: LogRanks, level: LogLevel | None, files: LogFiles | None) -> None:
        self._ranks: LogRanks = ranks
        self._level = logging.NOTSET if level is None else LEVELS[level]
        self._files = files

    def of(self, spec: RankSpec, prefix: str = "") -> RankLog:
        """Return the log of a rank, whose lines begin with `prefix` in Prefect."""
        is_shown = {"all": True, "rank0": spec.rank == 0, "local0": spec.local_rank == 0}[self._ranks]
        return RankLog(spec.rank, self._level if is_shown else logging.CRITICAL + 1, self._files, prefix)


@contextmanager
def rank_logs(ranks: LogRanks, level: LogLevel | None, files: LogFiles) -> Iterator[RankLogs]:
    """Yield the logs of ranks; where some lines do not go to Prefect, all are stored every ten seconds.

    Args:
        ranks: The ranks whose lines go to Prefect.
        level: The lowest level of the lines that do; None for all.
        files: Where the lines are stored.

    """
    is_logged = get_run_logger().isEnabledFor(logging.INFO)  # not with PREFECT_LOGGING_LEVEL=WARNING: Prefect drops lines
    if ranks == "all" and level is None and is_logged:
        yield RankLogs(ranks, level, None)
        return
    ended = threading.Event()
    thread = threading.Thread(target=copy_context().run, args=(_store, files, ended), name="log-files", daemon=True)
    thread.start()
    try:
        yield RankLogs(ranks, level, files)
    finally:
        ended.set()
        thread.join()


def _store(files: LogFiles, ended: threading.Event) -> None:
    is_last, was_refused = False, False
    while not is_last:
        is_last = ended.wait(_FLUSH_S)
        try:
            (files.close if is_last else files.flush)()
        except (StorageError, OSError, RuntimeError) as exc:  # the last: no thread is left for the moment
            if is_last or not (is_refusal(exc) and was_refused):  # it is refused for weeks where nothing may be stored
                again = "" if is_last else ", and are tried again"
                get_run_logger().warning("lines of ranks could not be stored beside the run%s: %s", again, exc)
            was_refused = is_refusal(exc)
    if files.num_lost:
        get_run_logger().warning("%d MiB of lines of ranks are lost, since the storage failed for too long", files.num_lost)
