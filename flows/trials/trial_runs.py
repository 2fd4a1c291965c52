"""The common parts of trials' runs, wherever they run: their training, their decisions, and the interface to the sweep."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefect_torch.ckpt import CheckpointStore, StorageSpec
from prefect_torch.ckpt.reporting.decisions import TRAINING_ITERATION, DecisionMaker, DecisionPoints, Verdict
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.sweeps.definition import config_of_trial
from prefect_torch.flows.sweeps.failures import SweepFailedError
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from prefect_torch.flows.sweeps.trial_storage import count_reports
from prefect_torch.tasks import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from prefect_torch.tasks.gang.gpus.listing import Gpu
from prefect_torch.tasks.gang.machine.working_dir import WorkingDirectory
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.tracebacks import first_line
from prefect_torch.tasks.rank.user_code.function import PackedFunction
from prefect_torch.tasks.run_logs import get_run_logger
from prefect_torch.tasks.training.job import TrainJob


@dataclass(frozen=True, slots=True)
class Training:
    """The training that all trials of a sweep share.

    Attributes:
        pack: Returns the training function with a config.
        storage: The storage of the sweep.
        config: The config that all trials have.
        scaling: The ranks of each trial.
        run_config: How the sweep starts.
        checkpoint: Which checkpoints each trial keeps.
        failure: How often each trial is restarted.
        working_dir: The directory whose copy the ranks of every trial run in; None for the sweep's own.
        gpus: The GPUs of this machine, if it trains on them.
        ranks_at_once: How many ranks of all trials compute on the CPUs of one machine at a time, if more than those of one.

    """

    pack: Callable[[dict[str, Any]], PackedFunction]
    storage: StorageSpec
    config: dict[str, Any]
    scaling: ScalingConfig
    run_config: RunConfig
    checkpoint: CheckpointConfig
    failure: FailureConfig
    working_dir: WorkingDirectory | None = None
    gpus: list[Gpu] = field(default_factory=list)
    ranks_at_once: int = 1

    def config_of(self, trial: TrialRecord) -> dict[str, Any]:
        """Return the config of a trial's function."""
        return config_of_trial(self.config, trial.config)

    def job_of(self, trial: TrialRecord, run: CheckpointStore, decisions: DecisionMaker | None) -> TrainJob:
        """Return the training of a trial in a run."""
        source = trial.source
        return TrainJob(
            function=self.pack(self.config_of(trial)),
            store=run,
            initial_checkpoint=None if source is None else CheckpointRef(self.storage, source.run, source.checkpoint),
            scaling=self.scaling,
            # Only this process starts the sweep's trials, by its claim on the sweep: an earlier attempt is fenced.
            run_config=self.run_config.model_copy(update={"name": trial.run, "resume": "auto", "takeover": True}),
            checkpoint=self.checkpoint,
            failure=self.failure,
            decisions=decisions,
            working_dir=self.working_dir,
            ranks_at_once=self.ranks_at_once,
        )


@dataclass(frozen=True, slots=True)
class TrialDecisions:
    """Decides on one trial in one of its runs, by the search; a run in which the trial does not go on ends at its next report.

    Attributes:
        search: The search.
        sweep: The sweep.
        number: The trial's number.
        run: The name of the run.

    """

    search: Search
    sweep: Run
    number: int
    run: str

    def points(self) -> DecisionPoints | None:
        """Return the reports that need a decision; see `DecisionMaker`."""
        if not self._goes_on:
            return DecisionPoints(TRAINING_ITERATION, 0, asks_always=True)
        return self.search.points(self.number, lambda: count_reports(self.sweep.beside(self.run)))

    def decide(self, request: DecisionRequest) -> Verdict:
        """Return the search's decision; its error ends the sweep, and this attempt."""
        if not self._goes_on:
            return Verdict(goes_on=False)
        try:
            verdict = self.search.decide(self.number, request)
        except Exception as exc:
            self.search.give_up(exc)
            raise
        return verdict

    @property
    def _goes_on(self) -> bool:
        """Whether the trial is to train in this run: it may have been stopped, or have gone on in another run."""
        trial = self.search.trials[self.number]
        return trial.state == "running" and trial.run == self.run


class TrialRuns(Protocol):
    """Runs trials wherever they run."""

    def start(self, trial: TrialRecord) -> None:
        """Start the run of a trial, from its latest checkpoint if it has one; returns immediately."""
        ...

    def take_ended(self, timeout_s: float) -> dict[int, TrialEnd | None]:
        """Return how trials have ended, by number; None if one goes on, unless the search has stopped it.

        Args:
            timeout_s: How long to wait while none has ended.

        Raises:
            Exception: If Prefect's API refuses the flow run of a trial.

        """
        ...

    def num_running(self) -> int:
        """Return how many trials run."""
        ...

    def running_runs(self) -> frozenset[str]:
        """Return the names of the runs of the trials that run."""
        ...

    def close(self) -> None:
        """Release the resources that trials share, once none runs."""
        ...

    def terminate(self, cause: BaseException) -> None:
        """Let every trial commit a last checkpoint within the grace, and stop; returns immediately."""
        ...


def warn_of_outage(trial: TrialRecord, error: Exception) -> None:
    """Log that a trial does not start yet."""
    get_run_logger().warning("trial %d waits for Prefect's API, which is away: %s", trial.number, first_line(error))


def no_flow_run(trial: TrialRecord, error: Exception) -> SweepFailedError:
    """Return the error of a sweep for whose trial Prefect's API refuses a flow run: all later trials would fail, too."""
    return SweepFailedError(
        f"trial {trial.number} has no flow run, since Prefect's API refuses it: {first_line(error)}; "
        "the sweep goes on when it is started again with its name"
    )
