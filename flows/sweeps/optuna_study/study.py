"""The suggestions of a sweep, by Optuna, whose study is a list of operations that the sweep's journal holds.

A sampler is made anew for each suggestion, seeded with the sweep's seed and the trial's number: its suggestion depends on these
and on the study, and on nothing that a killed process would lose.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from prefect_torch.flows.sweeps.domains import as_stored
from prefect_torch.flows.sweeps.search_config import SearchConfig
from prefect_torch.flows.sweeps.space import Nested, Parameters

from .pruning import OptunaPruning
from .samplers import check_sampler, imported_sampler, sampler_of
from .storage import CONTINUES, Compared, Operation, operation_log, study_storage

if TYPE_CHECKING:
    import optuna

ObservedState: TypeAlias = Literal["complete", "pruned", "failed"]
_Tried: TypeAlias = tuple[Parameters | None, Parameters]  # of a trial: what was enqueued, which may be a part, and all
NAME = "sweep"
_STOPPED_BY = "stopped_by"  # an attribute of the study, and so in the journal: the sampler
_SEED_BYTES = 4
_AT_THEIR_ENDS: Compared = MappingProxyType({})


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
    """The observed values of a trial.

    Attributes:
        state: Whether it has ended, was stopped early or paused ("pruned"), or has failed.
        values: The values of the metrics at the end, none of which is NaN; None if there are none.
        intermediate: The intermediate values of the metric, by step.

    """

    state: ObservedState
    values: tuple[float, ...] | None = None
    intermediate: tuple[tuple[int, float], ...] = ()


def check_search(search: SearchConfig, space: Nested) -> None:
    """Raise unless the space and the configuration of a search fit each other.

    Raises:
        ValueError: If the sampler does not fit the space or the metrics, if an import path leads to no sampler or pruner, or if
            an initial point is not in the space.
        ImportError: If the sampler needs a package that is not installed.

    """
    if ":" in (name := check_sampler(search, space)):
        imported_sampler(name)(0)
    if search.pruner is not None:
        OptunaPruning(search.pruner, search.modes[0])
    _initial_points(search, space)


def grid_points(search: SearchConfig, space: Nested) -> list[Parameters]:
    """Return the points to try first: the initial ones, and with a grid every combination."""
    points = _initial_points(search, space)
    if check_sampler(search, space) != "grid":
        return points
    combinations = list(space.points(""))
    chosen: list[Parameters] = []
    for point in points:  # a partial point becomes the first combination that contains it
        chosen.append(next((it for it in combinations if point.items() <= it.items() and it not in chosen), point))
    return chosen + [it for it in combinations if it not in chosen]


def _initial_points(search: SearchConfig, space: Nested) -> list[Parameters]:
    return [_initial(space, number, point) for number, point in enumerate(search.initial_points)]


def _initial(space: Nested, number: int, point: Mapping[str, Any]) -> Parameters:
    try:
        return space.parameters("", as_stored(point))  # a tuple becomes a list, as in the options
    except (TypeError, ValueError) as exc:
        raise ValueError(f"initial_points[{number}]: {exc}") from None


class Study:
    """The suggestions for one sweep, and what is known of its trials; not safe to share between threads.

    Args:
        operations: The operations of the study so far, from the journal.
        search: The configuration of the search.
        space: The space.
        seed: The seed.
        points: The parameters of the first trials; with a grid, its combinations are repeated after them.

    """

    def __init__(
        self, operations: Iterable[Operation], search: SearchConfig, space: Nested, seed: int, points: Sequence[Parameters]
    ) -> None:
        import optuna  # noqa: PLC0415 - an extra

        self._optuna = optuna
        self._space = space
        self._seed = seed
        self._sampler = check_sampler(search, space)
        self._make_sampler = sampler_of(self._sampler)
        self._log = operation_log(operations)
        self._taken = len(self._log.operations)
        tried: list[_Tried] = []
        logging.getLogger("optuna.storages.journal").setLevel(logging.WARNING)  # it logs each study that it creates
        self._storage = study_storage(self._log)
        if self._log.operations:
            self._study = optuna.load_study(storage=self._storage, study_name=NAME, sampler=self._make_sampler(seed))
            study_id = self._storage.get_study_id_from_name(NAME)
            # Also those that samplers do not see: `self._study` has the newest observation of each trial.
            trials = optuna.storages.JournalStorage.get_all_trials(self._storage, study_id, deepcopy=False)
            tried = [(it.system_attrs.get("fixed_params"), it.params) for it in trials if CONTINUES not in it.user_attrs]
        else:
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=NAME,
                directions=["minimize" if mode == "min" else "maximize" for mode in search.modes],
                sampler=self._make_sampler(seed),
            )
        repeats = islice(cycle(space.points("")), max(0, (search.num_trials or 0) - len(points)))
        self._untried = _without(tried, chain(points, repeats if self._sampler == "grid" else ()))
        # With this, samplers "exit from the current optimization loop"; outside of one, Optuna's own method raises.
        self._study.stop = self._stop  # type: ignore[method-assign]  # of this study alone

    def _stop(self) -> None:
        self._study.set_user_attr(_STOPPED_BY, self._sampler)

    @property
    def is_over(self) -> bool:
        """Whether the sampler has nothing more to suggest, such as when it has tried every combination."""
        return self._study.user_attrs.get(_STOPPED_BY) == self._sampler

    def take_operations(self) -> list[Operation]:
        """Return the operations since the last call, which are to be recorded with the event that they belong to."""
        new: list[Operation] = self._log.operations[self._taken :]
        self._taken = len(self._log.operations)
        return new

    def suggest(self, number: int, compared: Compared = _AT_THEIR_ENDS) -> Suggestion:
        """Return the config of trial `number`.

        Args:
            number: The trial.
            compared: The values by which the sampler compares earlier trials, by their numbers, and None for those that it
                does not see; it sees all other trials as they were observed.

        """
        self._storage.compared = compared
        self._study.sampler = self._make_sampler(seed_of_trial(self._seed, number))
        if (point := next(self._untried, None)) is not None:
            self._study.enqueue_trial(point)
        trial = self._study.ask()
        trial.set_user_attr("trial", number)
        chosen = self._space.suggest("", _TrialDraw(trial))
        return Suggestion(trial.number, chosen)

    def observe(self, study_number: int, observation: Observation) -> None:
        """Add an observation of a trial; of a trial that was observed before, samplers see only the newest one."""
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
                system_attrs=frozen.system_attrs,  # samplers keep there what they know of a trial, such as its generation
                intermediate_values=dict(observation.intermediate),
                user_attrs={**frozen.user_attrs, CONTINUES: study_number},
            )
            self._study.add_trial(again)


def _without(tried: list[_Tried], points: Iterable[Parameters]) -> Iterator[Parameters]:
    """Yield the points but those that earlier trials had, one by one: a grid may be repeated for a billion trials."""
    for point in points:
        known = next((it for it in tried if point in it), None)
        if known is None:
            yield point
        else:
            tried.remove(known)


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


def seed_of_trial(seed: int, number: int) -> int:
    """Return the seed of the suggestion for trial `number` of a sweep with this seed."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:_SEED_BYTES], "big")
