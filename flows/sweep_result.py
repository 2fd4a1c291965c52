"""The result of a sweep, read from its storage: while it runs, when it has ended, and when it has failed."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prefect_torch.ckpt import Checkpoint
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.history import newest_of_each, read_history
from prefect_torch.ckpt.runs.metrics import Metrics, flatten_metrics
from prefect_torch.ckpt.runs.records.small_records import left_out_if_newer
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.opening import StorageLike
from prefect_torch.flows.monitoring.sweeps.notebook import sweep_html
from prefect_torch.flows.monitoring.sweeps.parameters import parameters_of
from prefect_torch.flows.monitoring.sweeps.view import SeenTrial
from prefect_torch.flows.sweeps.definition import Definition, config_of_trial, require_definition
from prefect_torch.flows.sweeps.journal.history import History, TrialRecord, TrialState, beats, score_in, scores_in, value_in
from prefect_torch.flows.sweeps.journal.stored_trials import read_known_trials, read_trials

from .result import Result
from .result_attributes import data_frame, hinting, hints_of_rays

if TYPE_CHECKING:
    import pandas as pd

_logger = logging.getLogger(__name__)
_BEST = "write best, or get_best_trial(metric, mode), a trial with its config, metrics and checkpoint"
_INSTEAD_OF = {  # attributes of Ray's ResultGrid and ExperimentAnalysis
    **dict.fromkeys(("get_best_result", "best_result", "best_trial", "best_config"), _BEST),
    "best_checkpoint": "write best.result.get_best_checkpoint(metric, mode); best.checkpoint is the latest",
    **dict.fromkeys(("get_dataframe", "dataframe", "results_df"), "write trials_dataframe"),
    **dict.fromkeys(("results", "get_all_configs"), "write trials"),
    "num_errors": "write len(errors)",
    "num_terminated": "count the trials by their state",
    "experiment_path": "write path",
}
_OF_RAYS_TRIALS = {"last_result": "metrics", "evaluated_params": "config", "status": "state", "trial_id": "number"}
_OF_RAYS_TRIALS |= dict.fromkeys(("logdir", "local_path"), "result.path")


def _hint_for_trial(name: str) -> str:
    """Return where a trial has an attribute of its result, or of Ray's trials."""
    at = f"result.{name}" if not name.startswith("_") and hasattr(Result, name) else _OF_RAYS_TRIALS.get(name)
    return "" if at is None else f": write trial.{at}"


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial of a sweep.

    Attributes:
        number: Its number, from 0.
        config: The config of its function, including the config that all trials share.
        metrics: The newest value of each metric that it reported.
        state: "completed", "stopped" (by the scheduler), "paused", "running" or "failed".
        reason: Why it was stopped or paused, or completed before its function returned, or its error; None otherwise.
        run: The name of its run, in the sweep's storage.
        storage: The sweep's storage.

    """

    number: int
    config: dict[str, Any]
    metrics: Metrics
    state: TrialState
    reason: str | None
    run: str
    storage: StorageLike = field(repr=False, compare=False)

    @property
    def result(self) -> Result:
        """The result of its training; costs some requests each time.

        Raises:
            FileNotFoundError: If no attempt of it has begun.

        """
        return Result.from_storage(self.storage, self.run)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Its latest checkpoint; None without checkpoints. Costs some requests each time."""
        try:
            return self.result.checkpoint
        except FileNotFoundError:
            return None

    if not TYPE_CHECKING:
        __getattr__ = hinting(_hint_for_trial)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The outcome of a sweep.

    Attributes:
        name: The sweep's name.
        path: Its local path or URL.
        trials: Its trials, by number.
        metrics: The optimized metrics.
        modes: Whether a low ("min") or a high ("max") value of each is good.

    """

    name: str
    path: str
    trials: list[Trial]
    metrics: list[str]
    modes: list[str]

    @property
    def best(self) -> Trial:
        """The best trial by the first metric, among those that have not failed; of equal ones the first.

        Raises:
            ValueError: If none has that metric as a number.

        """
        return self.get_best_trial(self.metrics[0], self.modes[0])

    def __len__(self) -> int:
        """Return the number of trials."""
        return len(self.trials)

    def __iter__(self) -> Iterator[Trial]:
        """Iterate over the trials, by number."""
        return iter(self.trials)

    def __getitem__(self, index: int) -> Trial:
        """Return a trial by its place in `trials`."""
        return self.trials[index]

    def __bool__(self) -> bool:
        """Return True, also without a trial."""
        return True

    def get_best_trial(self, metric: str, mode: str) -> Trial:
        """Return the best trial by any metric.

        Args:
            metric: Its name, or an "a/b" path into nested metrics.
            mode: "min" or "max".

        Raises:
            ValueError: If no trial has that metric as a number, or `mode` is neither.

        """
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}: give 'min' or 'max'")
        scores = [score_in(trial.metrics, trial.state, metric, mode) for trial in self.trials]
        scored = [(score, trial) for score, trial in zip(scores, self.trials, strict=True) if score is not None]
        if not scored:
            raise ValueError(f"no trial of sweep {self.name!r} has a metric {metric!r} that is a number")
        return min(scored, key=lambda it: it[0])[1]

    @property
    def best_trials(self) -> list[Trial]:
        """The trials that no other one beats in all metrics, by number; of a single metric, the best ones."""
        scored = [(scores, trial) for trial in self.trials if (scores := self._scores(trial)) is not None]
        return [trial for scores, trial in scored if not any(beats(other, scores) for other, _ in scored)]

    @property
    def errors(self) -> dict[int, str]:
        """The error of each failed trial, by number."""
        return {trial.number: trial.reason or "" for trial in self.trials if trial.state == "failed"}

    @property
    def trials_dataframe(self) -> "pd.DataFrame":
        """The trials as a pandas DataFrame, with a row per trial.

        It has its config as "config/a/b", its metrics as "a/b", and number, state, reason and run where no metric has that
        name.

        Raises:
            ImportError: If pandas is not installed.

        """
        return data_frame([_row(trial) for trial in self.trials], "trials_dataframe", "trials")

    if not TYPE_CHECKING:
        __getattr__ = hinting(hints_of_rays(_INSTEAD_OF))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the parameters in a picture, the best trials, and the line that loads a checkpoint."""
        metric, mode = self.metrics[0], self.modes[0]
        return sweep_html(self.path, metric, mode, [_seen(trial, metric) for trial in self.trials])

    @classmethod
    def from_storage(cls, storage: StorageLike, name: str, *, partial: bool = False) -> "SweepResult":
        """Read the result of a sweep that has ended, has failed or still runs; costs a few reads, and more for running trials.

        Args:
            storage: A local path, a URL, "block-type-slug/block-name", or a block.
            name: The sweep's name.
            partial: Whether to return what is known of a sweep whose journal is damaged, with a warning in the log.

        Raises:
            FileNotFoundError: If there is no such sweep.
            MalformedRecordError: If its definition cannot be read.
            JournalDamagedError: If its journal is damaged, unless `partial`.

        """
        run = Run.open(storage, name)
        definition = require_definition(run)
        trials, lost = _read(run, partial=partial)
        if _lacks_ends(run, trials):
            trials, lost = _read(run, partial=partial)  # it may have completed since its journal was read
            _warn_of_lost_ends(run, trials)
        if lost is not None:
            _logger.warning("%s", lost)
        return cls.of(run, definition, trials)

    @classmethod
    def of(cls, run: Run, definition: Definition, history: History) -> "SweepResult":
        """Return the result of a sweep with this history.

        Args:
            run: The sweep.
            definition: Its definition.
            history: Its trials.

        """
        trials = [_trial(run, definition, history[number]) for number in sorted(history)]
        return cls(run.name, run.path, trials, definition.metrics, definition.modes)

    def _scores(self, trial: Trial) -> list[float] | None:
        return scores_in(trial.metrics, trial.state, self.metrics, self.modes)


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "state": trial.state,
        "reason": trial.reason,
        "run": trial.run,
        **dict(flatten_metrics(trial.config, "config/")),
        **dict(flatten_metrics(trial.metrics)),
    }


