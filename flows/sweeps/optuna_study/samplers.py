"""The samplers of a sweep: the available ones, the one that fits a search, and its construction with a seed."""

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prefect_torch.flows.sweeps.search_config import SearchConfig
from prefect_torch.flows.sweeps.space import Nested, has_grid, num_points

if TYPE_CHECKING:
    import optuna

_MOST_COMBINATIONS = 1_000_000  # which are held in memory


def require_optuna() -> None:
    """Raise ImportError unless Optuna is installed.

    Raises:
        ImportError: Naming the extra.

    """
    try:
        importlib.import_module("optuna")
    except ImportError as exc:
        raise ImportError("a sweep needs Optuna: pip install 'prefect-torch[sweep]'") from exc


def check_sampler(search: SearchConfig, space: Nested) -> str:
    """Return the name of the sampler.

    Raises:
        ValueError: If it does not fit the space or the metrics.
        ImportError: If it needs a package that is not installed.

    """
    is_grid = has_grid(space)
    name = search.sampler or ("grid" if is_grid else "tpe")
    if name == "grid":
        if (combinations := num_points(space)) > _MOST_COMBINATIONS:
            raise ValueError(
                f"sampler='grid' tries every combination, and the space has {combinations}: give fewer values, or another "
                "sampler and choice([...]) in place of grid([...])"
            )
        next(iter(space.points("")))  # raises for a continuous domain
    elif is_grid:
        raise ValueError(f"the space has a grid, which sampler={name!r} does not enumerate: give choice([...]), or 'grid'")
    if len(search.metrics) > 1 and name == "cmaes":
        raise ValueError(f"sampler={name!r} optimizes one metric: give nsga2 or tpe for {len(search.metrics)}")
    if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
        raise ImportError("sampler='cmaes' needs the package cmaes: pip install 'prefect-torch[sweep]'")
    return name


def sampler_of(name: str) -> "Callable[[int], optuna.samplers.BaseSampler]":
    """Return a function that makes the sampler of that name for a seed."""
    from optuna import samplers  # noqa: PLC0415 - an extra

    if ":" in name:
        return imported_sampler(name)
    if name == "qmc":  # the position in the sequence is in the study
        return _qmc_sampler
    if name == "cmaes":
        return lambda seed: samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    makers: dict[str, Callable[[int], samplers.BaseSampler]] = {
        "tpe": lambda seed: samplers.TPESampler(seed=seed),
        "gp": lambda seed: samplers.GPSampler(seed=seed),
        "nsga2": lambda seed: samplers.NSGAIISampler(seed=seed),
        "random": lambda seed: samplers.RandomSampler(seed=seed),
        "grid": lambda seed: samplers.RandomSampler(seed=seed),  # every combination is enqueued
    }
    return makers[name]


def _qmc_sampler(seed: int) -> "optuna.samplers.BaseSampler":
    from optuna.exceptions import ExperimentalWarning  # noqa: PLC0415 - an extra
    from optuna.samplers import QMCSampler  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # once for each trial, though the user has chosen it
        return QMCSampler(seed=seed, warn_independent_sampling=False)


def imported_sampler(name: str) -> "Callable[[int], optuna.samplers.BaseSampler]":
    """Return a function that makes the sampler at an import path for a seed.

    Raises:
        ValueError: If the path leads to no function.

    """
    from optuna.samplers import BaseSampler  # noqa: PLC0415 - an extra

    make = imported("sampler", name)
    has_seed = _has_seed(make)

    def sampler(seed: int) -> BaseSampler:
        made = make(seed=seed) if has_seed else make(seed)
        if not isinstance(made, BaseSampler):
            raise ValueError(  # noqa: TRY004 - one error
                f"sampler={name!r} returned a {type(made).__name__}: return an Optuna sampler for the seed that it is given"
            )
        return made

    return sampler


def _has_seed(make: Callable[..., Any]) -> bool:
    """Return whether a parameter is named `seed`: in most of Optuna's own samplers, it is not the first."""
    try:
        return "seed" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # no function, or a built-in one
        return False


def imported(what: str, name: str) -> Callable[..., Any]:
    """Return the function "module:function".

    Raises:
        ValueError: If there is none; the message begins with `what`.

    """
    place, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as exc:
        raise ValueError(f"{what}={name!r} cannot be imported: {exc}") from exc
    return found
