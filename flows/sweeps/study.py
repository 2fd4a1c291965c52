"""The suggestions of a sweep, by Optuna, whose study is a list of operations that the sweep's journal holds.

This module and `study_storage` alone import Optuna, the extra `sweep`. A sampler is made anew for each suggestion, seeded with
the sweep's seed and the trial's number: its suggestion depends on these and on the study, and on nothing that a killed process
would lose.
"""

import hashlib
import importlib
import importlib.util
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.opening import StorageLike
from prefect_torch.flows.sweeps.history import operations_of
from prefect_torch.flows.sweeps.search_config import SearchConfig
from prefect_torch.flows.sweeps.space import Nested, Parameters, has_grid
from prefect_torch.flows.sweeps.stored_trials import read_events
from prefect_torch.flows.sweeps.study_storage import CONTINUES, Operation, operation_log, study_storage

if TYPE_CHECKING:
    import optuna

ObservedState: TypeAlias = Literal["complete", "pruned", "failed"]
NAME = "sweep"
_SEED_BYTES = 4
_WITH_RUNGS = ("asha", "hyperband")
_MODELS = ("tpe", "gp")  # samplers that fit a model to values
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A config to try.

    Attributes:
        study_number: Its number in the study.
        chosen: The config that was chosen from the space.

    """

    study_number: int
    chosen: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """What a trial has shown.

    Attributes:
        state: Whether it has ended, was stopped early or paused ("pruned"), or has failed.
        values: The values of the metrics at the end, none of which is NaN; None if there are none.
        intermediate: The values of the metric on the way, by step.

    """

    state: ObservedState
    values: tuple[float, ...] | None = None
    intermediate: tuple[tuple[int, float], ...] = ()


def require_optuna() -> None:
    """Raise ImportError unless Optuna is installed.

    Raises:
        ImportError: Naming the extra.

    """
    try:
        importlib.import_module("optuna")
    except ImportError as exc:
        raise ImportError("a sweep needs Optuna: pip install 'prefect-torch[sweep]'") from exc


def check_search(search: SearchConfig, space: Nested) -> None:
    """Raise unless what is searched and how fit each other.

    Raises:
        ValueError: If the sampler does not fit the space or the metrics, if an import path leads to no sampler or pruner, or if
            an initial point is not in the space.
        ImportError: If the sampler needs a package that is not installed.

    """
    if ":" in (name := check_sampler(search, space)):
        _imported_sampler(name)(0)
    if search.pruner is not None:
        OptunaPruning(search.pruner)
    _initial_points(search, space)


def check_sampler(search: SearchConfig, space: Nested) -> str:
    """Return the name of the sampler.

    Raises:
        ValueError: If it does not fit the space or the metrics.
        ImportError: If it needs a package that is not installed.

    """
    is_grid = has_grid(space)
    name = search.sampler or ("grid" if is_grid else "tpe")
    if name == "grid":
        next(iter(space.points("")))  # raises for a continuous domain
    elif is_grid:
        raise ValueError(f"the space has a grid, which sampler={name!r} does not enumerate: give choice([...]), or 'grid'")
    if len(search.metrics) > 1 and name == "cmaes":
        raise ValueError(f"sampler={name!r} optimizes one metric: give nsga2 or tpe for {len(search.metrics)}")
    if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
        raise ImportError("sampler='cmaes' needs the package cmaes: pip install 'prefect-torch[sweep]'")
    return name


def grid_points(search: SearchConfig, space: Nested) -> list[Parameters]:
    """Return what is tried first: the initial points, and with a grid every combination."""
    points = _initial_points(search, space)
    if check_sampler(search, space) != "grid":
        return points
    combinations = list(space.points(""))
    chosen: list[Parameters] = []
    for point in points:  # a part of a combination is the first one that has it
        chosen.append(next((it for it in combinations if point.items() <= it.items() and it not in chosen), point))
    return chosen + [it for it in combinations if it not in chosen]


def _initial_points(search: SearchConfig, space: Nested) -> list[Parameters]:
    return [_initial(space, number, point) for number, point in enumerate(search.initial_points)]


def _initial(space: Nested, number: int, point: Mapping[str, Any]) -> Parameters:
    try:
        return space.parameters("", point)
    except ValueError as exc:
        raise ValueError(f"initial_points[{number}]: {exc}") from None


class Study:
    """The suggestions for one sweep, and what is known of its trials; not safe to share between threads.

    Args:
        operations: Those of the study so far, from the journal.
        search: The configuration of the search.
        space: The space.
        seed: The seed.
        points: The parameters of the first trials.

    """

    def __init__(
        self, operations: Iterable[Operation], search: SearchConfig, space: Nested, seed: int, points: Sequence[Parameters]
    ) -> None:
        import optuna  # noqa: PLC0415 - an extra

        self._optuna = optuna
        self._space = space
        self._seed = seed
        name = check_sampler(search, space)
        self._make_sampler = _sampler_of(name)
        self._log = operation_log(operations)
        self._taken = len(self._log.operations)
        self._untried = list(points)
        logging.getLogger("optuna.storages.journal").setLevel(logging.WARNING)  # it tells of each study that it makes
        by_rung = search.scheduler in _WITH_RUNGS and name in _MODELS and len(search.metrics) == 1
        self._storage = study_storage(self._log, by_rung=by_rung)
        if self._log.operations:
            self._study = optuna.load_study(storage=self._storage, study_name=NAME, sampler=self._make_sampler(seed))
            for trial in self._study.get_trials(deepcopy=False):
                if CONTINUES not in trial.user_attrs and trial.params in self._untried:
                    self._untried.remove(trial.params)
        else:
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=NAME,
                directions=["minimize" if mode == "min" else "maximize" for mode in search.modes],
                sampler=self._make_sampler(seed),
            )

    def take_operations(self) -> list[Operation]:
        """Return the operations since the last call, which are to be recorded with what they belong to."""
        new: list[Operation] = self._log.operations[self._taken :]
        self._taken = len(self._log.operations)
        return new

    def suggest(self, number: int) -> Suggestion:
        """Return the config of trial `number`."""
        self._study.sampler = self._make_sampler(seed_of_trial(self._seed, number))
        if self._untried:
            self._study.enqueue_trial(self._untried.pop(0))
        trial = self._study.ask()
        trial.set_user_attr("trial", number)
        chosen = self._space.suggest("", _TrialDraw(trial))
        return Suggestion(trial.number, chosen)

    def observe(self, study_number: int, observation: Observation) -> None:
        """Add what a trial has shown; of one that was told before and went on, samplers see the newest observation only.

        With asha and hyperband, tpe and gp see the trials at one rung; see `study_storage`.
        """
        study_id = self._storage.get_study_id_from_name(NAME)
        frozen = self._storage.get_trial(self._storage.get_trial_id_from_study_id_trial_number(study_id, study_number))
        states = self._optuna.trial.TrialState
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[observation.state]
        if not frozen.state.is_finished():
            trial = self._optuna.trial.Trial(self._study, frozen._trial_id)  # noqa: SLF001 - as optuna's own `ask` does
            for step, value in observation.intermediate:
                trial.report(value, step)
            values = list(observation.values) if observation.state == "complete" and observation.values else None
            self._study.tell(trial, values, state)
        elif observation.state != "failed":
            again = self._optuna.trial.create_trial(
                state=state,
                values=None if observation.values is None else list(observation.values),
                params=frozen.params,
                distributions=frozen.distributions,
                intermediate_values=dict(observation.intermediate),
                user_attrs={**frozen.user_attrs, CONTINUES: study_number},
            )
            self._study.add_trial(again)


class OptunaPruning:
    """An Optuna pruner, with a study of its own that has the reports of every trial; a lower value is better.

    Args:
        name: "module:function", which returns the pruner.

    Raises:
        ValueError: If there is no such function, or it returns something else.

    """

    def __init__(self, name: str) -> None:
        import optuna  # noqa: PLC0415 - an extra

        self._states = {
            "completed": optuna.trial.TrialState.COMPLETE,
            "stopped": optuna.trial.TrialState.PRUNED,
            "failed": optuna.trial.TrialState.FAIL,
        }
        pruner = _imported("pruner", name)()
        if not isinstance(pruner, optuna.pruners.BasePruner):
            raise ValueError(f"pruner={name!r} returned a {type(pruner).__name__}: return an Optuna pruner")  # noqa: TRY004 - one error
        self._study = optuna.create_study(pruner=pruner)
        self._trials: dict[int, optuna.trial.Trial] = {}
        self._last: dict[int, float] = {}

    def report(self, number: int, step: int, value: float) -> bool:
        """Add a report of a trial, and return whether the trial is to stop."""
        if number not in self._trials:
            self._trials[number] = self._study.ask()
        self._trials[number].report(value, step)
        self._last[number] = value
        return self._trials[number].should_prune()

    def end(self, number: int, state: str) -> None:
        """Record that a trial has come to an end."""
        if number not in self._trials:
            return
        last = self._last[number]
        is_complete = state == "completed" and not math.isnan(last)
        told = self._states[state] if state != "completed" or is_complete else self._states["failed"]
        self._study.tell(self._trials[number], last if is_complete else None, told)


class _TrialDraw:
    """Lets an Optuna trial choose."""

    def __init__(self, trial: "optuna.trial.Trial") -> None:
        self._trial = trial

    def real(self, name: str, low: float, high: float, *, step: float | None, log: bool) -> float:
        return self._trial.suggest_float(name, low, high, step=step, log=log)

    def integer(self, name: str, low: int, high: int, *, step: int, log: bool) -> int:
        return self._trial.suggest_int(name, low, high, step=step, log=log)

    def category(self, name: str, labels: Sequence[Any]) -> Any:
        return self._trial.suggest_categorical(name, labels)


def open_study_storage(storage: StorageLike, name: str) -> "optuna.storages.JournalStorage":
    """Return an Optuna storage with the study "sweep", for optuna-dashboard and Optuna's plots.

    It follows the sweep, and cannot be changed.

    Args:
        storage: The sweep's storage.
        name: The sweep's name.

    Raises:
        ImportError: If Optuna is not installed.

    """
    require_optuna()
    from optuna.storages import JournalStorage  # noqa: PLC0415 - an extra
    from optuna.storages.journal import BaseJournalBackend  # noqa: PLC0415

    run = Run.open(storage, name)

    class ReadJournal(BaseJournalBackend):
        def read_logs(self, log_number_from: int) -> list[Operation]:
            return operations_of(read_events(run))[log_number_from:]

        def append_logs(self, logs: list[Operation]) -> None:
            raise PermissionError(f"sweep {name!r} writes its study itself: {len(logs)} operations are refused")

    return JournalStorage(ReadJournal())


def seed_of_trial(seed: int, number: int) -> int:
    """Return the seed of the suggestion for trial `number` of a sweep with this seed."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:_SEED_BYTES], "big")


