"""Messages of one line: Prefect takes the whole text of an exception for the message of a state."""

_LATER_LINES = "_prefect_torch_later_lines"


def shorten_message(error: Exception) -> Exception:
    """Return `error` with the first line of its message; the others are a note of it, so that a traceback shows them all.

    An exception that makes its text from something else than its only argument stays as it is.
    """
    text = error.args[0] if len(error.args) == 1 else None
    if type(error).__str__ in (BaseException.__str__, OSError.__str__) and isinstance(text, str):
        first, newline, later = text.partition("\n")
        if newline:
            error.args = (first,)
            setattr(error, _LATER_LINES, later)
            error.__notes__ = [later, *getattr(error, "__notes__", [])]
    return error


def restore_message(error: BaseException) -> None:
    """Give `error` the whole message back, if `shorten_message` shortened it; in another process too."""
    later: str | None = error.__dict__.pop(_LATER_LINES, None)
    if later is None:
        return
    error.args = (f"{error.args[0]}\n{later}",)
    notes = getattr(error, "__notes__", [])
    if later in notes:
        notes.remove(later)
    if not notes and hasattr(error, "__notes__"):
        del error.__notes__
