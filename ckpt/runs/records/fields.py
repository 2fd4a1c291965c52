"""The reader of stored records into dataclasses, by the types of their fields.

The types are scalars, datetimes, dicts, lists, tuples, dataclasses and unions. Unknown fields are ignored, so that a later
version may add some. A missing field or one of another type makes a record malformed, and the error names field and object.

The package has its own readers, since msgspec, which does the same faster, rejects lone surrogates that stored runs have in
their metrics, does not support tags for NaN and infinities, and would still need `json` to compare a record with its digest;
pydantic takes a tenth of a second to import in each rank.
"""

import reprlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import MAXYEAR, MINYEAR, datetime
from functools import cache
from itertools import cycle
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from prefect_torch.ckpt.errors import MalformedRecordError
from prefect_torch.ckpt.runs.metrics import Metrics, from_json
from prefect_torch.ckpt.storage.records import FORMAT_VERSION, is_newer, unsupported

T = TypeVar("T")
_SHOWN = 80
Reader: TypeAlias = Callable[[Any], Any]


class FieldError(ValueError):
    """A value does not fit the type of its field."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self._problem = problem
        self._path = path

    def within(self, name: str) -> "FieldError":
        """Return the same error for the record that has the value in its field `name`."""
        shown = name[:_SHOWN] if name.isprintable() else reprlib.repr(name)
        return FieldError(self._problem, f"{shown}/{self._path}" if self._path else shown)


@dataclass(frozen=True, slots=True)
class Within:
    """The integers from `least` to `most`, both included."""

    least: int
    most: int

    def __call__(self, value: int) -> None:
        """Raise ValueError unless `value` is one of them.

        Raises:
            ValueError: If it is not.

        """
        if not self.least <= value <= self.most:
            raise ValueError(f"{reprlib.repr(value)} is not within {self.least} and {self.most}")


def is_moment(moment: datetime) -> bool:
    """Return whether a time has a zone, and a year that it has in every zone."""
    return moment.tzinfo is not None and MINYEAR < moment.year < MAXYEAR


def check_time(text: str) -> None:
    """Raise ValueError unless `text` is a time with its zone, in ISO 8601.

    Raises:
        ValueError: If it is not.

    """
    _moment(text)


Time: TypeAlias = Annotated[str, check_time]
Count: TypeAlias = Annotated[int, Within(0, 2**63 - 1)]  # of bytes or ranks; no filesystem holds more


def decode(kind: type[T], record: Mapping[str, Any], where: str, what: str) -> T:
    """Return `record` as `kind`, a dataclass; a field that `kind` does not have is ignored.

    Args:
        kind: A dataclass with fields of the types that `reader_of` supports.
        record: A dict that `records.parse` or `records.unseal` returned.
        where: The key of the object, for the error.
        what: A description of the expected record, with its article, for the error.

    Raises:
        MalformedRecordError: If a field is missing, or of another type, naming it.
        UnsupportedFormatError: If a newer version wrote it.

    """
    version = record.get("format", FORMAT_VERSION)
    if is_newer(version):
        raise unsupported(version, where)
    try:
        if type(version) is not int or version != FORMAT_VERSION:
            raise FieldError(f"{reprlib.repr(version)} is no version").within("format")
        return cast("T", reader_of(cast("Any", kind))(record))
    except FieldError as exc:
        raise MalformedRecordError(f"{where} is not {what}: {exc}") from None


@cache
def reader_of(hint: Any) -> Reader:  # noqa: PLR0911 - a case for each kind of type
    """Return a function that turns parsed JSON into a value of the type `hint`, or raises FieldError if it does not fit.

    `Annotated` carries a function that raises ValueError for an invalid value. A dataclass's own ValueError counts, too.
    """
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _checked(reader_of(arguments[0]), arguments[1])
    if origin is Literal:
        return _one_of(arguments)
    if origin in (Union, UnionType):
        return _first_fit(arguments)
    if origin in (dict, Mapping):
        return _mapping(reader_of(arguments[1]))
    if origin in (tuple, list):
        return _sequence(cast("type[Any]", origin), arguments)
    assert is_dataclass(hint), f"no record holds a {hint}"
    return _record(cast("type[Any]", hint))


def _exactly(kind: type, called: str) -> Reader:
    def read(value: object) -> object:
        if type(value) is not kind:  # a bool is no number here
            raise FieldError(f"{reprlib.repr(value)} is not {called}")
        return value

    return read


def _number(value: object) -> float:
    value = _anything(value)
    if type(value) is float:
        return value
    if type(value) is not int:
        raise FieldError(f"{reprlib.repr(value)} is not a number")
    try:
        return float(value)
    except OverflowError:
        raise FieldError(f"{reprlib.repr(value)} is beyond every float") from None


def _moment(value: object) -> datetime:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        moment = None
    if moment is None or not is_moment(moment):
        raise FieldError(f"{reprlib.repr(value)} is not a time with its zone")
    return moment


def _anything(value: object) -> object:
    try:
        return from_json(value)
    except ValueError as exc:
        raise FieldError(str(exc)) from None


def _object(value: object) -> dict[str, Any]:
    known = _anything(value)
    if not isinstance(known, dict):
        raise FieldError(f"{reprlib.repr(known)} is not an object")
    return known


def _metrics(value: object) -> dict[str, Any]:
    metrics = _object(value)
    _check_metrics(metrics)
    return metrics


def _check_metrics(metrics: Mapping[str, object]) -> None:
    for name, value in metrics.items():
        if isinstance(value, dict):
            _check_metrics(value)
        elif isinstance(value, list):
            raise FieldError("a list is no metric").within(name)


def _checked(read: Reader, check: Callable[[Any], object]) -> Reader:
    def read_checked(value: object) -> object:
        known = read(value)
        try:
            check(known)
        except ValueError as exc:
            raise FieldError(str(exc)) from None
        return known

    return read_checked


def _one_of(values: tuple[object, ...]) -> Reader:
    def read(value: object) -> object:
        if not isinstance(value, str) or value not in values:
            raise FieldError(f"{reprlib.repr(value)} is none of {', '.join(map(repr, values))}")
        return value

    return read


def _first_fit(hints: tuple[Any, ...]) -> Reader:
    readers = [reader_of(hint) for hint in hints]
    likely = _by_kind(hints)

    def read(value: object) -> object:
        if type(value) in likely:
            with suppress(FieldError):
                return likely[type(value)](value)
        problems: list[FieldError] = []
        for reader in readers:
            try:
                return reader(value)
            except FieldError as exc:
                problems.append(exc)
        raise problems[0]

    return read


def _by_kind(hints: tuple[Any, ...]) -> dict[type, Reader]:
    """Return the reader of each type of value, where none for another type takes it, too: an error costs far more."""
    if any(hint in (float, Any) for hint in hints):  # either takes whole numbers, too
        return {}
    found: dict[type, Reader] = {}
    for hint in hints:
        kind = hint if hint in (str, int, bool, type(None)) else list if get_origin(hint) in (tuple, list) else None
        if kind is not None:
            found.setdefault(kind, reader_of(hint))
    return found


def _mapping(read: Reader) -> Reader:
    def read_mapping(value: object) -> object:
        if not isinstance(value, dict):
            raise FieldError(f"{reprlib.repr(value)} is not an object")
        known: dict[str, Any] = {}
        for key, item in value.items():
            try:
                known[key] = read(item)
            except FieldError as exc:
                raise exc.within(key) from None
        return known

    return read_mapping


def _sequence(kind: type[Any], arguments: tuple[Any, ...]) -> Reader:
    of_any_length = kind is list or arguments[-1] is Ellipsis
    readers = [reader_of(argument) for argument in arguments if argument is not Ellipsis]

    def read(value: object) -> object:
        if not isinstance(value, list):
            raise FieldError(f"{reprlib.repr(value)} is not a list")
        if not of_any_length and len(value) != len(readers):
            raise FieldError(f"{reprlib.repr(value)} does not have {len(readers)} items")
        known: list[Any] = []
        for item, reader in zip(value, cycle(readers), strict=False):
            try:
                known.append(reader(item))
            except FieldError as exc:
                raise exc.within(str(len(known))) from None
        return kind(known)

    return read


def _record(kind: type[Any]) -> Reader:
    known = [
        (it.name, reader_of(cast("Any", it.type)), it.default is MISSING and it.default_factory is MISSING)
        for it in fields(kind)
    ]

    def read(value: object) -> object:
        if not isinstance(value, Mapping):
            raise FieldError(f"{reprlib.repr(value)} is not an object")
        found: dict[str, Any] = {}
        for name, reader, is_required in known:
            if name in value:
                try:
                    found[name] = reader(value[name])
                except FieldError as exc:
                    raise exc.within(name) from None
            elif is_required:
                raise FieldError("it is missing").within(name)
        try:
            return kind(**found)
        except ValueError as exc:  # the dataclass's own check
            raise FieldError(str(exc)) from None

    return read


_PLAIN: dict[Any, Reader] = {
    str: _exactly(str, "a text"),
    int: _exactly(int, "a whole number"),
    bool: _exactly(bool, "true or false"),
    type(None): _exactly(type(None), "null"),
    float: _number,
    datetime: _moment,
    Any: _anything,
    dict[str, Any]: _object,
    Metrics: _metrics,
}
