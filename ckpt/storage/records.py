"""Stored records: strict JSON with a digest, by which a reader verifies that it is whole, and a format version.

A storage may hold objects of other versions and other programs, and damaged ones. Anything but a JSON object, or one that is
nested too deeply, is malformed, and the error names its key. A newer format has a separate error, since this version cannot
judge its meaning.
"""

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import xxhash
from prefect_torch.ckpt.errors import CheckpointCorruptError, MalformedRecordError, UnsupportedFormatError

FORMAT_VERSION = 1
MAX_DEPTH = 200  # of dicts and lists: a fifth of Python's stack, which recursive functions over them must not exhaust
MAX_GIVEN_DEPTH = 100  # of a user's value: the record around it is deeper
_BEGIN, _BETWEEN, _END = b'{"body":', b',"digest":"', b'"}'
_DIGEST_SIZE = 32
_SEALED = _BEGIN + b'{"format":'  # the beginning of every sealed record
_DIGEST_FIELD = "digest"
_LARGE_BYTES = 2**20
_OBJECT = re.compile(rb"\s*\{")
_SHOWN = 80


def parse(data: bytes, where: str, what: str) -> dict[str, Any]:
    """Return the strict JSON object in `data`, at most 200 levels deep.

    Args:
        data: The bytes as stored.
        where: The key of the object, for the error.
        what: A description of the expected record, with its article, for the error.

    Raises:
        MalformedRecordError: If the bytes are anything else.

    """
    if len(data) > _LARGE_BYTES and not _OBJECT.match(data):  # such as zeros: no copies for the parser
        raise MalformedRecordError(f"{where} is not {what}: its {len(data)} bytes do not begin with an object")
    try:
        value = _STRICT_DECODER.decode(data.decode())
        problem = "it is nested too deeply" if is_deeper(value, MAX_DEPTH) else None
    except RecursionError:  # the parser's own limit, which depends on the caller's depth in the stack
        value, problem = None, "it is nested too deeply"
    except ValueError as exc:  # also for invalid UTF-8, and for integers of many thousand digits
        value, problem = None, str(exc)
    if problem is None and not isinstance(value, dict):
        problem = f"{reprlib.repr(value)} is not an object"
    if problem is not None:
        raise MalformedRecordError(f"{where} is not {what}: {problem}")
    return cast("dict[str, Any]", value)


def is_deeper(value: object, levels: int) -> bool:
    """Return whether dicts and lists are nested in `value` deeper than `levels`; does not recurse, so any depth is safe."""
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
    """Raise ValueError if a record with the JSON `value` would be nested too deeply to be read.

    Raises:
        ValueError: If dicts and lists are nested in it more than 100 levels deep.

    """
    if is_deeper(value, MAX_GIVEN_DEPTH):
        raise ValueError(f"{what} is nested more than {MAX_GIVEN_DEPTH} levels deep")


def is_newer(version: object) -> bool:
    """Return whether `version` is a format version newer than this package knows."""
    return type(version) is int and version > FORMAT_VERSION


def unsupported(version: object, where: str) -> UnsupportedFormatError:
    """Return the error for a record of a newer format.

    Args:
        version: Its format version.
        where: The key of the object.

    """
    return UnsupportedFormatError(
        f"{where} has format {reprlib.repr(version)} and this version reads {FORMAT_VERSION}: upgrade prefect-torch"
    )


def fields_of(record: object) -> dict[str, Any]:
    """Return the fields of a slotted dataclass; `asdict` copies deeply, which takes twenty times as long."""
    return {name: getattr(record, name) for name in type(record).__slots__}  # type: ignore[attr-defined]  # of a dataclass


def seal(body: object) -> bytes:
    """Return strict JSON of `body` and its digest, by which a reader verifies that it is whole."""
    dumped = _STRICT_ENCODER.encode(body).encode()
    return b"".join((_BEGIN, dumped, _BETWEEN, xxhash.xxh3_128_hexdigest(dumped).encode(), _END))


