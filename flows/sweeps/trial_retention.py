"""Which trials of a sweep keep their checkpoints: a pure function of its history."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

from prefect_torch.flows.sweeps.journal.history import History, TrialRecord, beats, score_of, scores_in

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


def find_excess(
    history: History, lost: AbstractSet[int], keep: int | None, metrics: Sequence[str], modes: Sequence[str]
) -> Excess:
    """Return the checkpoints to delete so that only the best trials keep theirs, and those only in their present runs.

    Trials that may continue keep their checkpoints, and so do failed ones, which `restart_errored` restarts. A run that another
    trial begins from stays until that trial has reported, and so does that trial's own run before. Only trials that cannot
    continue are compared: others may get worse.

    Args:
        history: The trials.
        lost: The paused trials that are never resumed.
        keep: How many trials keep their checkpoints, None for all; of several metrics, also all that no other trial beats.
        metrics: The metrics by which trials are compared.
        modes: The mode of each metric, "min" or "max".

    """
    over = [trial for trial in history.values() if trial.source is None and (trial.state in _ENDED or trial.number in lost)]
    fronts = _fronts(over, metrics, modes) if len(metrics) > 1 else {}
    most = len(over) if keep is None else max(keep, sum(front == 0 for front in fronts.values()))
    over.sort(key=lambda trial: (fronts.get(trial.number, 0), *_key(trial, metrics[0], modes[0])))
    needed = {trial.source.run for trial in history.values() if trial.source is not None}
    needed |= {trial.former.run for trial in history.values() if trial.former is not None}
    excess = [(trial.number, trial.run) for trial in over[most:]]
    left = [(trial.number, run) for trial in history.values() for run in trial.earlier_runs]
    return Excess(
        tuple(trial.number for trial in over[most:] if trial.state == "paused"),
        tuple(it for it in (*excess, *left) if it[1] not in needed and it[1] not in history[it[0]].deleted_runs),
    )


def _fronts(trials: Sequence[TrialRecord], metrics: Sequence[str], modes: Sequence[str]) -> dict[int, float]:
    """Return the front of each trial: 0 if no other one beats it, 1 if only some in front 0 do, and so on.

    A trial without a score for each metric is in an infinite one.
    """
    numbers = {trial.number: math.inf for trial in trials}
    known = ((scores_in(it.metrics, it.state, metrics, modes), it.number) for it in trials)
    fronts: list[list[list[float]]] = []
    # One that beats another precedes it. One that a front beats is beaten by each front before, too.
    for scores, number in sorted((scores, number) for scores, number in known if scores is not None):
        front = bisect_left(fronts, True, key=partial(_is_not_beaten, scores))
        if front == len(fronts):
            fronts.append([])
        fronts[front].append(scores)
        numbers[number] = front
    return numbers


def _is_not_beaten(scores: Sequence[float], front: Sequence[Sequence[float]]) -> bool:
    """Return whether none of a front beats the trial with `scores`, which follows them in the order of scores."""
    last = front[-1:] if len(scores) == 2 else front  # noqa: PLR2004 - of two metrics, the last has the best second one
    return not any(beats(better, scores) for better in last)


def _key(trial: TrialRecord, metric: str, mode: str) -> tuple[bool, float, int]:
    score = score_of(trial, metric, mode)
    return (score is None, score or 0.0, trial.number)
