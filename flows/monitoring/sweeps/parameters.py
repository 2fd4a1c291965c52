"""The parameters of a sweep: their values in its trials, and how much of the score each explains; pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from prefect_torch.ckpt.runs.metrics import as_float

Value: TypeAlias = bool | int | float | str | None
_FEWEST = 8  # trials below which chance explains everything
_GROUPS = 4  # of a parameter with more values: quarters of the trials by its value


def parameters_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Return the values of a config by their names, "a/b" for nested ones; a list is its JSON."""
    found: dict[str, Value] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found.update(parameters_of(value, f"{prefix}{name}/"))
        elif value is None or isinstance(value, bool | int | float | str):
            found[f"{prefix}{name}"] = value
        else:
            found[f"{prefix}{name}"] = json.dumps(value, default=str, ensure_ascii=False)
    return found


def at_equal_steps(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[int, list[float]] | None:
    """Return the last step that all curves have reached, and the value of each there; None if one has no point.

    Trials that were stopped early have worse last values than others: only at equal steps do they compare.
    """
    if not curves or not all(curves):
        return None
    step = min(curve[-1][0] for curve in curves)
    return step, [next((value for at, value in reversed(curve) if at <= step), curve[0][1]) for curve in curves]


def is_number(value: Value) -> TypeGuard[float]:
    """Return whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def varied(configs: Sequence[Mapping[str, Value]]) -> list[str]:
    """Return the parameters in which at least two configs differ, or that only some have, in the order of their appearance."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({_key(config, name) for config in configs}) > 1]


def importances(configs: Sequence[Mapping[str, Value]], scores: Sequence[float]) -> dict[str, float]:
    """Return how much of the order of the trials each varied parameter explains by itself, the most important first.

    That is the share of the variance of the trials' ranks that lies between groups of trials with equal values (of numbers with
    more than four values: quarters of the trials), less the share that as many random groups would explain: epsilon squared of
    Kruskal and Wallis. It is 1 for a parameter that decides the order of its groups, and 0 for one that does not matter.
    Interactions of two parameters are not measured.

    Args:
        configs: The parameters of each trial.
        scores: The finite score of each.

    Returns:
        The share of each parameter; empty for fewer than eight trials.

    """
    if len(scores) < _FEWEST:
        return {}
    ranks = _ranks(scores)
    found = {name: _explained(_groups([config.get(name) for config in configs]), ranks) for name in varied(configs)}
    return dict(sorted(found.items(), key=lambda it: -it[1]))


def _key(config: Mapping[str, Value], name: str) -> tuple[bool, str]:
    return name in config, repr(config.get(name))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value from 0; equal values have the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for index in order[first : last + 1]:
            ranks[index] = (first + last) / 2
        first = last + 1
    return ranks


def _groups(values: Sequence[Value]) -> list[object]:
    """Return the group of each value: that of equal values, or the quarter of a number among the numbers."""
    numbers = [as_float(it) for it in values if is_number(it)]
    if len(set(numbers)) <= _GROUPS:
        return [repr(value) for value in values]
    quarters = iter([int((rank + 0.5) * _GROUPS / len(numbers)) for rank in _ranks(numbers)])
    return [next(quarters) if is_number(value) else repr(value) for value in values]


def _explained(groups: Sequence[object], ranks: Sequence[float]) -> float:
    number, mean = len(ranks), sum(ranks) / len(ranks)
    whole = sum((rank - mean) ** 2 for rank in ranks)
    by_group: dict[object, list[float]] = {}
    for group, rank in zip(groups, ranks, strict=True):
        by_group.setdefault(group, []).append(rank)
    if whole == 0 or len(by_group) == number:
        return 0.0
    between = sum(len(them) * (sum(them) / len(them) - mean) ** 2 for them in by_group.values())
    by_chance = whole * (len(by_group) - 1) / (number - 1)
    return max(0.0, (between - by_chance) / (whole - by_chance))
