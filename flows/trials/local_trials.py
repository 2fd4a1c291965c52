"""The trials of a sweep in this process: each a flow run below the sweep's, in a thread, with ranks of its own."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows.arguments import gpus_for, machines_for
from prefect_torch.flows.calls.log_filter import shorten_logs
from prefect_torch.flows.leading import lead_training, set_terminated_state
from prefect_torch.flows.monitoring.events.heartbeats import heartbeats
from prefect_torch.flows.monitoring.events.observer import EventObserver
from prefect_torch.flows.monitoring.messages import portable_storage
from prefect_torch.flows.monitoring.pages.machine import GpuMonitor, describe_machine
from prefect_torch.flows.monitoring.pages.observer import PageObserver
from prefect_torch.flows.monitoring.pages.setup import Setup
from prefect_torch.flows.monitoring.parameters import as_shown
from prefect_torch.flows.monitoring.sweeps.trial_message import TrialMessageObserver
from prefect_torch.flows.sweeps.journal.history import TrialRecord, TrialState
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from prefect_torch.flows.sweeps.trial_storage import end_of, end_of_error, end_of_returned, status_of_start
from prefect_torch.tasks.gang.gang import ONE_THREAD_PER_RANK
from prefect_torch.tasks.gang.gpus.listing import Gpu
from prefect_torch.tasks.gang.termination import TERMINATIONS, CancelledInPrefect, Termination
from prefect_torch.tasks.prefect_api.client import SubflowClients
from prefect_torch.tasks.prefect_api.final_state import call_for_result, completed
from prefect_torch.tasks.prefect_api.outage import is_outage
from prefect_torch.tasks.prefect_api.paging import read_pages
from prefect_torch.tasks.prefect_api.settings import settings_with, using
from prefect_torch.tasks.training.backoff import Backoff
from prefect_torch.tasks.training.job import TrainJob

from .trial_runs import Training, TrialDecisions, no_flow_run, warn_of_outage

_SHORT_S = 1.0  # the pages of a shorter trial are written once, at its end


@dataclass(slots=True)
class _Running:
    """A trial in a thread, and what its function returned or raised.

    Attributes:
        trial: The trial.
        termination: Whether it is being terminated.
        earlier: The trial before its pause, where that has not ended yet: its ranks are winding down.
        is_requested: Whether Prefect's API has been asked for its flow run.
        flow_run_id: Its flow run; None while there is none.
        is_cancelled: Whether its flow run is cancelled, and not the sweep's.
        value: What its function returned.
        error: What its flow run raised.
        has_ended: Whether the thread is done.

    """

    trial: TrialRecord
    termination: Termination
    earlier: "_Running | None" = None
    is_requested: bool = False
    flow_run_id: str | None = None
    is_cancelled: bool = False
    value: Any = None
    error: BaseException | None = None
    has_ended: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments of the flow `trial` that no parameter of a flow run can hold, from the thread that calls it."""

    job: TrainJob
    running: _Running
    gpus: list[Gpu]
    heartbeat_s: float | None
    metrics: list[str]
    state: Callable[[], TrialState]


_given: ContextVar[_Given] = ContextVar("trial")


@flow(
    name="trial",
    task_runner=ONE_THREAD_PER_RANK,
    persist_result=False,
    validate_parameters=False,
    retries=0,  # FailureConfig and the sweep decide on restarts, not PREFECT_FLOWS_DEFAULT_RETRIES
    on_crashed=[set_terminated_state],
)
def trial(run: str, config: dict[str, Any]) -> None:  # noqa: ARG001 - Prefect's UI shows the parameter `run`
    """Train one trial of a sweep."""
    shorten_logs()
    given = _given.get()
    given.running.flow_run_id = flow_run.id
    job = given.job
    gpus, machines = gpus_for(job.scaling, given.gpus), machines_for(job.scaling)
    setup = Setup(portable_storage(job.run_config, job.storage), config, describe_machine())
    with heartbeats(given.heartbeat_s):
        pages = PageObserver(job, setup, GpuMonitor(lambda: gpus.uuids), backoff=Backoff(delay_s=_SHORT_S))
        last = TrialMessageObserver(given.metrics)
        given.running.value = lead_training(job, gpus, machines, given.running.termination, [pages, EventObserver(job), last])
    return completed(last.message(given.state(), given.running.value), None)


