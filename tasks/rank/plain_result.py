"""The result of a rank on another machine as JSON: data from a network is not unpickled."""

import builtins
import json
import os
import pickle
from contextlib import suppress
from typing import Any

from prefect_torch.ckpt.runs.metrics import from_json, to_json, with_numbers
from prefect_torch.ckpt.storage.records import check_depth

from .failures import is_kind
from .spec import RankResult


def encode_result(result: RankResult) -> bytes:
    """Return `result` as JSON, in the process of the rank.

    Parts of a return value that JSON cannot hold are left out, and an exception whose class is not one of Python's own; others
    are described by their arguments, if JSON can hold them. The error and the traceback are texts in any case.
    """
    fields: dict[str, Any] = {"kind": result.kind, "error": result.error, "traceback": result.traceback}
    if result.return_value is not None:
        encoded = _encode_pickled(result.return_value)
        fields["value"] = None if encoded is None else json.loads(encoded)
    if result.exception is not None:
        fields["exception"] = _describe(pickle.loads(result.exception))  # noqa: S301 - pickled by this process
    return json.dumps(fields).encode()


def decode_result(encoded: bytes) -> RankResult:
    """Return what `encode_result` was given, as far as JSON can hold it.

    Raises:
        ValueError: If `encoded` is not from `encode_result`.

    """
    fields = json.loads(encoded)
    kind = fields["kind"]
    if kind is not None and not is_kind(kind):
        raise ValueError(f"a rank failed in an unknown way: {kind!r}")
    exception = fields.get("exception")
    return RankResult(
        return_value=None if kind is not None else pickle.dumps(from_json(fields.get("value"))),
        kind=kind,
        error=str(fields["error"]),
        traceback=str(fields["traceback"]),
        exception=None if exception is None else pickle.dumps(_rebuild(exception["type"], exception["arguments"])),
    )


def _encode_pickled(pickled: bytes) -> str | None:
    try:
        value = pickle.loads(pickled)  # noqa: S301 - pickled by this process
    except Exception as exc:  # noqa: BLE001 - a finished training must not fail for its return value
        _print(f"the return value is dropped, since it cannot be rebuilt: {exc!r}")
        return None
    encoded = encode_value(value)
    if encoded is None and value is not None:
        _print("the return value is dropped: from another machine, it must be what JSON can hold")
    return encoded


def _print(text: str) -> None:
    with suppress(Exception):  # the function may have closed the stream, or put anything in its place
        print(text)  # noqa: T201 - the rank's log


def encode_value(value: Any) -> str | None:
    """Return a function's return value as strict JSON; None if JSON cannot hold it, or no item of it.

    Of a dict, the items that JSON cannot hold are left out. NumPy's scalars and 0-d tensors are numbers.
    """
    encoded = _encode(value)
    if encoded is None and isinstance(value, dict):
        held = {name: item for name, item in value.items() if _encode({name: item}) is not None}
        return _encode(held) if held else None
    return encoded


def _encode(value: Any) -> str | None:
    try:
        encoded = json.dumps(to_json(with_numbers(value)))
        check_depth(json.loads(encoded), "it")
    except Exception:  # noqa: BLE001 - a tensor without a value, a dict that contains itself, or what an object's `item` raises
        return None
    return encoded


def _describe(exception: BaseException) -> dict[str, Any] | None:
    if getattr(builtins, type(exception).__name__, None) is not type(exception):
        return None
    try:
        arguments = exception.__reduce__()[1]  # unlike `args`, with the path of an OSError
        return {"type": type(exception).__name__, "arguments": json.loads(json.dumps(arguments, default=os.fspath))}
    except (TypeError, ValueError):
        return None


def _rebuild(name: str, arguments: list[Any]) -> Exception | None:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        return kind(*arguments)
    except TypeError:
        return None
