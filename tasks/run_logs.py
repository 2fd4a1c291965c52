"""The log of the current run, with the records of `prefect_torch.ckpt` as part of it: the UI shows no other loggers."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import prefect
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import MissingContextError
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.logging.loggers import flow_run_logger

Logger: TypeAlias = "logging.Logger | logging.LoggerAdapter[logging.Logger]"

_LIBRARY = logging.getLogger("prefect_torch.ckpt")
_current: "ContextVar[_ToRun | None]" = ContextVar("library_log", default=None)


def get_run_logger() -> Logger:
    """Return the logger of the innermost task run or flow run, or the package's own outside of both, as in `plan`.

    Prefect's function of this name assigns the lines of a flow that was called by a task to that task, so that the page of the
    flow run lacks them.
    """
    flow, task = FlowRunContext.get(), TaskRunContext.get()
    if task is not None and flow is not None and flow.flow_run is not None and flow.flow_run.id != task.task_run.flow_run_id:
        return flow_run_logger(flow.flow_run, flow.flow)
    try:
        return prefect.get_run_logger()
    except MissingContextError:
        return logging.getLogger("prefect_torch")


@contextmanager
def library_logs_in_run() -> Iterator[None]:
    """Copy the records about checkpoints, from INFO on, to the log of the current run.

    They are those of this thread, and of threads that work in a copy of its context; within another such body, the inner run's.
    Prefect's console shows only these copies, since it would show the warnings among the records twice.
    """
    handler = _ToRun(get_run_logger())
    consoles = [it for it in logging.getLogger().handlers if isinstance(it, PrefectConsoleHandler)]
    with _library_level:
        _LIBRARY.addHandler(handler)
        for console in consoles:
            console.addFilter(handler.leaves_out)
        token = _current.set(handler)
        try:
            yield
        finally:
            _current.reset(token)
            for console in consoles:
                console.removeFilter(handler.leaves_out)
            _LIBRARY.removeHandler(handler)


class _LibraryLevel:
    """Has the records from INFO on made while any thread is within the context: the level is one for all threads."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._num_within = 0
        self._before = logging.NOTSET

    def __enter__(self) -> None:
        with self._changing:
            if self._num_within == 0:
                self._before = _LIBRARY.level
                _LIBRARY.setLevel(min(logging.INFO, _LIBRARY.getEffectiveLevel()))
            self._num_within += 1

    def __exit__(self, *_: object) -> None:
        with self._changing:
            self._num_within -= 1
            if self._num_within == 0:
                _LIBRARY.setLevel(self._before)


_library_level = _LibraryLevel()


class _ToRun(logging.Handler):
    def __init__(self, run_logger: Logger) -> None:
        super().__init__(logging.INFO)
        self._run_logger = run_logger

    def emit(self, record: logging.LogRecord) -> None:
        if _current.get() is self:  # the training of another thread has its own log
            self._run_logger.log(record.levelno, "%s", record.getMessage())

    def leaves_out(self, record: logging.LogRecord) -> bool:
        """Return whether this handler has not copied the record."""
        is_copied = _current.get() is self and record.levelno >= self.level
        return not (is_copied and record.name.startswith(f"{_LIBRARY.name}."))
