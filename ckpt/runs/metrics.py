"""Metrics as ranks report them: plain numbers, text and nested dicts, safe to write as strict JSON."""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

MetricValue: TypeAlias = "bool | int | float | str | dict[str, MetricValue] | None"
Metrics: TypeAlias = dict[str, MetricValue]

_MAX_DEPTH = 32
_LARGEST_BITS = 14_000  # Python prints no more than 4300 digits
# Strict JSON has no NaN and no infinities; readers in other languages reject Python's bare words for them.
_NON_FINITE = "__float__"
_NON_FINITE_TEXTS = ("nan", "inf", "-inf")
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})


def clean_metrics(metrics: Mapping[str, object], *, read: bool = True) -> Metrics:
    """Return `metrics` with numpy scalars and 0-d tensors as Python numbers, detached from the caller's objects.

    Args:
        metrics: Numbers, bools, strings, None, NaN, infinities and nested dicts of them, under string keys.
        read: Whether to read the values of 0-d tensors, which on a GPU waits for the computations before it. If not, they are
            checked, and become None.

    Raises:
        ValueError: For anything else (arrays, tensors with a shape, DTensors that are partial sums, lists, objects), naming the
            metric.

    """
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics must be a dict, not {type(metrics).__name__}")  # noqa: TRY004 - one error for bad metrics
    return _clean_mapping(metrics, "", _MAX_DEPTH, read=read)


def _clean_mapping(metrics: Mapping[str, object], path: str, depth: int, *, read: bool) -> Metrics:
    if depth == 0:
        raise ValueError(f"metric {path!r} is nested more than {_MAX_DEPTH} levels deep (does a dict contain itself?)")
    cleaned: Metrics = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            where = f" in {path!r}" if path else ""
            raise ValueError(f"the metric name {name!r}{where} is no string: give {str(name)!r}")  # noqa: TRY004 - same
        if name == _NON_FINITE:
            raise ValueError(f"the metric name {_NON_FINITE!r} is reserved")
        plain = str.__str__(name)  # str() of an enum is its name, not its text
        full = f"{path}/{plain}" if path else plain
        if isinstance(value, Mapping):
            cleaned[plain] = _clean_mapping(value, full, depth - 1, read=read)
        else:
            cleaned[plain] = _clean_value(value, full, read=read)
    return cleaned


def _clean_value(value: object, name: str, *, read: bool) -> MetricValue:
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        raise ValueError(f"metric {name!r} is an integer of {value.bit_length()} bits, and {_LARGEST_BITS} are the most")
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[return-value]  # mypy does not narrow on `type(x) in`
    if has_item(value):
        _check_has_sum(value, f"metric {name!r}")
        if not read:
            return None
        try:
            item = value.item()  # type: ignore[attr-defined]  # as `has_item` says
        except Exception as exc:  # for example a tensor on the meta device
            raise ValueError(f"metric {name!r} is of type {type(value).__name__}, without a value: {exc}") from exc
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
    if isinstance(value, str):  # subclasses, numpy.str_ and enums among them
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise ValueError(
        f"metric {name!r} is of type {type(value).__name__}{_show_shape(value)}; "
        "report numbers, bools, strings, None or dicts of them (a tensor's .item(), a list's mean), "
        "and put everything else into the checkpoint"
    )


def _show_shape(value: Any) -> str:
    """Return the shape of an array or a tensor in words; nothing for anything else."""
    return f" with the shape {tuple(value.shape)}" if getattr(value, "ndim", 0) else ""


def has_item(value: object) -> bool:
    """Return whether `value` is a numpy scalar, or a 0-d array or tensor."""
    return hasattr(value, "item") and getattr(value, "ndim", None) == 0


def _check_has_sum(value: Any, what: str) -> None:
    """Raise ValueError for a DTensor that is a partial sum, such as a norm of a sharded one: `item()` is this rank's part."""
    placements = getattr(value, "placements", ())
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{what} is a DTensor with the placements {placements}, whose parts are still to be reduced: give its "
            "full_tensor(), which every rank must call"
        )


def find_metric(metrics: Metrics, attribute: str) -> MetricValue:
    """Return the metric `attribute`, as `flatten_metrics` names it; None if it does not exist.

    It is a key, or an "a/b" path into nested dicts, whose keys may have slashes of their own.
    """
    found = metrics.get(attribute)
    if found is not None and not isinstance(found, dict):
        return found
    candidates = [*_named(metrics, attribute)]
    leaves = [value for value in candidates if not isinstance(value, dict)]
    return next((value for value in leaves if value is not None), None if leaves or not candidates else candidates[0])