def _seen(trial: Trial, metric: str) -> SeenTrial:
    value = value_in(trial.metrics, trial.state, metric)
    parameters = parameters_of(trial.config)
    return SeenTrial(trial.number, trial.run, trial.state, trial.reason, parameters, trial.metrics, value)


def _read(run: Run, *, partial: bool) -> tuple[History, str | None]:
    return read_known_trials(run) if partial else (read_trials(run), None)


def _lacks_ends(run: Run, trials: History) -> bool:
    """Return whether the sweep has completed while one of `trials` is running; costs no request if none is."""
    is_going_on = any(trial.state == "running" for trial in trials.values())
    status = left_out_if_newer(lambda: read_status(run)) if is_going_on else None
    return status is not None and status.is_completed


def _warn_of_lost_ends(run: Run, trials: History) -> None:
    """Warn of a trial that is running in the journal of a sweep that has completed."""
    running = next((number for number, trial in trials.items() if trial.state == "running"), None)
    if running is not None:
        _logger.warning(
            "sweep %r has completed, but trial %d is running in its journal, whose last entries are lost, as after a "
            "restore of an older backup; start the sweep again as before, which records how its trials have ended",
            run.name,
            running,
        )


def _trial(run: Run, definition: Definition, record: TrialRecord) -> Trial:
    newest = newest_of_each(read_history(run.beside(record.run))) if record.state == "running" else {}
    trained = record.as_trained(has_metrics=bool(newest))
    config = config_of_trial(definition.config if trained.common is None else trained.common, trained.config)
    return Trial(trained.number, config, newest or trained.metrics, trained.state, trained.reason, trained.run, run.spec)
