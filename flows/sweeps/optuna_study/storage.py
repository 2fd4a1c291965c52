"""The storage of a sweep's study, in which samplers see each trial once, with a value that compares with the others."""

from collections.abc import Container, Iterable, Iterator, Mapping
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.opening import StorageLike
from prefect_torch.flows.sweeps.journal.history import operations_of
from prefect_torch.flows.sweeps.journal.stored_trials import read_events

from .samplers import require_optuna

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

Operation: TypeAlias = dict[str, Any]
Compared: TypeAlias = Mapping[int, list[float] | None]  # see `study_storage`
CONTINUES = "continues"  # the attribute of a newer observation of a trial: the trial's number


def operation_log(operations: Iterable[Operation]) -> Any:
    """Return operations as the backend of an `optuna.storages.JournalStorage`; what it appends stays in memory."""
    from optuna.storages.journal import BaseJournalBackend  # noqa: PLC0415 - an extra

    class OperationLog(BaseJournalBackend):
        def __init__(self) -> None:
            self.operations: list[Operation] = list(operations)

        def read_logs(self, log_number_from: int) -> list[Operation]:
            return self.operations[log_number_from:]

        def append_logs(self, logs: list[Operation]) -> None:
            self.operations += logs

    return OperationLog()


def study_storage(log: Any) -> Any:
    """Return the storage of a study that this process alone changes, an `optuna.storages.JournalStorage`.

    A suggestion does not search all trials for an enqueued one, and a sampler sees each trial of the sweep once: with
    successive halving, it would otherwise take a resumed trial for several good configs at the same place.

    Its attribute `compared` has the values that a sampler sees as those of completed trials, by the trials' numbers in the
    sweep, and None for each trial that it does not see.

    Args:
        log: The operations of the study.

    """
    from optuna.storages import JournalStorage  # noqa: PLC0415 - an extra
    from optuna.trial import FrozenTrial, TrialState  # noqa: PLC0415

    class StudyStorage(JournalStorage):
        compared: Compared = MappingProxyType({})
        _may_wait = True  # whether a trial may have been enqueued, which each suggestion checks

        def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
            self._may_wait |= template_trial is not None and template_trial.state == TrialState.WAITING
            return super().create_new_trial(study_id, template_trial)

        def get_all_trials(
            self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
        ) -> list[FrozenTrial]:
            if states != (TrialState.WAITING,):
                trials = _without_earlier(super().get_all_trials(study_id, deepcopy, None if self.compared else states))
                if not self.compared:
                    return trials
                return [trial for trial in _as_compared(trials, self.compared) if states is None or trial.state in states]
            found = super().get_all_trials(study_id, deepcopy, states) if self._may_wait else []
            self._may_wait = bool(found)
            return found

    return StudyStorage(log)


def open_study_storage(storage: StorageLike, name: str) -> "optuna.storages.JournalStorage":
    """Return an Optuna storage with the study "sweep", for optuna-dashboard and Optuna's plots.

    It follows the sweep, and cannot be changed: each write to it raises PermissionError.

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


def _without_earlier(trials: "list[FrozenTrial]") -> "list[FrozenTrial]":
    """Return the newest observation of each trial of the sweep, in the order of their numbers."""
    newest = {trial.user_attrs.get(CONTINUES, trial.number): trial for trial in trials}
    return sorted(newest.values(), key=lambda trial: trial.number)


def _as_compared(trials: "list[FrozenTrial]", compared: Compared) -> "Iterator[FrozenTrial]":
    """Yield the trials as a sampler sees them: those with values to compare as complete with these."""
    from optuna.trial import TrialState  # noqa: PLC0415 - an extra

    for trial in trials:
        number = trial.user_attrs.get("trial")
        if number is None or number not in compared:  # the one that is being suggested has no number yet
            yield trial
        elif (values := compared[number]) is not None:
            seen = copy(trial)
            seen.state, seen.values = TrialState.COMPLETE, values
            yield seen
