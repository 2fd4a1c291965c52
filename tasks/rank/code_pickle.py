"""Pickles of functions by value that keep the files of their code: what tracebacks, `inspect` and torch's compilers read."""

import io
from types import CodeType
from typing import Any

import cloudpickle

_ANONYMOUS = "<dynamic-code>"  # instead of the file, from cloudpickle 3.1.3 on


def dump(value: object) -> bytes:
    """Return `value` pickled, with functions and classes that cannot be imported by value.

    Raises:
        Exception: If a part of it cannot be pickled; of which kind, that part decides.

    """
    buffer = io.BytesIO()
    CodePickler(buffer).dump(value)
    return buffer.getvalue()


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """As cloudpickle's, and a function keeps the file in which it was written."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how `obj` is pickled, for the protocol of pickle."""
        if type(obj) is not CodeType:
            return super().reducer_override(obj)
        make, fields, *_ = self.dispatch_table[CodeType](obj)
        return make, tuple(obj.co_filename if type(it) is str and it == _ANONYMOUS else it for it in fields)
