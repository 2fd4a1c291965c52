"""The log of `prefect_torch.ckpt` as part of the current run's log: the UI shows no other loggers."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import get_run_logger

_LIBRARY = logging.getLogger("prefect_torch.ckpt")


@contextmanager
def library_logs_in_run() -> Iterator[None]:
    """Copy the records of this thread about checkpoints, from INFO on, to the log of the current run."""
    handler = _ToRun(get_run_logger())
    level = _LIBRARY.level
    _LIBRARY.setLevel(min(logging.INFO, _LIBRARY.getEffectiveLevel()))
    _LIBRARY.addHandler(handler)
    try:
        yield
    finally:
        _LIBRARY.removeHandler(handler)
        _LIBRARY.setLevel(level)


class _ToRun(logging.Handler):
    def __init__(self, run_logger: "logging.Logger | logging.LoggerAdapter[logging.Logger]") -> None:
        super().__init__(logging.INFO)
        self._run_logger = run_logger
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:  # the training of another thread has its own log
            self._run_logger.log(record.levelno, "%s", record.getMessage())
