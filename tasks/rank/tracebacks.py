"""Tracebacks as the author of a training function reads them: the frames of the author's code, and no others."""

import sysconfig
import traceback
from pathlib import Path
from traceback import StackSummary, TracebackException, walk_tb

_PACKAGE = f"{Path(__file__).parents[2]}/"
_PREFECT = "/site-packages/prefect/"
_WRAPPERS = ("/torch/distributed/c10d_logger.py", "/torch/_dynamo/eval_frame.py")  # of collectives; of what is compiled, or not
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_HIDDEN = (_PACKAGE, "<frozen importlib", "<frozen runpy")
# An exception of this kind that is raised by this package itself is a defect of it, so its frames are needed.
_DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, NotImplementedError, RecursionError)


def first_line(error: BaseException) -> str:
    """Return the type of `error` and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def message_line(error: BaseException) -> str:
    """Return the type of `error` and the first line of its message, as a traceback has them before its notes (`add_note`)."""
    described = TracebackException.from_exception(error)
    described.__dict__["__notes__"] = None
    *_, last = described.format_exception_only()  # before it, a SyntaxError has lines of the code
    return last.strip().partition("\n")[0]


def is_from_here(error: BaseException) -> bool:
    """Return whether this package is among the callers that `error` has passed."""
    return any(file.startswith(_PACKAGE) for file in _files(error))


def has_user_frames(error: BaseException) -> bool:
    """Return whether `error` has passed a frame of code that is installed neither with Python nor as a package."""
    return any(not _is_hidden(file) and not file.startswith(_INSTALLED) for file in _files(error))


def is_defect(error: BaseException) -> bool:
    """Return whether `error` was raised by this package, other than to report a mistake of the user."""
    if error.__cause__ is not None and is_ours(type(error.__cause__).__module__):
        return False
    files = _files(error)
    return isinstance(error, _DEFECTS) and bool(files) and files[-1].startswith(_PACKAGE)


def is_ours(module: str) -> bool:
    """Return whether a module of that name is of this package."""
    return module.partition(".")[0] == "prefect_torch"


def user_traceback(error: BaseException, *, with_cause: bool = True) -> str:
    """Return the traceback of `error` without the frames of this package, of Prefect, of torch's wrappers and of imports.

    The cause of an error of this package, in a library that it calls, is left out: the error's message says what to do. If no
    frame is left, the result is the last line of a traceback alone. A defect of this package has its whole traceback.

    Args:
        error: The exception, with the frames it has passed.
        with_cause: Whether the exception it was raised from is described first.

    """
    if is_defect(error):
        return "".join(traceback.format_exception(error))
    described = TracebackException.from_exception(error, compact=True)
    if not with_cause:
        described.__cause__ = described.__context__ = None
    _shorten(described, error)
    return "".join(described.format())


def shorten(error: BaseException) -> None:
    """Drop the frames that `error`, which is no defect, has passed, and causes that say nothing to a user."""
    error.__traceback__ = None
    if is_ours(type(error).__module__) or error.__cause__ is None or not is_ours(type(error.__cause__).__module__):
        error.__cause__ = None
        error.__suppress_context__ = True
    else:
        shorten(error.__cause__)


def _files(error: BaseException) -> list[str]:
    """Return the files of the frames that `error` has passed, the one that raised it last."""
    return [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]


def _shorten(described: TracebackException, error: BaseException) -> None:
    files = [frame.filename for frame in described.stack]
    described.stack = StackSummary.from_list([frame for frame in described.stack if not _is_hidden(frame.filename)])
    if is_ours(type(error).__module__) or (files and files[-1].startswith(_PACKAGE)):
        described.__cause__ = described.__context__ = None
    for cause, raised in ((described.__cause__, error.__cause__), (described.__context__, error.__context__)):
        if cause is not None and raised is not None:
            _shorten(cause, raised)


def _is_hidden(filename: str) -> bool:
    return filename.startswith(_HIDDEN) or _PREFECT in filename or filename.endswith(_WRAPPERS)
