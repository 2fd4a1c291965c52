"""The domains of a space, as users give them and as JSON stores them, and the space that they describe."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from decimal import Decimal
from typing import Any, TypeAlias

from prefect_torch.ckpt.runs.metrics import as_float, with_numbers
from prefect_torch.ckpt.storage.records import check_depth
from prefect_torch.ckpt.text import show_class

from .space import Choice, Constant, Integer, Nested, Node, Real, has_domains, parameter_names

Domain: TypeAlias = dict[str, Any]
_PRIMITIVE = (str, int, float, bool)
_CONFIG_OF_RAY = "train_loop_config"


def uniform(low: float, high: float, step: float | None = None) -> Domain:
    """Return the domain of the floats from `low` to `high`; with a `step`, only of `low`, `low + step` and so on."""
    return _domain("uniform", low=low, high=high, **({} if step is None else {"step": step}))


def loguniform(low: float, high: float) -> Domain:
    """Return the domain of the floats from `low`, which is positive, to `high`, whose logarithms are equally probable."""
    return _domain("loguniform", low=low, high=high)


def randint(low: int, high: int, step: int = 1, *, log: bool = False) -> Domain:
    """Return the domain of the integers from `low` to `high - 1`, as in NumPy and Ray Tune.

    Args:
        low: The smallest.
        high: One more than the largest.
        step: The difference between two of them.
        log: Whether their logarithms are equally probable; then `low` is positive and `step` is 1.

    """
    return _domain("randint", low=low, high=high, step=step, log=log)


def choice(values: Sequence[Any]) -> Domain:
    """Return the domain of `values`, JSON of any kind; a dict among them may hold domains, which exist only if it is chosen."""
    return _domain("choice", values=_listed(values))


def grid(values: Sequence[Any]) -> Domain:
    """Return the domain of `values`, each of which is tried with all combinations of the others (`sampler="grid"`)."""
    return _domain("grid", values=_listed(values))


def _domain(kind: str, **fields: Any) -> Domain:
    """Return a domain, with numpy's numbers as Python's, which JSON holds."""
    return {"kind": kind, **{name: with_numbers(value) for name, value in fields.items()}}


def _listed(values: Any) -> Any:
    """Return the values in a sequence, an array or a range; a text, a dict or a set is unchanged, and refused later."""
    return values if isinstance(values, str | bytes | Mapping | AbstractSet) else list(values)


def parse_space(space: Mapping[str, Any]) -> Nested:
    """Return the space that `space` describes.

    Raises:
        ValueError: If nothing in it is to be chosen, two parameters have one name, a domain is invalid, or it is nested more
            than 100 levels deep; the error names the place.

    """
    if not isinstance(space, Mapping) or not space:
        raise ValueError(f"space={space!r} is empty: give what is to be searched, such as {{'lr': loguniform(1e-4, 1e-1)}}")
    check_depth(space, "space")
    parsed = _parse(with_numbers(space), "")
    if not isinstance(parsed, Nested):
        raise ValueError(f"space is a {space['kind']} itself: give it a name, such as {{'lr': {space!r}}}")  # noqa: TRY004 - one error
    if not has_domains(parsed):
        raise ValueError("space holds constants only: give at least one domain, such as loguniform(1e-4, 1e-1)")
    twice = [name for name, count in Counter(parameter_names(parsed)).items() if count > 1]
    if twice:
        raise ValueError(
            f"space has two parameters called {twice[0]!r}: give other keys, of which a '/' looks like a dict in a dict, and "
            "a '[0]' like the first option of a choice"
        )
    return parsed


def as_stored(value: Any) -> Any:
    """Return a part of a space or config as it is read back from storage: a tuple becomes a list, numpy's numbers Python's."""
    return json.loads(json.dumps(with_numbers(value)))


def _parse(value: Any, place: str) -> Node:
    if isinstance(value, Mapping) and isinstance(value.get("kind"), str):
        return _parse_domain(value, place)
    if isinstance(value, Mapping):
        if value.keys() == {"grid_search"}:
            raise ValueError(f"space{place} is a grid as Ray Tune has it: give grid({value['grid_search']!r})")
        if not place and isinstance(value.get(_CONFIG_OF_RAY), Mapping):
            raise ValueError(
                f"space has a {_CONFIG_OF_RAY!r}, as Ray Tune's for a TorchTrainer: give what is in it as the space"
            )
        for key in value:
            if not isinstance(key, str) or not key:
                raise ValueError(f"space{place} has the key {key!r}: keys are texts")
        nodes = tuple((key, _parse(item, f"{place}[{key!r}]")) for key, item in value.items())
        inner = Nested(nodes)
        return inner if not place or has_domains(inner) else Constant(as_stored(value))
    if (domain := find_domain(value, place)) is not None:
        raise ValueError(
            f"space{domain} is a domain in a list, and each value that is chosen needs a name: give a dict instead of the "
            "list, and make the list in your function"
        )
    try:
        return Constant(as_stored(value))
    except (TypeError, ValueError) as exc:
        if type(value).__module__.startswith("ray."):
            raise ValueError(
                f"space{place} is {show_class(value)}, Ray's: give the domains of prefect_torch.flows, such as "
                "loguniform(1e-4, 1e-1)"
            ) from exc
        raise ValueError(
            f"space{place}={value!r} is neither JSON nor a domain: give numbers, texts, lists and dicts, and choose among "
            "functions or classes by their names"
        ) from exc


def find_domain(value: Any, place: str) -> str | None:
    """Return the place of a domain in `value`, a config or a list, from which nothing would be chosen, or None."""
    if isinstance(value, Mapping) and isinstance(kind := value.get("kind"), str) and kind in _FIELDS:
        needed, optional = _FIELDS[kind]
        if needed < value.keys() <= needed | optional | {"kind"}:
            return place
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    found = (find_domain(item, f"{place}[{key!r}]") for key, item in inner)
    return next(filter(None, found), None)


def _parse_domain(domain: Mapping[str, Any], place: str) -> Node:
    kind = domain["kind"]
    if kind not in _FIELDS:
        raise ValueError(
            f"space{place} has the unknown kind {kind!r}: give one of {', '.join(_FIELDS)}; a dict that is no domain needs "
            "another key than 'kind'"
        )
    needed, optional = _FIELDS[kind]
    given = domain.keys() - {"kind"}
    if missing := needed - given:
        raise ValueError(f"space{place}: {kind} needs {' and '.join(sorted(missing))}")
    if unknown := given - needed - optional:
        raise ValueError(f"space{place}: {kind} has no {' and no '.join(sorted(unknown))}")
    if kind in ("choice", "grid"):
        return _parse_choice(domain["values"], place, is_grid=kind == "grid")
    return _parse_integer(domain, place) if kind == "randint" else _parse_real(domain, place)


_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "uniform": ({"low", "high"}, {"step"}),
    "loguniform": ({"low", "high"}, set()),
    "randint": ({"low", "high"}, {"step", "log"}),
    "choice": ({"values"}, set()),
    "grid": ({"values"}, set()),
}


def _parse_real(domain: Mapping[str, Any], place: str) -> Real:
    kind, log = domain["kind"], domain["kind"] == "loguniform"
    low, high, step = (_number(domain.get(name), f"space{place}: {name}") for name in ("low", "high", "step"))
    assert low is not None
    assert high is not None
    if low > high:
        raise ValueError(f"space{place}: low={low:g} is above high={high:g}")
    if log and low <= 0:
        raise ValueError(f"space{place}: low={low:g} has no logarithm: loguniform begins above 0")
    if not math.isfinite(high - low):
        raise ValueError(f"space{place}: from low={low:g} to high={high:g} is more than a float holds")
    if step is not None and step <= 0:
        raise ValueError(f"space{place}: step={step:g} of {kind} is not positive")
    return Real(low, high if step is None else _last(low, high, step), step, log)


def _last(low: float, high: float, step: float) -> float:
    """Return the last value that is a number of steps above `low` and not above `high`, computed in decimals.

    `optuna.distributions.FloatDistribution` does the same; in binary, 1 // 0.1 is 9.
    """
    first, last, width = (Decimal(repr(number)) for number in (low, high, step))
    return float(first + (last - first) // width * width)


def _parse_integer(domain: Mapping[str, Any], place: str) -> Integer:
    low, high, step, log = domain["low"], domain["high"], domain.get("step", 1), domain.get("log", False)
    for name, value in (("low", low), ("high", high), ("step", step)):
        if type(value) is not int:
            raise ValueError(f"space{place}: {name}={value!r} of randint is no integer")
    if low >= high:
        raise ValueError(f"space{place}: randint({low}, {high}) has no integer: high is one more than the largest")
    if step < 1 or (log and step != 1):
        raise ValueError(f"space{place}: step={step} of randint: give 1 or more, and 1 with log=True")
    if log and low <= 0:
        raise ValueError(f"space{place}: low={low} has no logarithm: randint(..., log=True) begins with 1 or more")
    return Integer(low, low + (high - 1 - low) // step * step, step, bool(log))


def _parse_choice(values: Any, place: str, *, is_grid: bool) -> Choice:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise ValueError(f"space{place}: values={values!r} is no list with a value to choose")
    options = tuple(_parse(value, f"{place}[{number}]") for number, value in enumerate(values))
    plain = all(value is None or isinstance(value, _PRIMITIVE) for value in values)
    is_distinct = plain and len(set(values)) == len(values)
    is_finite = all(not isinstance(value, float) or math.isfinite(value) for value in values)
    return Choice(options, tuple(values) if is_distinct and is_finite else tuple(range(len(options))), is_grid)


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(number := as_float(value)):
        raise ValueError(f"{what}={value!r} is no number")
    return number