def unseal(data: bytes, where: str, what: str) -> dict[str, Any]:
    """Return the body that `seal` received; it is verified as it was stored, byte by byte, before it is parsed.

    Args:
        data: The bytes as stored.
        where: The key of the object, for the error.
        what: A description of the expected record, with its article, for the error.

    Raises:
        CheckpointCorruptError: If this package wrote the bytes, and any bit has changed since.
        MalformedRecordError: If this package did not write them.
        UnsupportedFormatError: If they name a newer format, and their digest is not that of the body in this version's format.

    """
    stored = _verified(data)
    if stored is not None:
        with suppress(MalformedRecordError):
            return parse(stored, where, what)
    is_ours = data.startswith(_SEALED)
    try:
        sealed = parse(data, where, what)
    except MalformedRecordError as exc:
        raise (CheckpointCorruptError if is_ours else MalformedRecordError)(str(exc)) from exc
    body, digest = sealed.get("body", sealed), sealed.get("digest")  # a newer version may put its format into either
    # A digest that fits this version's format would mean that only the format's digit was changed.
    if isinstance(body, dict) and is_newer(body.get("format")) and digest != _digest({**body, "format": FORMAT_VERSION}):
        raise unsupported(body.get("format"), where)
    if is_ours and isinstance(digest, str):
        raise CheckpointCorruptError(f"{where} does not match its own digest: it was changed after it was written")
    raise MalformedRecordError(f"{where} is not {what}: it has no body that matches its digest")


def with_digest(record: Mapping[str, Any], field: str = _DIGEST_FIELD) -> dict[str, Any]:
    """Return `record` with a digest in `field`, for `check_digest`; older versions read it as before."""
    return {**record, field: _sorted_digest(json.loads(json.dumps(record)))}  # as it is read: keys become strings


def check_digest(record: Mapping[str, Any], where: str, what: str, field: str = _DIGEST_FIELD) -> dict[str, Any]:
    """Compare a record with the digest from `with_digest`, and return its other fields.

    A record without a digest is returned as it is: an older version wrote it.

    Args:
        record: A dict that `parse` returned.
        where: The key of the object, for the error.
        what: A description of the expected record, with its article, for the error.
        field: The field of the digest.

    Raises:
        MalformedRecordError: If any field differs.

    """
    fields = {name: value for name, value in record.items() if name != field}
    if len(fields) < len(record) and record[field] != _sorted_digest(fields):
        raise MalformedRecordError(f"{where} is not {what}: it does not match its own digest")
    return fields


def unseal_all(lines: Iterable[bytes]) -> list[dict[str, Any]] | None:
    """Return the bodies of many sealed records as `unseal` does, in a third of the time; None unless all of them are whole.

    Their nesting depth is not checked.
    """
    bodies = [_verified(line) for line in lines]
    try:
        values = _STRICT_DECODER.decode(f"[{b','.join(it for it in bodies if it is not None).decode()}]")
    except (ValueError, RecursionError):
        return None
    # One line may hold what looks like two values, and another less than one.
    are_whole = None not in bodies and len(values) == len(bodies) and all(type(value) is dict for value in values)
    return values if are_whole else None


def _verified(data: bytes) -> bytes | None:
    """Return the stored body of sealed `data` if it matches the digest, else None."""
    ends = len(data) - len(_BETWEEN) - _DIGEST_SIZE - len(_END)
    if not (data.startswith(_BEGIN) and data.startswith(_BETWEEN, ends) and data.endswith(_END)):
        return None
    body, digest = data[len(_BEGIN) : ends], data[ends + len(_BETWEEN) : -len(_END)]
    return body if xxhash.xxh3_128_hexdigest(body).encode() == digest else None


def _digest(body: object) -> str:
    return xxhash.xxh3_128_hexdigest(_STRICT_ENCODER.encode(body).encode())


def _sorted_digest(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is beyond every float")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"strict JSON has no {constant}")


_STRICT_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
