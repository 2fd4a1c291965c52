"""Which trials of a sweep keep their checkpoints: a pure function of its history."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from prefect_torch.flows.sweeps.journal.history import History, TrialRecord, score_of

_ENDED = ("completed", "stopped")


@dataclass(frozen=True, slots=True)
class Excess:
    """The checkpoints that are not among those of the best trials.

    Attributes:
        stopped: The paused trials that must be recorded as stopped first, since they cannot go on without a checkpoint.
        runs: The runs whose checkpoints are deleted, each with the number of its trial.

    """

    stopped: tuple[int, ...] = ()
    runs: tuple[tuple[int, str], ...] = ()


def find_excess(history: History, lost: AbstractSet[int], keep: int, metric: str, mode: str) -> Excess:
    """Return the checkpoints to delete so that only the best trials keep theirs.

    Trials that may continue keep their checkpoints, and so do failed ones, which `restart_errored` restarts. A run that another
    trial begins from stays until that trial has reported, and so does that trial's own run before. Only trials that cannot
    continue are compared: others may get worse.

    Args:
        history: The trials.
        lost: The paused trials that are never resumed.
        keep: How many trials keep their checkpoints.
        metric: The metric by which trials are compared.
        mode: "min" or "max".

    """
    over = [trial for trial in history.values() if trial.source is None and (trial.state in _ENDED or trial.number in lost)]
    over.sort(key=lambda trial: _key(trial, metric, mode))
    needed = {trial.source.run for trial in history.values() if trial.source is not None}
    needed |= {trial.former.run for trial in history.values() if trial.former is not None}
    excess = [(trial.number, trial.run) for trial in over[keep:]]
    left = [(trial.number, run) for trial in history.values() for run in trial.earlier_runs]
    return Excess(
        tuple(trial.number for trial in over[keep:] if trial.state == "paused"),
        tuple(it for it in (*excess, *left) if it[1] not in needed and it[1] not in history[it[0]].deleted_runs),
    )


def _key(trial: TrialRecord, metric: str, mode: str) -> tuple[bool, float, int]:
    score = score_of(trial, metric, mode)
    return (score is None, score or 0.0, trial.number)
