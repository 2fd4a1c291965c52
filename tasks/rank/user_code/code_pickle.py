"""Pickles of functions by value that keep the files of their code: what tracebacks, `inspect` and torch's compilers read."""

import io
import linecache
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

_ANONYMOUS = "<dynamic-code>"  # instead of the file, from cloudpickle 3.1.3 on


def dump(value: object) -> bytes:
    """Return `value` pickled, with functions and classes that cannot be imported by value.

    Raises:
        Exception: If a part of it cannot be pickled; that part determines the type.

    """
    buffer = io.BytesIO()
    CodePickler(buffer).dump(value)
    return buffer.getvalue()


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle's, but a function keeps the file in which it was written, or its lines if it is a notebook's cell."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is pickled, for the protocol of pickle."""
        if type(obj) is not CodeType:
            return super().reducer_override(obj)
        make, fields, *_ = self.dispatch_table[CodeType](obj)
        fields = tuple(obj.co_filename if type(it) is str and it == _ANONYMOUS else it for it in fields)
        lines = _lines_without_file(obj.co_filename)
        return (make, fields) if lines is None else (_make_with_lines, (make, fields, obj.co_filename, lines))


def _lines_without_file(name: str) -> list[str] | None:
    """Return the lines of code that this process knows without a file, as IPython and doctest keep them."""
    known = linecache.cache.get(name)
    return known[2] if known is not None and len(known) > 1 and not Path(name).exists() else None


def _make_with_lines(make: Callable[..., CodeType], fields: tuple[Any, ...], name: str, lines: list[str]) -> CodeType:
    linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
    return make(*fields)
