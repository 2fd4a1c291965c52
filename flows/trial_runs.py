"""The trials of a sweep in this process: each a flow run below the sweep's, in a thread, with ranks of its own."""

import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefect import flow
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.reporting.decisions import DecisionMaker, DecisionPoints, Verdict
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.prefect_api.client import SubflowClients
from prefect_torch.flows.prefect_api.final_state import call_for_result, completed
from prefect_torch.flows.prefect_api.settings import settings_with, using
from prefect_torch.flows.sweeps.definition import config_of_trial
from prefect_torch.flows.sweeps.history import TrialRecord, TrialState
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from prefect_torch.flows.sweeps.trial_storage import count_reports, end_of_returned, read_end
from prefect_torch.tasks import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from prefect_torch.tasks.gang.gang import ONE_THREAD_PER_RANK
from prefect_torch.tasks.gang.machine.working_dir import pack_directory
from prefect_torch.tasks.gang.termination import TERMINATIONS, Termination
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.function import PackedFunction
from prefect_torch.tasks.training.job import TrainJob
from prefect_torch.tasks.training.publish_backoff import PublishBackoff

from .arguments import machines_for, seat_for
from .leading import lead_training, set_terminated_state
from .monitoring.events.heartbeats import heartbeats
from .monitoring.events.observer import EventObserver
from .monitoring.messages import portable_storage
from .monitoring.pages.machine import GpuMonitor, describe_machine
from .monitoring.pages.observer import PageObserver
from .monitoring.pages.setup import Setup
from .monitoring.sweeps.trial_message import TrialMessageObserver

_SHORT_S = 1.0  # the pages of a shorter trial are written once, at its end


@dataclass(frozen=True, slots=True)
class Training:
    """What all trials of a sweep have in common.

    Attributes:
        pack: Returns the training function with a config.
        storage: The storage of the sweep.
        config: The config that all trials have.
        scaling: The ranks of each trial.
        run_config: How the sweep starts.
        checkpoint: Which checkpoints each trial keeps.
        failure: How often each trial is restarted.

    """

    pack: Callable[[dict[str, Any]], PackedFunction]
    storage: StorageSpec
    config: dict[str, Any]
    scaling: ScalingConfig
    run_config: RunConfig
    checkpoint: CheckpointConfig
    failure: FailureConfig

    def config_of(self, trial: TrialRecord) -> dict[str, Any]:
        """Return the config of a trial's function."""
        return config_of_trial(self.config, trial.config)

    def job_of(self, trial: TrialRecord, decisions: DecisionMaker | None) -> TrainJob:
        """Return the training of a trial."""
        source, directory = trial.source, self.run_config.working_dir
        return TrainJob(
            function=self.pack(self.config_of(trial)),
            storage=self.storage,
            run=trial.run,
            initial_checkpoint=None if source is None else CheckpointRef(self.storage, source.run, source.checkpoint),
            scaling=self.scaling,
            # Only this process starts the sweep's trials, by its claim on the sweep: an earlier one of them is fenced.
            run_config=self.run_config.model_copy(update={"name": trial.run, "resume": "auto", "takeover": True}),
            checkpoint=self.checkpoint,
            failure=self.failure,
            decisions=decisions,
            working_dir=None if directory is None else pack_directory(directory, self.storage.url),
        )


@dataclass(frozen=True, slots=True)
class TrialDecisions:
    """Decides on one trial, by the search.

    Attributes:
        search: The search.
        storage: The storage of the sweep.
        number: The trial's number.

    """

    search: Search
    storage: StorageSpec
    number: int

    def points(self) -> DecisionPoints | None:
        """Return the reports that ask; see `DecisionMaker`."""
        return self.search.points(self.number, lambda: count_reports(self._run()))

    def decide(self, request: DecisionRequest) -> Verdict:
        """Return the search's decision; an error of it ends the sweep, and here the attempt."""
        try:
            verdict = self.search.decide(self.number, request)
        except Exception as exc:
            self.search.give_up(exc)
            raise
        return verdict

    def _run(self) -> Run:
        return Run.open(self.storage, self.search.trials[self.number].run)


class TrialRuns(Protocol):
    """Runs trials wherever they run."""

    def start(self, trial: TrialRecord) -> None:
        """Start the run of a trial, from its latest checkpoint if it has one; returns immediately."""
        ...

    def take_ended(self, timeout_s: float) -> dict[int, TrialEnd | None]:
        """Return how trials have ended, by number; None if a trial was interrupted, and can go on.

        Args:
            timeout_s: How long to wait while none has.

        """
        ...

    def num_running(self) -> int:
        """Return how many trials run."""
        ...

    def running_runs(self) -> frozenset[str]:
        """Return the names of the runs of the trials that run."""
        ...

    def close(self) -> None:
        """Release what trials share, once none runs."""
        ...

    def terminate(self, cause: BaseException) -> None:
        """Let every trial commit a last checkpoint within the grace, and stop; returns immediately."""
        ...


