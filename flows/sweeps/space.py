"""The space of a sweep: a config in which some values are yet to be chosen, as a tree."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any, Protocol, TypeAlias

Parameters: TypeAlias = dict[str, Any]  # what was chosen, by the parameter's name: "optimizer/lr"


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


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values of JSON are equal, NaN being equal to itself."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - NaN


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that all trials have."""

    value: Any

    def suggest(self, name: str, draw: Draw) -> Any:  # noqa: ARG002 - the signature of all nodes
        """Return a value, as `draw` chooses."""
        return self.value

    def parameters(self, name: str, value: Any) -> Parameters:
        """Return the parameters with which `suggest` returns `value`; ValueError if there are none."""
        if not is_same(value, self.value):
            raise ValueError(f"{name} is {self.value!r} in the space, not {value!r}")
        return {}

    def points(self, name: str) -> Iterator[Parameters]:  # noqa: ARG002 - the signature of all nodes
        """Yield the parameters of every value."""
        yield {}


@dataclass(frozen=True, slots=True)
class Real:
    """Floats; both bounds are included."""

    low: float
    high: float
    step: float | None
    log: bool

    def suggest(self, name: str, draw: Draw) -> float:
        """Return a value, as `draw` chooses."""
        return draw.real(name, self.low, self.high, step=self.step, log=self.log)

    def parameters(self, name: str, value: Any) -> Parameters:
        """Return the parameters with which `suggest` returns `value`; ValueError if there are none."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise ValueError(f"{name}={value!r} is no number from {self.low} to {self.high}")
        if self.step is not None:
            below = self.low + (value - self.low) // self.step * self.step
            # In binary, a step is seldom met exactly: 0.1 + 2 * 0.1 is above 0.3.
            if not any(math.isclose(value, it, rel_tol=1e-12, abs_tol=1e-8 * self.step) for it in (below, below + self.step)):
                raise _between_steps(name, value, below, self)
        return {name: float(value)}

    def points(self, name: str) -> Iterator[Parameters]:
        """Yield the parameters of every value; ValueError if it has no steps."""
        if self.step is None:
            raise ValueError(
                f"sampler='grid' tries every combination, and {name} is continuous: give grid([...]) or choice([...]) there, "
                "or another sampler"
            )
        yield from ({name: min(self.high, self.low + number * self.step)} for number in range(num_points(self)))


@dataclass(frozen=True, slots=True)
class Integer:
    """Integers; both bounds are included."""

    low: int
    high: int
    step: int
    log: bool

    def suggest(self, name: str, draw: Draw) -> int:
        """Return a value, as `draw` chooses."""
        return draw.integer(name, self.low, self.high, step=self.step, log=self.log)

    def parameters(self, name: str, value: Any) -> Parameters:
        """Return the parameters with which `suggest` returns `value`; ValueError if there are none."""
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise ValueError(f"{name}={value!r} is no integer from {self.low} to {self.high}")
        if remainder := (value - self.low) % self.step:
            raise _between_steps(name, value, value - remainder, self)
        return {name: value}

    def points(self, name: str) -> Iterator[Parameters]:
        """Yield the parameters of every value."""
        yield from ({name: value} for value in range(self.low, self.high + 1, self.step))


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several options, which may hold domains of their own.

    Attributes:
        options: The options.
        labels: The values to choose among: the options themselves where they are plain and differ, else their numbers.
        is_grid: Whether every option must be tried.

    """

    options: tuple["Node", ...]
    labels: tuple[Any, ...]
    is_grid: bool = False

    def suggest(self, name: str, draw: Draw) -> Any:
        """Return a value, as `draw` chooses."""
        chosen = self.labels.index(draw.category(name, self.labels))
        return self.options[chosen].suggest(_within(name, chosen), draw)

    def parameters(self, name: str, value: Any) -> Parameters:
        """Return the parameters with which `suggest` returns `value`; ValueError if there are none.

        A part of one option may be all of another one, as `{}` is: that one is meant.
        """
        options = list(enumerate(self.options))
        whole = (it for it in options if _is_whole(it[1], value))
        for number, option in chain(whole, options):
            try:
                inner = option.parameters(_within(name, number), value)
            except ValueError:
                continue
            return {name: self.labels[number], **inner}
        raise ValueError(f"{name}={value!r} is none of the options in the space")

    def points(self, name: str) -> Iterator[Parameters]:
        """Yield the parameters of every value."""
        for number, option in enumerate(self.options):
            for inner in option.points(_within(name, number)):
                yield {name: self.labels[number], **inner}


