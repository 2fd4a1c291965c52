"""What `prefect_torch.ckpt` logs, shown in the log of the run that it concerns: the UI knows no other loggers."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import get_run_logger

_LIBRARY = logging.getLogger("prefect_torch.ckpt")


@contextmanager
def library_logs_in_run() -> Iterator[None]:
    """Pass on to the current run what this thread logs about checkpoints, from INFO on."""
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
        if record.thread == self._thread:  # another thread's training has a log of its own
            self._run_logger.log(record.levelno, "%s", record.getMessage())