def _sampler_of(name: str) -> "Callable[[int], optuna.samplers.BaseSampler]":
    from optuna import samplers  # noqa: PLC0415 - an extra

    if ":" in name:
        return _imported_sampler(name)
    if name == "qmc":  # the position in the sequence is in the study
        return _qmc_sampler
    if name == "cmaes":
        return lambda seed: samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    makers: dict[str, Callable[[int], samplers.BaseSampler]] = {
        "tpe": lambda seed: samplers.TPESampler(seed=seed),
        "gp": lambda seed: samplers.GPSampler(seed=seed),
        "nsga2": lambda seed: samplers.NSGAIISampler(seed=seed),
        "random": lambda seed: samplers.RandomSampler(seed=seed),
        "grid": lambda seed: samplers.RandomSampler(seed=seed),  # for trials beyond the grid
    }
    return makers[name]


def _qmc_sampler(seed: int) -> "optuna.samplers.BaseSampler":
    from optuna.exceptions import ExperimentalWarning  # noqa: PLC0415 - an extra
    from optuna.samplers import QMCSampler  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # once for each trial; who names it has chosen it
        return QMCSampler(seed=seed, warn_independent_sampling=False)


def _imported_sampler(name: str) -> "Callable[[int], optuna.samplers.BaseSampler]":
    from optuna.samplers import BaseSampler  # noqa: PLC0415 - an extra

    make = _imported("sampler", name)
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
    """Return whether a parameter is named `seed`: of most of Optuna's own samplers, it is not the first."""
    try:
        return "seed" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # no function, or a built-in one
        return False


def _imported(what: str, name: str) -> Callable[..., Any]:
    place, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as exc:
        raise ValueError(f"{what}={name!r} cannot be imported: {exc}") from exc
    return found
