"""Optuna's pruners, which stop a trial early."""

import logging
import math

from prefect_torch.flows.sweeps.search_config import Mode

from .samplers import imported


class OptunaPruning:
    """An Optuna pruner, with a study of its own that has the reports of every trial.

    The study has the metric's own mode and values, though a lower value is better for a scheduler: the bounds of Optuna's
    ThresholdPruner, "a minimum value which determines whether pruner prunes or not", are those of the metric, and a pruner may
    read `study.direction`.

    Args:
        name: "module:function", which returns the pruner.
        mode: Whether a low ("min") or a high ("max") value of the metric is good.

    Raises:
        ValueError: If there is no such function, or it returns something else.

    """

    def __init__(self, name: str, mode: Mode) -> None:
        import optuna  # noqa: PLC0415 - an extra

        self._states = {
            "completed": optuna.trial.TrialState.COMPLETE,
            "stopped": optuna.trial.TrialState.PRUNED,
            "failed": optuna.trial.TrialState.FAIL,
        }
        pruner = imported("pruner", name)()
        if not isinstance(pruner, optuna.pruners.BasePruner):
            raise ValueError(f"pruner={name!r} returned a {type(pruner).__name__}: return an Optuna pruner")  # noqa: TRY004 - one error
        logging.getLogger("optuna.storages._in_memory").setLevel(logging.WARNING)  # it logs each study that it creates
        # A fixed name: HyperbandPruner chooses a trial's bracket by it, and Optuna's generated one would differ after a kill.
        self._study = optuna.create_study(
            pruner=pruner, study_name="sweep", direction="minimize" if mode == "min" else "maximize"
        )
        self._sign = 1 if mode == "min" else -1
        self._trials: list[optuna.trial.Trial] = []
        self._last: dict[int, float] = {}

    def report(self, number: int, step: int, value: float) -> bool:
        """Add a report of a trial, whose lower `value` is better, and return whether the trial is to stop."""
        # Pruners that choose by a trial's number see that of the sweep, whoever reports first.
        while len(self._trials) <= number:
            self._trials.append(self._study.ask())
        self._last[number] = value * self._sign
        self._trials[number].report(self._last[number], step)
        return self._trials[number].should_prune()

    def end(self, number: int, state: str) -> None:
        """Record that a trial has come to an end, after which it has no more reports."""
        if number not in self._last:
            return
        last = self._last[number]
        is_complete = state == "completed" and not math.isnan(last)
        final = self._states[state] if state != "completed" or is_complete else self._states["failed"]
        self._study.tell(self._trials[number], last if is_complete else None, final)