@dataclass(frozen=True, slots=True)
class Nested:
    """A dict whose values are chosen independently."""

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
            raise ValueError(f"{_join(name, min(unknown))} is not in the space{_unflattened(min(unknown))}")
        parameters: Parameters = {}
        for key, given in value.items():
            parameters |= nodes[key].parameters(_join(name, key), given)
        return parameters

    def points(self, name: str) -> Iterator[Parameters]:
        """Yield the parameters of every value."""
        for combination in product(*(tuple(node.points(_join(name, key))) for key, node in self.items)):
            yield {key: value for point in combination for key, value in point.items()}


Node: TypeAlias = Constant | Real | Integer | Choice | Nested


def has_grid(node: Node) -> bool:
    """Return whether the space has a grid, whose every option must be tried."""
    return any(isinstance(it, Choice) and it.is_grid for it in _walk(node))


def _is_whole(node: Node, value: Any) -> bool:
    """Return whether `value` is all of a value of `node`: no key of a dict is missing, as in an initial point."""
    if isinstance(node, Nested):
        nodes = dict(node.items)
        is_complete = isinstance(value, Mapping) and value.keys() == nodes.keys()
        return is_complete and all(_is_whole(inner, value[key]) for key, inner in nodes.items())
    if isinstance(node, Choice):
        return any(_is_whole(option, value) for option in node.options)
    try:
        node.parameters("", value)
    except ValueError:
        return False
    return True


def _walk(node: Node) -> Iterator[Node]:
    yield node
    inner = node.options if isinstance(node, Choice) else [it for _, it in node.items] if isinstance(node, Nested) else ()
    for one in inner:
        yield from _walk(one)


def has_domains(node: Node) -> bool:
    """Return whether anything of the space is to be chosen."""
    return any(isinstance(it, Real | Integer | Choice) for it in _walk(node))


def parameter_names(node: Node, name: str = "") -> Iterator[str]:
    """Yield the name of each parameter, including those of every option of a choice."""
    if isinstance(node, Nested):
        for key, inner in node.items:
            yield from parameter_names(inner, _join(name, key))
    elif not isinstance(node, Constant):
        yield name
    if isinstance(node, Choice):
        for number, option in enumerate(node.options):
            yield from parameter_names(option, _within(name, number))


def num_points(node: Node) -> int:
    """Return how many values there are, without making them; a continuous domain counts as one value."""
    if isinstance(node, Nested):
        return prod(num_points(inner) for _, inner in node.items)
    if isinstance(node, Choice):
        return sum(num_points(option) for option in node.options)
    if isinstance(node, Real) and node.step is not None:
        return round((node.high - node.low) / node.step) + 1
    return (node.high - node.low) // node.step + 1 if isinstance(node, Integer) else 1


def _between_steps(name: str, value: float, below: float, domain: Real | Integer) -> ValueError:
    """Return the error of a value within a domain that is none of its steps; the last one before it is `below`."""
    steps = f"the steps of {domain.step} from {domain.low}"
    return ValueError(f"{name}={value!r} is none of {steps}: the next ones are {below} and {below + (domain.step or 0)}")


def _within(name: str, number: int) -> str:
    return f"{name}[{number}]"  # two options may hold domains of one name that differ


def _unflattened(key: str) -> str:
    """Return what to write instead of a path such as "a/b", as searchers of Ray take it; empty for another key."""
    *above, text = (*key.split("/"), "...")
    for part in reversed(above):
        text = f"{{{part!r}: {text}}}"
    return f": of dicts in dicts, give {text}" if "/" in key else ""


def _join(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key
