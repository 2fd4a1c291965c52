"""The storage of a sweep's study, in which samplers see each trial once, and with rungs only comparable trials."""

from collections.abc import Container, Iterable
from copy import copy
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
CONTINUES = "continues"  # the attribute of a newer observation of a trial: the trial's number
_FOR_A_MODEL = 10  # trials; as many suggestions of tpe and gp are random before they fit one


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


def study_storage(log: Any, *, by_rung: bool) -> "optuna.storages.JournalStorage":
    """Return the storage of a study that this process alone changes.

    A suggestion does not search all trials for an enqueued one, and a sampler sees each trial of the sweep once: with
    successive halving, it would otherwise take a resumed trial for several good configs at the same place.

    Args:
        log: The operations of the study.
        by_rung: Whether a sampler sees the trials at one rung.

    """
    from optuna.storages import JournalStorage  # noqa: PLC0415 - an extra
    from optuna.trial import FrozenTrial, TrialState  # noqa: PLC0415

    class StudyStorage(JournalStorage):
        _may_wait = True  # whether a trial may have been enqueued, which each suggestion checks

        def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
            self._may_wait |= template_trial is not None and template_trial.state == TrialState.WAITING
            return super().create_new_trial(study_id, template_trial)

        def get_all_trials(
            self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
        ) -> list[FrozenTrial]:
            if states != (TrialState.WAITING,):
                trials = _without_earlier(super().get_all_trials(study_id, deepcopy, None if by_rung else states))
                if not by_rung:
                    return trials
                return [trial for trial in _at_one_rung(trials) if states is None or trial.state in states]
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


def _at_one_rung(trials: "list[FrozenTrial]") -> "list[FrozenTrial]":
    """Return the trials to fit a model to: those at the highest rung that enough have reached, as complete there.

    S. Falkner et al., BOHB: Robust and Efficient Hyperparameter Optimization at Scale, ICML 2018, section 3.2. Values at
    different rungs do not compare: the early ones show which config is fast. Trials that have not ended yet or have failed
    are returned unchanged, and so are all trials while no rung has enough.
    """
    from optuna.trial import TrialState  # noqa: PLC0415 - an extra

    farthest = sorted((max(trial.intermediate_values) for trial in trials if _has_rungs(trial)), reverse=True)
    if len(farthest) < _FOR_A_MODEL:
        return trials
    rung, seen = farthest[_FOR_A_MODEL - 1], []
    for trial in trials:
        if not _has_rungs(trial):
            seen.append(trial)
            continue
        at = min((step for step in trial.intermediate_values if step >= rung), default=None)
        if at is not None:
            there = copy(trial)
            there.state, there.values = TrialState.COMPLETE, [trial.intermediate_values[at]]
            seen.append(there)
        elif trial.state == TrialState.COMPLETE:  # its function returned before
            seen.append(trial)
    return seen


def _has_rungs(trial: "FrozenTrial") -> bool:
    return trial.state.name in ("COMPLETE", "PRUNED") and bool(trial.intermediate_values)
