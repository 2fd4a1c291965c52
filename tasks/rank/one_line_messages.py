"""Messages of one line: Prefect takes the whole text of an exception for the message of a state."""

from typing import Any

_LATER_LINES = "_prefect_torch_later_lines"


class _StandIn(Exception):  # noqa: N818 - each has the name of the class that it stands for
    """Stands for an exception whose class makes a text of several lines; unpickled, it is that exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error).partition("\n")[0])
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.error,)


def shorten_message(error: Exception) -> Exception:
    """Return an exception whose message is the first line of that of `error`, for Prefect's engine to raise.

    It is `error` itself, with the other lines as a note of it, so that a traceback shows them all. If its class makes the text
    from something else than its only argument, it is another exception, of a class of the same name.
    """
    text = error.args[0] if len(error.args) == 1 else None
    if type(error).__str__ in (BaseException.__str__, OSError.__str__) and isinstance(text, str):
        first, newline, later = text.partition("\n")
        if newline:
            error.args = (first,)
            setattr(error, _LATER_LINES, later)
            error.__dict__["__notes__"] = [later, *getattr(error, "__notes__", [])]
    elif "\n" in str(error):
        named = {"__module__": type(error).__module__, "__qualname__": type(error).__qualname__}
        stand_in: _StandIn = type(type(error).__name__, (_StandIn,), named)(error)
        return stand_in
    return error


def restore_message(error: BaseException) -> BaseException:
    """Return `error` as it was before `shorten_message`; in another process too."""
    if isinstance(error, _StandIn):
        error.error.__cause__ = error.__cause__
        return error.error.with_traceback(error.__traceback__)
    later: str | None = error.__dict__.pop(_LATER_LINES, None)
    if later is not None:
        error.args = (f"{error.args[0]}\n{later}",)
        notes = getattr(error, "__notes__", [])
        if later in notes:
            notes.remove(later)
        if not notes and hasattr(error, "__notes__"):
            del error.__dict__["__notes__"]
    return error


def _itself(error: Exception) -> Exception:
    return error