def _named(metrics: Metrics, attribute: str) -> Iterator[MetricValue]:
    """Yield every leaf and every dict whose keys, joined with slashes, are `attribute`."""
    if attribute in metrics:
        yield metrics[attribute]
    for name, nested in metrics.items():
        if isinstance(nested, dict) and attribute.startswith(f"{name}/"):
            yield from _named(nested, attribute[len(name) + 1 :])


def find_score(metrics: Metrics, attribute: str) -> bool | int | float | None:
    """Return the metric `attribute` if it is a number, including NaN and infinities; None otherwise, or if it is missing.

    A bool counts as 0 or 1, since stored runs were trained with such scores; a report with a bool score is rejected.
    """
    value = find_metric(metrics, attribute)
    return value if isinstance(value, (bool, int, float)) else None


def find_finite_score(metrics: Metrics, attribute: str) -> float | None:
    """Return the metric `attribute` if it is a finite number; None otherwise, or if it is missing."""
    score = find_score(metrics, attribute)
    value = math.nan if score is None else as_float(score)
    return value if math.isfinite(value) else None


def as_float(score: float) -> float:
    """Return a score as a float; an integer that is larger than any float is infinite."""
    try:
        return float(score)
    except OverflowError:
        return math.inf if score > 0 else -math.inf


def check_score(metrics: Metrics, attribute: str | None) -> None:
    """Raise ValueError unless the metric `attribute`, by which checkpoints are sorted, is a number, or None, or missing.

    Raises:
        ValueError: If it is anything else: no rule decides which of two texts is the better.

    """
    value = None if attribute is None else find_metric(metrics, attribute)
    if isinstance(value, (str, bool, dict)):
        raise ValueError(  # noqa: TRY004 - one error for bad metrics
            f"metric {attribute!r} is {value!r}, a {type(value).__name__}, and checkpoint_score_attribute sorts checkpoints by "
            "it: report a number, or None where there is none yet, or name another metric in CheckpointConfig"
        )


def flatten_metrics(metrics: Metrics, prefix: str = "") -> Iterator[tuple[str, MetricValue]]:
    """Yield each leaf of nested metrics under its "a/b" name."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from flatten_metrics(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def add_newest(known: Metrics, metrics: Metrics) -> None:
    """Replace the values in `known` by those in `metrics`, which are newer, in nested dicts as well; None is no value."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            before = known.get(name)
            nested = dict(before) if isinstance(before, dict) else {}
            add_newest(nested, value)
            if nested:
                known[name] = nested
        elif value is not None:
            known[name] = value


def numbers_in(metrics: Metrics) -> Iterator[tuple[str, int | float]]:
    """Yield each leaf of nested metrics that is a number and no bool, as `flatten_metrics` does."""
    for name, value in flatten_metrics(metrics):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def with_numbers(value: object) -> object:
    """Return `value` with numpy scalars, 0-d arrays and 0-d tensors in its dicts and lists as Python numbers.

    Raises:
        ValueError: If a tensor is a DTensor whose parts are still to be reduced.

    """
    if isinstance(value, Mapping):
        return {name: with_numbers(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_numbers(item) for item in value]
    if not has_item(value):
        return value
    _check_has_sum(value, "the value")
    return value.item()  # type: ignore[attr-defined]  # as `has_item` says


def to_json(value: object) -> object:
    """Return `value` with every non-finite float as a tagged string, so that strict JSON can hold it.

    A dict with the form of the tag, which metadata may hold, has its value in a list, so that `from_json` recognizes it.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NON_FINITE: repr(value)}
    if isinstance(value, Mapping):
        if len(value) == 1 and _NON_FINITE in value:
            return {_NON_FINITE: [to_json(value[_NON_FINITE])]}
        return {key: item if type(item) in _AS_THEY_ARE else to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(value: object) -> object:
    """Undo `to_json`.

    Raises:
        ValueError: If `value` has a tag that `to_json` does not write.

    """
    if isinstance(value, dict):
        return _untagged({key: from_json(item) for key, item in value.items()})
    if isinstance(value, list):
        return [from_json(item) for item in value]
    return value


def parse_json(text: str) -> object:
    """Return what `from_json` returns for the JSON in `text`, in one pass.

    Raises:
        ValueError: If `text` is no JSON, or has a tag that `to_json` does not write.

    """
    return _DECODER.decode(text)


def _untagged(fields: dict[str, object]) -> object:
    """Return `fields`, or the tagged value if they are a tag."""
    if len(fields) != 1 or _NON_FINITE not in fields:
        return fields
    tagged = fields[_NON_FINITE]
    if isinstance(tagged, list) and len(tagged) == 1:
        return {_NON_FINITE: tagged[0]}
    if isinstance(tagged, str) and tagged in _NON_FINITE_TEXTS:
        return float(tagged)
    raise ValueError(f"{reprlib.repr(tagged)} is no float that JSON cannot hold")


_DECODER = json.JSONDecoder(object_hook=_untagged)
