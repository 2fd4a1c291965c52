"""The space of a sweep: a config in which some values are yet to be chosen, as JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any, Protocol, TypeAlias

Domain: TypeAlias = dict[str, Any]
Parameters: TypeAlias = dict[str, Any]  # what was chosen, by the parameter's name: "optimizer/lr"
_PRIMITIVE = (str, int, float, bool)


def uniform(low: float, high: float, step: float | None = None) -> Domain:
    """Return the domain of the floats from `low` to `high`; with a `step`, only of `low`, `low + step` and so on."""
    return {"kind": "uniform", "low": low, "high": high, **({} if step is None else {"step": step})}


def loguniform(low: float, high: float) -> Domain:
    """Return the domain of the floats from `low`, which is positive, to `high`, whose logarithms are equally probable."""
    return {"kind": "loguniform", "low": low, "high": high}


def randint(low: int, high: int, step: int = 1, *, log: bool = False) -> Domain:
    """Return the domain of the integers from `low` to `high - 1`, as in NumPy and Ray Tune.

    Args:
        low: The smallest.
        high: One more than the largest.
        step: The difference between two of them.
        log: Whether their logarithms are equally probable; then `low` is positive and `step` is 1.

    """
    return {"kind": "randint", "low": low, "high": high, "step": step, "log": log}


def choice(values: Sequence[Any]) -> Domain:
    """Return the domain of `values`, JSON of any kind; a dict among them may hold domains, which exist only if it is chosen."""
    return {"kind": "choice", "values": list(values)}


def grid(values: Sequence[Any]) -> Domain:
    """Return the domain of `values`, each of which is tried with all combinations of the others (`sampler="grid"`)."""
    return {"kind": "grid", "values": list(values)}


class Draw(Protocol):
    """Chooses the values of parameters by their names."""

    def real(self, name: str, low: float, high: float, *, step: float | None, log: bool) -> float:
        """Return a float."""
        ...

    def integer(self, name: str, low: int, high: int, *, step: int, log: bool) -> int:
        """Return an integer; both bounds are included."""
        ...

    def category(self, name: str, labels: Sequence[Any]) -> Any:
        """Return one of `labels`."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that all trials have."""

    value: Any

    def suggest(self, name: str, draw: Draw) -> Any:  # noqa: ARG002 - as the others
        """Return a value, as `draw` chooses."""
        return self.value

    def parameters(self, name: str, value: Any) -> Parameters:
        """Return the parameters with which `suggest` returns `value`; ValueError if there are none."""
        if value != self.value:
            raise ValueError(f"{name} is {self.value!r} in the space, not {value!r}")
        return {}

    def points(self, name: str) -> Iterator[Parameters]:  # noqa: ARG002 - as the others
        """Yield the parameters of every value."""
        yield {}


@dataclass(frozen=True, slots=True)
class Real:
    """Floats; both bounds are included."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    def suggest(self, name: str, draw: Draw) -> float:
        """Return a value, as `draw` chooses."""
        return draw.real(name, self.low, self.high, step=self.step, log=self.log)

    def parameters(self, name: str, value: Any) -> Parameters:
        """Return the parameters with which `suggest` returns `value`; ValueError if there are none."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise ValueError(f"{name}={value!r} is no number from {self.low} to {self.high}")
        return {name: float(value)}

    def points(self, name: str) -> Iterator[Parameters]:
        """Yield the parameters of every value."""
        raise ValueError(
            f"sampler='grid' tries every combination, and {name} is continuous: give grid([...]) or choice([...]) there, or "
            "another sampler"
        )


