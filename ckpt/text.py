"""Sizes, ages, names, classes, functions, commands and times as text, for a terminal, a page, an error or a record."""

import re
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))
_SHOWN = 5
_LOGIN = re.compile(r"//(?:[^/\s]*@|[^/:@\[\s]*:(?!\d+\b)[^@\s]*@)")  # one with a colon and no port may hold a slash
_QUERY = re.compile(r"\?[^\s<>]+")


def show_bytes(number: int) -> str:
    """Return a size in the unit that suits it."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:  # noqa: PLR2004 - the size of a KiB
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_age(seconds: float) -> str:
    """Return an age in one unit, rounded down."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def show_count(number: int, noun: str) -> str:
    """Return a number with its noun in the right form."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def show_class(value: object) -> str:
    """Return the name of a value's class, with its module unless it is built in: other packages have a Checkpoint, too."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, of that in a partial, or of the class of another callable: their reprs may hold data."""
    inner = in_partials(function)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def in_partials(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of which a partial is made, or `function` itself."""
    while isinstance(function, partial):
        function = function.func
    return function


def show_some(names: Sequence[str]) -> str:
    """Return the first five of `names`, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def as_command(*words: str) -> str:
    """Return the command `prefect-torch` with `words`, as one types it in a shell."""
    return shlex.join(["prefect-torch", *words])


def clip(text: str, most: int = 10_000) -> str:
    """Return `text` for a message; one longer than `most` as its beginning, the number of characters left out, and its end."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"


def headline(text: str | None) -> str:
    """Return the first line of an error, in which it says what has happened; "" if there is none."""
    return (text or "").strip().partition("\n")[0]


def printable(text: str) -> str:
    """Return `text` as one line without control characters, which a terminal would obey; it may come from others."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))


def encodable(text: str) -> str:
    """Return `text` with its lone surrogates, such as half an emoji, and NULs escaped: UTF-8 or PostgreSQL cannot hold them."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def without_login(text: str) -> str:
    """Return a text without the users and passwords in its URLs."""
    return _LOGIN.sub("//", text)


def without_secrets(text: str) -> str:
    """Return a library's text without the logins and the queries of its URLs: a query may be signed, or hold a token."""
    return _QUERY.sub("", without_login(text))


def utc_now() -> str:
    """Return the time by this machine's clock: UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat()