class LocalTrials:
    """Runs trials in this process, over the connections of the sweep to its storage.

    Args:
        training: What all trials have in common.
        search: The search.
        sweep: The sweep.

    """

    def __init__(self, training: Training, search: Search, sweep: CheckpointStore) -> None:
        self._training = training
        self._search = search
        self._sweep = sweep
        self._running: dict[int, _Running] = {}
        self._ended = threading.Condition()
        self._heartbeat_s = get_current_settings().flows.heartbeat_frequency
        self._clients: SubflowClients | None = None

    def start(self, trial: TrialRecord) -> None:
        """Start a trial in a thread of its own; see `TrialRuns`."""
        if self._clients is None:
            self._clients = SubflowClients()
        running = _Running(trial, Termination(self._training.failure.grace_s), self._running.get(trial.number))
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
        return frozenset(running.trial.run for running in self._threads())

    def terminate(self, cause: BaseException) -> None:
        """Stop every trial; see `TrialRuns`."""
        for running in self._threads():
            running.termination.request(cause)

    def terminate_cancelled(self) -> None:
        """Stop the trials whose flow runs are cancelled in Prefect, as no worker does; one request while any runs."""
        led = {UUID(it.flow_run_id): it for it in self._threads() if it.flow_run_id is not None}
        if not led:
            return
        cancelled = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLING, StateType.CANCELLED]))
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=list(led)), state=cancelled)
        with get_client(sync_client=True) as client:
            found = list(read_pages(client.read_flow_runs, flow_run_filter=wanted))
        for one in found:
            led[one.id].is_cancelled = True
            led[one.id].termination.request(CancelledInPrefect())

    def close(self) -> None:
        """Close the clients; see `TrialRuns`."""
        if self._clients is not None:
            self._clients.close()
            self._clients = None

    def _threads(self) -> Iterator[_Running]:
        for running in tuple(self._running.values()):
            one: _Running | None = running
            while one is not None:
                yield one
                one = one.earlier

    def _done(self) -> dict[int, _Running]:
        return {number: running for number, running in self._running.items() if running.has_ended.is_set()}

    def _run(self, running: _Running) -> None:
        try:
            if running.earlier is not None:
                running.earlier.has_ended.wait()
                running.earlier = None
            running.termination.raise_if_requested()
            self._train(running)
        except BaseException as exc:  # noqa: BLE001 - any failure ends only its trial
            running.error = exc
        with self._ended:
            running.has_ended.set()
            self._ended.notify_all()

    def _train(self, running: _Running) -> None:
        number, run, config = running.trial.number, running.trial.run, self._training.config_of(running.trial)
        decisions = TrialDecisions(self._search, self._sweep, number, run)
        job = self._training.job_of(running.trial, self._sweep.beside(run), decisions)
        gpus, metrics = self._training.gpus, self._search.metrics
        _given.set(_Given(job, running, gpus, self._heartbeat_s, metrics, lambda: self._search.trials[number].state))
        without_heartbeats = settings_with({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
        assert self._clients is not None
        running.is_requested = True
        call, key = self._clients.call, secrets.token_hex(16)  # one key, so that a lost answer starts no second flow run
        with self._clients.used(), using(without_heartbeats):  # the trial sends its own
            # With results of its own: else a trial's result could be returned as the sweep's where the sweep raises.
            parameters = {"run": run, "config": as_shown(config)}
            _call_once_api_answers(running, lambda: call_for_result(call, trial, run, parameters, key))

    def _end_of(self, running: _Running) -> TrialEnd | None:
        is_interrupted = running.termination.cause is not None or isinstance(running.error, TERMINATIONS)
        if is_interrupted and not running.is_cancelled:
            return None
        if running.is_requested and running.flow_run_id is None and isinstance(running.error, Exception):
            raise no_flow_run(running.trial, running.error) from running.error
        run = self._sweep.beside(running.trial.run)
        status = status_of_start(run, running.flow_run_id)
        if status is not None and status.outcome is not None:
            return end_of(run, status.outcome)
        # Its outcome could not be stored, and is known here; or it has not trained.
        return end_of_returned(run, running.value) if running.error is None else end_of_error(run, running.error)


def _call_once_api_answers(running: _Running, call: Callable[[], object]) -> None:
    """Call the flow of a trial, and again after pauses up to 30 s while Prefect's API is unavailable for a new flow run.

    Once it has a flow run, the trial outlasts an outage.
    """
    pauses = Backoff()
    while True:
        try:
            call()
        except Exception as exc:
            if running.flow_run_id is not None or not is_outage(exc):
                raise
            pauses.record()
            warn_of_outage(running.trial, exc)
        else:
            return
        running.termination.sleep(pauses.wait_s())