@dataclass(frozen=True, slots=True)
class Integer:
    """Integers; both bounds are included."""

    low: int
    high: int
    step: int = 1
    log: bool = False

    def suggest(self, name: str, draw: Draw) -> int:
        """Return a value, as `draw` chooses."""
        return draw.integer(name, self.low, self.high, step=self.step, log=self.log)

    def parameters(self, name: str, value: Any) -> Parameters:
        """Return the parameters with which `suggest` returns `value`; ValueError if there are none."""
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise ValueError(f"{name}={value!r} is no integer from {self.low} to {self.high}")
        return {name: value}

    def points(self, name: str) -> Iterator[Parameters]:
        """Yield the parameters of every value."""
        yield from ({name: value} for value in range(self.low, self.high + 1, self.step))


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several options, which may hold domains of their own.

    Attributes:
        options: The options.
        labels: What is chosen among: the options themselves where they are plain and differ, else their numbers.
        is_grid: Whether every option must be tried.

    """

    options: tuple["Node", ...]
    labels: tuple[Any, ...]
    is_grid: bool = False

    def suggest(self, name: str, draw: Draw) -> Any:
        """Return a value, as `draw` chooses."""
        chosen = self.labels.index(draw.category(name, self.labels))
        return self.options[chosen].suggest(self._within(name, chosen), draw)

    def parameters(self, name: str, value: Any) -> Parameters:
        """Return the parameters with which `suggest` returns `value`; ValueError if there are none."""
        for number, option in enumerate(self.options):
            try:
                inner = option.parameters(self._within(name, number), value)
            except ValueError:
                continue
            return {name: self.labels[number], **inner}
        raise ValueError(f"{name}={value!r} is none of the options in the space")

    def points(self, name: str) -> Iterator[Parameters]:
        """Yield the parameters of every value."""
        for number, option in enumerate(self.options):
            for inner in option.points(self._within(name, number)):
                yield {name: self.labels[number], **inner}

    @staticmethod
    def _within(name: str, number: int) -> str:
        return f"{name}[{number}]"  # two options may hold domains of one name that differ


@dataclass(frozen=True, slots=True)
class Nested:
    """A dict whose values are chosen each for itself."""

    items: tuple[tuple[str, "Node"], ...]

    def suggest(self, name: str, draw: Draw) -> dict[str, Any]:
        """Return a value, as `draw` chooses."""
        return {key: node.suggest(_join(name, key), draw) for key, node in self.items}

    def parameters(self, name: str, value: Any) -> Parameters:
        """Return the parameters with which `suggest` returns `value`; ValueError if there are none."""
        if not isinstance(value, Mapping):
            raise ValueError(f"{name or 'a point'} is a dict in the space, not {value!r}")  # noqa: TRY004 - one error
        nodes = dict(self.items)
        if unknown := value.keys() - nodes.keys():
            raise ValueError(f"{_join(name, min(unknown))} is not in the space")
        parameters: Parameters = {}
        for key, given in value.items():
            parameters |= nodes[key].parameters(_join(name, key), given)
        return parameters

    def points(self, name: str) -> Iterator[Parameters]:
        """Yield the parameters of every value."""
        for combination in product(*(tuple(node.points(_join(name, key))) for key, node in self.items)):
            yield {key: value for point in combination for key, value in point.items()}


Node: TypeAlias = Constant | Real | Integer | Choice | Nested


def parse_space(space: Mapping[str, Any]) -> Nested:
    """Return the space that `space` describes.

    Raises:
        ValueError: If nothing in it is to be chosen, or a domain is invalid; the error names its place.

    """
    if not isinstance(space, Mapping) or not space:
        raise ValueError(f"space={space!r} is empty: give what is to be searched, such as {{'lr': loguniform(1e-4, 1e-1)}}")
    parsed = _parse(space, "")
    assert isinstance(parsed, Nested)
    if not _has_domains(parsed):
        raise ValueError("space holds constants only: give at least one domain, such as loguniform(1e-4, 1e-1)")
    return parsed


def has_grid(node: Node) -> bool:
    """Return whether a value of the space must be tried with all others."""
    return any(isinstance(it, Choice) and it.is_grid for it in _walk(node))


def shown(name: str) -> str:
    """Return a parameter's name without the numbers of its options, as the config has it."""
    return "".join(part.partition("]")[2] if number else part for number, part in enumerate(name.split("[")))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    inner = node.options if isinstance(node, Choice) else [it for _, it in node.items] if isinstance(node, Nested) else ()
    for one in inner:
        yield from _walk(one)


def _has_domains(node: Node) -> bool:
    return any(isinstance(it, Real | Integer | Choice) for it in _walk(node))


def _join(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key


def as_stored(value: Any) -> Any:
    """Return a part of a space as it is read from storage again: a tuple is a list."""
    return json.loads(json.dumps(value))


def _parse(value: Any, place: str) -> Node:
    if isinstance(value, Mapping) and isinstance(value.get("kind"), str):
        return _parse_domain(value, place)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not key:
                raise ValueError(f"space{place} has the key {key!r}: keys are texts")
        nodes = tuple((key, _parse(item, f"{place}[{key!r}]")) for key, item in value.items())
        inner = Nested(nodes)
        return inner if not place or _has_domains(inner) else Constant(as_stored(value))
    _refuse_domains(value, place)
    try:
        return Constant(as_stored(value))
    except (TypeError, ValueError) as exc:
        raise ValueError(
            f"space{place}={value!r} is neither JSON nor a domain: give numbers, texts, lists and dicts, and choose among "
            "functions or classes by their names"
        ) from exc


def _refuse_domains(value: Any, place: str) -> None:
    """Raise if a list holds a domain, of which nothing would be chosen: a parameter has a name."""
    if isinstance(value, Mapping) and isinstance(kind := value.get("kind"), str) and kind in _FIELDS:
        raise ValueError(
            f"space{place} is a domain in a list, and each value that is chosen needs a name: give a dict instead of the list, "
            "and make the list in your function"
        )
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        _refuse_domains(item, f"{place}[{key!r}]")


def _parse_domain(domain: Mapping[str, Any], place: str) -> Node:
    kind = domain["kind"]
    if kind not in _FIELDS:
        raise ValueError(f"space{place} has the unknown kind {kind!r}: give one of {', '.join(_FIELDS)}")
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
    if step is not None and step <= 0:
        raise ValueError(f"space{place}: step={step:g} of {kind} is not positive")
    return Real(low, high if step is None else _last(low, high, step), step, log)


def _last(low: float, high: float, step: float) -> float:
    """Return the largest number of steps above `low` that is not above `high`, in the decimals in which they are written.

    As `optuna.distributions.FloatDistribution` does; in binary, 0.1 is in 1 nine times.
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
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"space{place}: values={values!r} is no list with a value to choose")
    options = tuple(_parse(value, f"{place}[{number}]") for number, value in enumerate(values))
    plain = all(value is None or isinstance(value, _PRIMITIVE) for value in values)
    is_distinct = plain and all(one != other for number, one in enumerate(values) for other in values[:number])
    is_finite = all(not isinstance(value, float) or math.isfinite(value) for value in values)
    return Choice(options, tuple(values) if is_distinct and is_finite else tuple(range(len(options))), is_grid)


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what}={value!r} is no number")
    return float(value)