@dataclass(slots=True)
class _Running:
    """A trial in a thread, and what its function returned or raised."""

    trial: TrialRecord
    termination: Termination
    value: Any = None
    error: BaseException | None = None
    has_ended: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Given:
    """What the flow `trial` gets from the thread that calls it: no parameter of a flow run can hold it."""

    job: TrainJob
    running: _Running
    heartbeat_s: float | None
    metrics: list[str]
    state: Callable[[], TrialState]


_given: ContextVar[_Given] = ContextVar("trial")


@flow(
    name="trial",
    task_runner=ONE_THREAD_PER_RANK,
    persist_result=False,
    validate_parameters=False,
    on_crashed=[set_terminated_state],
)
def trial(run: str, config: dict[str, Any]) -> None:  # noqa: ARG001 - Prefect's UI shows the parameter `run`
    """Train one trial of a sweep."""
    given = _given.get()
    job = given.job
    seat, machines = seat_for(job.scaling), machines_for(job.scaling)
    setup = Setup(portable_storage(job.run_config, job.storage), config, describe_machine())
    with heartbeats(given.heartbeat_s):
        pages = PageObserver(job, setup, GpuMonitor(lambda: seat.uuids), backoff=PublishBackoff(delay_s=_SHORT_S))
        told = TrialMessageObserver(given.metrics)
        given.running.value = lead_training(job, seat, machines, given.running.termination, [pages, EventObserver(job), told])
    return completed(told.message(given.state()), None)


class LocalTrials:
    """Runs trials in this process."""

    def __init__(self, training: Training, search: Search) -> None:
        self._training = training
        self._search = search
        self._running: dict[int, _Running] = {}
        self._ended = threading.Condition()
        self._heartbeat_s = get_current_settings().flows.heartbeat_frequency
        self._clients: SubflowClients | None = None

    def start(self, trial: TrialRecord) -> None:
        """Start a trial in a thread of its own; see `TrialRuns`."""
        if self._clients is None:
            self._clients = SubflowClients()
        running = _Running(trial, Termination(self._training.failure.grace_s))
        self._running[trial.number] = running
        threading.Thread(target=copy_context().run, args=(self._run, running), name=trial.run, daemon=True).start()

    def take_ended(self, timeout_s: float) -> dict[int, TrialEnd | None]:
        """Return how trials have ended; see `TrialRuns`."""
        with self._ended:
            self._ended.wait_for(self._done, timeout_s)
            done = self._done()
        for number in done:
            del self._running[number]
        return {number: self._end_of(running) for number, running in done.items()}

    def num_running(self) -> int:
        """Return how many trials run."""
        return len(self._running)

    def running_runs(self) -> frozenset[str]:
        """Return the names of the runs of the trials that run."""
        return frozenset(running.trial.run for running in self._running.values())

    def terminate(self, cause: BaseException) -> None:
        """Stop every trial; see `TrialRuns`."""
        for running in tuple(self._running.values()):
            running.termination.request(cause)

    def close(self) -> None:
        """Close the clients; see `TrialRuns`."""
        if self._clients is not None:
            self._clients.close()
            self._clients = None

    def _done(self) -> dict[int, _Running]:
        return {number: running for number, running in self._running.items() if running.has_ended.is_set()}

    def _run(self, running: _Running) -> None:
        try:
            decisions = TrialDecisions(self._search, self._training.storage, running.trial.number)
            job = self._training.job_of(running.trial, decisions)
            number = running.trial.number
            _given.set(
                _Given(
                    job,
                    running,
                    self._heartbeat_s,
                    self._search.metrics,
                    lambda: self._search.trials[number].state,
                )
            )
            without_heartbeats = settings_with({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
            assert self._clients is not None
            with self._clients.used(), using(without_heartbeats):  # the trial sends its own
                run, config = running.trial.run, self._training.config_of(running.trial)
                # By itself: among the results of the sweep's tries, a trial's would be returned where the sweep raises.
                call_for_result(self._clients.call, trial, run, {"run": run, "config": config})
        except BaseException as exc:  # noqa: BLE001 - a trial's failure costs that trial
            running.error = exc
        with self._ended:
            running.has_ended.set()
            self._ended.notify_all()

    def _end_of(self, running: _Running) -> TrialEnd | None:
        if running.termination.cause is not None or isinstance(running.error, TERMINATIONS):
            return None
        run = Run.open(self._training.storage, running.trial.run)
        end = read_end(run, running.error)
        if end is None and running.error is None:  # its outcome could not be stored, and is known here
            end = end_of_returned(run, running.value)
        return end
