"""The display of a failure at a terminal: the sentence and the caller's frames, once."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from prefect.logging.handlers import PrefectConsoleHandler
from prefect_torch.tasks.rank.tracebacks import user_traceback
from rich.console import Console

_MARK = "_prefect_torch_shown_short"


class HiddenAtTerminal(logging.Filter):
    """Hides records from a terminal, where an exception follows that says the same; Prefect's server gets them."""

    def __init__(self, is_said_again: Callable[[logging.LogRecord], bool]) -> None:
        super().__init__()
        self._is_said_again = is_said_again

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether nothing else says the same."""
        return not self._is_said_again(record)


def show_short(error: BaseException) -> None:
    """Show `error`, if nobody catches it, without this package's frames and without the cause, which repeats its message.

    A `sys.excepthook` that other code has set is left as it is, and gets the exception.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_short
    with suppress(AttributeError):  # a class with __slots__; it is shown as a whole
        setattr(error, _MARK, True)  # built-in exceptions do not support weak references


def filter_terminals(hidden: HiddenAtTerminal) -> None:
    """Attach the filter to Prefect's console handlers; adding it again has no effect."""
    for handler in _console_handlers():
        handler.addFilter(hidden)


def outlive_terminals() -> None:
    """Drop log lines once nobody reads Prefect's console; rich would end the thread that logs, by SystemExit.

    That happens to the flow runs of a killed worker, and with a pipe whose reader is gone.
    """
    for handler in _console_handlers():
        handler.console.on_broken_pipe = partial(_fall_silent, handler.console)  # type: ignore[method-assign] # rich's own hook


def _console_handlers() -> Iterator[PrefectConsoleHandler]:
    for name in (None, "prefect"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                yield handler


def _fall_silent(console: Console) -> None:
    console.quiet = True
    # Text that is left in the stream's buffer would fail at the exit. A stream that leads elsewhere may have no descriptor.
    with suppress(AttributeError, OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), console.file.fileno())


def _print_short(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print an exception that left a flow of this package without frames that say nothing; others as Python does."""
    if not hasattr(error, _MARK):
        sys.__excepthook__(kind, error, frames)
    elif not isinstance(error, KeyboardInterrupt):  # the training has said how it ended
        sys.stderr.write(user_traceback(error.with_traceback(frames), with_cause=False))
