"""How stored records are read: from JSON into dataclasses, checked before anything believes them, here and nowhere else.

A storage holds what other versions, other programs and accidents left there. Fields that are not known are ignored, so that a
later version may add some; what is missing or of another type makes a record malformed, and the error names field and object; a
newer format is an error of its own, since what it means is not this version's to judge.
"""

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import xxhash
from prefect_torch.ckpt.errors import CheckpointCorruptError, MalformedRecordError, UnsupportedFormatError

from .record_fields import FieldError, reader_of

FORMAT_VERSION = 1
MAX_DEPTH = 200  # of dicts and lists: a fifth of Python's stack, which walks over them must not exhaust
MAX_GIVEN_DEPTH = 100  # of what a user gives: the record around it is deeper
_SEALED = b'{"body":{"format":'  # how every sealed record begins
_SHOWN = 80

T = TypeVar("T")


def parse(data: bytes, where: str, what: str) -> dict[str, Any]:
    """Return the strict JSON object that `data` is, at most 200 levels deep.

    Args:
        data: The bytes as stored.
        where: The object that they are of, for the error.
        what: What they should be, with its article, for the error.

    Raises:
        MalformedRecordError: If they are anything else.

    """
    try:
        value = _STRICT_DECODER.decode(data.decode())
        problem = "it is nested too deeply" if is_deeper(value, MAX_DEPTH) else None
    except RecursionError:  # the parser's own limit, which depends on the caller's place in the stack
        value, problem = None, "it is nested too deeply"
    except ValueError as exc:  # also for what is no UTF-8, and for integers of many thousand digits
        value, problem = None, str(exc)
    if problem is None and not isinstance(value, dict):
        problem = f"{reprlib.repr(value)} is not an object"
    if problem is not None:
        raise MalformedRecordError(f"{where} is not {what}: {problem}")
    return cast("dict[str, Any]", value)


def is_deeper(value: object, levels: int) -> bool:
    """Return whether dicts and lists are nested in `value` deeper than `levels`; in a loop, which no depth can exhaust."""
    layer = [value]
    for _ in range(levels + 1):
        inner: list[object] = []
        for item in layer:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return False
        layer = inner
    return True


def check_depth(value: object, what: str) -> None:
    """Return only if a record can hold the JSON `value`, and be read.

    Raises:
        ValueError: If dicts and lists are nested in it more than 100 levels deep.

    """
    if is_deeper(value, MAX_GIVEN_DEPTH):
        raise ValueError(f"{what} is nested more than {MAX_GIVEN_DEPTH} levels deep")


def decode(kind: type[T], record: Mapping[str, Any], where: str, what: str) -> T:
    """Return `record` as `kind`, a dataclass; a field that `kind` does not have is ignored.

    Args:
        kind: Its fields are of the types that `record_fields` reads.
        record: What `parse` or `unseal` returned.
        where: The object that it is of, for the error.
        what: What it should be, with its article, for the error.

    Raises:
        MalformedRecordError: If a field is missing, or of another type, naming it.
        UnsupportedFormatError: If a newer version wrote it.

    """
    version = record.get("format", FORMAT_VERSION)
    if is_newer(version):
        raise UnsupportedFormatError(
            f"{where} has format {reprlib.repr(version)} and this version reads {FORMAT_VERSION}: upgrade prefect-torch"
        )
    try:
        if type(version) is not int or version != FORMAT_VERSION:
            raise FieldError(f"{reprlib.repr(version)} is none").within("format")
        return cast("T", reader_of(cast("Any", kind))(record))
    except FieldError as exc:
        raise MalformedRecordError(f"{where} is not {what}: {exc}") from None


def is_newer(version: object) -> bool:
    """Return whether `version` is that of a format which this version does not know yet."""
    return type(version) is int and version > FORMAT_VERSION


def seal(body: object) -> bytes:
    """Return strict JSON of `body` and its digest, so that whoever reads it knows whether it is whole."""
    dumped = _STRICT_ENCODER.encode(body).encode()
    return b'{"body":%b,"digest":"%b"}' % (dumped, xxhash.xxh3_128_hexdigest(dumped).encode())


def unseal(data: bytes, where: str, what: str) -> dict[str, Any]:
    """Return the body that `seal` was given.

    Args:
        data: The bytes as stored.
        where: The object that they are of, for the error.
        what: What they should be, with its article, for the error.

    Raises:
        CheckpointCorruptError: If this package wrote them, and any bit differs since.
        MalformedRecordError: If it did not.
        UnsupportedFormatError: If they name a newer format, and do not prove themselves as this version's would.

    """
    is_ours = data.startswith(_SEALED)
    try:
        sealed = parse(data, where, what)
    except MalformedRecordError as exc:
        raise (CheckpointCorruptError if is_ours else MalformedRecordError)(str(exc)) from exc
    body, digest = sealed.get("body", sealed), sealed.get("digest")  # a newer version may put its format into either
    if isinstance(body, dict):
        if data == seal(body):  # the bytes, since JSON has several spellings of one value
            return body
        if is_newer(body.get("format")) and digest != _digest({**body, "format": FORMAT_VERSION}):  # else a digit was changed
            decode(_Anything, body, where, what)
    if is_ours and isinstance(digest, str):
        raise CheckpointCorruptError(f"{where} does not match its own digest: it was changed after it was written")
    raise MalformedRecordError(f"{where} is not {what}: it is no body with the digest of it")


@dataclass(frozen=True, slots=True)
class _Anything:
    """A record of which only the format is of interest."""


def _digest(body: object) -> str:
    return xxhash.xxh3_128_hexdigest(_STRICT_ENCODER.encode(body).encode())


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is beyond every float")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"strict JSON has no {constant}")


_STRICT_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
