"""What a terminal shows of a failure: the sentence and the caller's frames, once."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from prefect.logging.handlers import PrefectConsoleHandler
from prefect_torch.tasks.rank.tracebacks import user_traceback

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

    A hook that another has set is left as it is, and gets the exception.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_short
    with suppress(AttributeError):  # a class with __slots__; it is shown as a whole
        setattr(error, _MARK, True)  # exceptions of Python itself cannot be referred to weakly


def filter_terminals(hidden: HiddenAtTerminal) -> None:
    """Attach the filter to Prefect's console handlers; adding it again has no effect."""
    for name in (None, "prefect"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.addFilter(hidden)


def _print_short(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print an exception that left a flow of this package without frames that say nothing; others as Python does."""
    if not hasattr(error, _MARK):
        sys.__excepthook__(kind, error, frames)
    elif not isinstance(error, KeyboardInterrupt):  # the training has said how it ended
        sys.stderr.write(user_traceback(error.with_traceback(frames), with_cause=False))
