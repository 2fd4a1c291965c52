"""The trials of a sweep as flow runs of a deployment, on the machines of its work pool."""

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast
from uuid import UUID

import httpx
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect_torch.ckpt import FencedError, StorageError, StorageSpec
from prefect_torch.ckpt.reporting.decisions import DecisionMaker
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus
from prefect_torch.ckpt.runs.history import newest_of_each, read_history
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.calls.parameters import large_parameters_explained
from prefect_torch.flows.monitoring.messages import portable_storage, tag_of
from prefect_torch.flows.sweeps.asked_decisions import answer_questions, forget_questions
from prefect_torch.flows.sweeps.domains import as_stored
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.space import is_same
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from prefect_torch.flows.sweeps.trial_storage import end_of, status_of_start
from prefect_torch.tasks import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from prefect_torch.tasks.options.config import UNLIMITED
from prefect_torch.tasks.prefect_api.deployments import read_deployment
from prefect_torch.tasks.prefect_api.outage import is_outage
from prefect_torch.tasks.prefect_api.settings import without_retries
from prefect_torch.tasks.run_logs import get_run_logger
from prefect_torch.tasks.training.backoff import Backoff
from prefect_torch.tasks.training.restarts import committed_attempts
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from .trial_flow_runs import FlowRunWatch, cancel, find_alive, has_ended, is_ending
from .trial_runs import Training, TrialDecisions, no_flow_run, warn_of_outage

_Budget: TypeAlias = Literal["max_preemptions", "max_infrastructure_failures"]
_FLOW = "train"
_CONFIGS: dict[str, type[BaseModel]] = {
    "scaling": ScalingConfig,
    "run": RunConfig,
    "checkpoint": CheckpointConfig,
    "failure": FailureConfig,
}
_PAUSE_S = 0.5
_CANCEL_S = 60.0


def check_deployment(name: str, run_config: RunConfig, storage: StorageSpec) -> None:
    """Raise unless trials can be flow runs of a deployment; one request.

    Raises:
        ValueError: If there is no such deployment, it is of another flow, or its machines would not have the storage.

    """
    if name.partition("/")[0] != _FLOW or not name.partition("/")[2]:
        raise ValueError(f"trials_on={name!r}: give a deployment of the flow {_FLOW!r}, such as '{_FLOW}/gpu'")
    if run_config.sync is not None or storage.url.startswith("memory:"):
        raise ValueError(f"trials_on={name!r} needs a storage that all machines reach themselves, not {storage.url}")
    given = run_config.storage
    if isinstance(given, Block) and given._block_document_name is None:  # noqa: SLF001 - Prefect has no public name for it
        raise ValueError(f"trials_on={name!r}: the storage is an unsaved block, and trials need its name: save it first")
    with get_client(sync_client=True) as client:
        try:
            read_deployment(client, name)
        except ObjectNotFound as exc:
            raise ValueError(f"trials_on={name!r}: {exc}") from None


@dataclass(frozen=True, slots=True)
class _Start:
    """A flow run that is to be created, as soon as Prefect's API answers.

    Attributes:
        trial: The trial.
        key: The idempotency key of the request, which is repeated if its answer is lost.

    """

    trial: TrialRecord
    key: str


class DeployedTrials:
    """Runs each trial as a flow run of a deployment of the flow `train`, which requests decisions from this process.

    A flow run that an earlier process of the sweep has started, and that has not ended, is taken over if a new one would be the
    same. If its deployment or a parameter differs, it is cancelled, and a new one continues the trial.

    Args:
        training: What all trials have in common.
        search: The search.
        sweep: The sweep.
        check_lead: Raises FencedError if another process leads the sweep by now.
        deployment: The deployment's name, "train/name".
        function: The location of the training function, which the deployment's machines have.

    """

    def __init__(
        self, training: Training, search: Search, sweep: Run, check_lead: Callable[[], None], deployment: str, function: str
    ) -> None:
        self._training = training
        self._check_lead = check_lead
        self._search = search
        self._sweep = sweep
        self._deployment = deployment
        self._function = function
        self._starting: dict[int, _Start] = {}
        self._start_pauses: Backoff | None = None  # while Prefect's API is away
        self._running: dict[int, tuple[TrialRecord, UUID]] = {}
        self._num_lost: Counter[tuple[int, str]] = Counter()  # by trial and budget
        self._watch = FlowRunWatch(sweep)
        self._give_up_s: float | None = None
        self._to_cancel: list[tuple[TrialRecord, UUID]] = []
        self._reason = ""
        self._cancel_pauses = Backoff()

    def start(self, trial: TrialRecord) -> None:
        """Start the flow run of a trial; see `TrialRuns`."""
        self._starting[trial.number] = _Start(trial, f"{trial.run}/{secrets.token_hex(8)}")
        self._start_due()

    def take_ended(self, timeout_s: float) -> dict[int, TrialEnd | None]:
        """Answer the questions of trials, and return how trials have ended; see `TrialRuns`."""
        until_s = time.monotonic() + timeout_s
        while self.num_running():
            num_answered = self._answer()
            self._start_due()
            self._cancel_due()
            if ended := self._ended():
                return ended
            if time.monotonic() >= until_s:
                break
            if not num_answered:
                time.sleep(min(_PAUSE_S, timeout_s))
        return {}

    def num_running(self) -> int:
        """Return how many trials run."""
        return len(self._running | self._starting)

    def running_runs(self) -> frozenset[str]:
        """Return the names of the runs of the trials that run."""
        starting = [start.trial for start in self._starting.values()]
        return frozenset(trial.run for trial in (*starting, *(trial for trial, _ in self._running.values())))

    def close(self) -> None:
        """Do nothing: trials share no resources here; see `TrialRuns`."""

    def terminate(self, cause: BaseException) -> None:
        """Cancel the flow runs of all trials, which commit a last checkpoint; see `TrialRuns`.

        If another process leads the sweep by now, they are that one's, and only this process leaves them.
        """
        if self._is_overtaken():
            self._starting.clear()
            self._running.clear()
            return
        self._give_up_s = time.monotonic() + self._training.failure.grace_s + _CANCEL_S
        self._starting.clear()
        self._to_cancel, self._reason = list(self._running.values()), f"the sweep ends: {cause!r}"
        self._cancel_due()

    def _cancel_due(self) -> None:
        """Cancel the flow runs that are to be cancelled; those that Prefect's API refuses are tried again after a pause."""
        if not self._to_cancel or self._cancel_pauses.wait_s():
            return
        self._cancel_pauses.record()
        with without_retries():  # retries would keep the next ones waiting
            self._to_cancel = [(trial, it) for trial, it in self._to_cancel if not cancel(trial, it, self._reason)]

    def _answer(self) -> int:
        """Answer the trials' questions, and return how many were answered; while the storage is away, they and the trials wait.

        A decision that could not be recorded ends the sweep nevertheless; see `TrialDecisions`.
        """
        try:
            return answer_questions(self._sweep, self._decides_on)
        except StorageError as exc:
            get_run_logger().warning("questions of trials wait for the storage: %s", exc)
            return 0

    def _is_overtaken(self) -> bool:
        try:
            self._check_lead()
        except FencedError as exc:
            get_run_logger().warning("the flow runs of %d trials go on: %s", len(self._running), exc)
            return True
        except (StorageError, OSError):  # most sweeps are not; without an answer their trials would go on alone
            return False
        return False

    def _decides_on(self, name: str) -> DecisionMaker | None:
        run = f"{self._sweep.name}/{name}"
        for trial in tuple(self._search.trials.values()):
            if run in (trial.run, *trial.earlier_runs):
                self._check_lead()  # a decision by this history alone may be wrong of a trial that the next leader has resumed
                return TrialDecisions(self._search, self._sweep, trial.number, run)
        return None

    def _start_due(self) -> None:
        """Start the flow runs that are to be created; while Prefect's API is away, one of them is tried after each pause.

        A request whose packets vanish takes a minute, in which no trial gets an answer.
        """
        if self._start_pauses is not None and self._start_pauses.wait_s():
            return
        for number, start in tuple(self._starting.items()):
            try:
                with without_retries():  # retries would wait here, and no trial would get an answer
                    flow_run_id = self._flow_run_of(start)
            except Exception as exc:
                if is_outage(exc):
                    self._start_pauses = self._start_pauses or Backoff()
                    self._start_pauses.record()
                    warn_of_outage(start.trial, exc)
                    self._starting[number] = self._starting.pop(number)  # the next one to try is another, lest one blocks all
                    return
                if isinstance(exc, (PrefectException, httpx.HTTPError)):
                    raise no_flow_run(start.trial, exc) from exc
                raise
            self._start_pauses = None
            self._running[number] = (start.trial, flow_run_id)
            del self._starting[number]

    def _flow_run_of(self, start: _Start) -> UUID:
        self._check_lead()  # the start may have waited for Prefect's API
        trial, parameters = start.trial, self._parameters(start.trial)
        alive = [it for it in find_alive(trial) if not is_ending(it)]
        for flow_run in alive:
            if self._would_be_same(flow_run, parameters):
                get_run_logger().info("trial %d goes on in flow run %r", trial.number, flow_run.name)
                return flow_run.id
        for flow_run in alive:  # of an earlier start of the sweep, with other arguments
            get_run_logger().info("flow run %r ends: trial %d goes on with the present arguments", flow_run.name, trial.number)
            cancel(trial, flow_run.id, "the sweep goes on with other arguments")
        with large_parameters_explained():
            created = run_deployment(
                name=self._deployment,
                parameters=parameters,
                flow_run_name=trial.run,
                tags=[tag_of(trial.run)],
                idempotency_key=start.key,
                timeout=0,
                # Of a subflow, Prefect refuses the suspension, and cancels it with its parent, though another start has it.
                as_subflow=False,
            )
        assert isinstance(created, FlowRun)  # no coroutine, since the sweep's flow is not async
        return created.id

    def _would_be_same(self, flow_run: FlowRun, parameters: dict[str, Any]) -> bool:
        """Return whether a new flow run would have the same deployment and parameters."""
        given = {name: flow_run.parameters.get(name) for name in parameters}  # Prefect adds the deployment's own
        if not is_same(_whole(given), _whole(parameters)):
            return False
        with get_client(sync_client=True) as client:
            return flow_run.deployment_id == read_deployment(client, self._deployment).id

    def _parameters(self, trial: TrialRecord) -> dict[str, Any]:
        training, source = self._training, trial.source
        run = _given_of(training.run_config, exclude={"storage"})
        storage = portable_storage(training.run_config, training.storage)
        parameters: dict[str, Any] = {
            "train_fn": self._function,
            "config": as_stored(training.config_of(trial)),
            "scaling": _given_of(training.scaling),
            "run": {**run, "name": trial.run, "resume": "auto", "takeover": True, "storage": storage},
            "checkpoint": _given_of(training.checkpoint),
            "failure": _given_of(training.failure),
        }
        return parameters if source is None else {**parameters, "resume_from": f"{source.run}/{source.checkpoint}"}

    def _ended(self) -> dict[int, TrialEnd | None]:
        is_late = self._give_up_s is not None and time.monotonic() >= self._give_up_s
        seen = self._watch.look(self._running.values())
        if seen is None and not is_late:
            return {}
        found, lost = seen or ({}, set())
        over = [
            number
            for number, (_, flow_run_id) in self._running.items()
            if is_late or flow_run_id in lost or flow_run_id not in found or has_ended(found[flow_run_id])
        ]
        return {number: self._end_of(*self._running.pop(number), found) for number in over}

    def _end_of(self, trial: TrialRecord, flow_run_id: UUID, found: dict[UUID, FlowRun]) -> TrialEnd | None:
        """Return how a trial has ended by its storage; None if it goes on, unless the search has stopped it."""
        if self._give_up_s is not None:
            return None
        answer_questions(self._sweep, self._decides_on)  # its last question may have come just before its end
        forget_questions(self._sweep, trial.run.rpartition("/")[2])  # its process may have been killed while it waited
        run = self._sweep.beside(trial.run)
        status, flow_run = status_of_start(run, str(flow_run_id)), found.get(flow_run_id)
        outcome = None if status is None else status.outcome
        if outcome is not None and outcome.ending != "preempted":
            return end_of(run, outcome)
        failure = None if self._goes_on_elsewhere(trial) else self._failure_of(trial, flow_run_id, flow_run, status)
        return None if failure is None else TrialEnd("failed", failure, newest_of_each(read_history(run)))

    def _failure_of(
        self, trial: TrialRecord, flow_run_id: UUID, flow_run: FlowRun | None, status: AttemptStatus | None
    ) -> str | None:
        """Return why a trial has failed whose flow run has recorded no end of it; None if it goes on."""
        state = None if flow_run is None else flow_run.state
        if flow_run is not None and state is not None:
            if state.is_cancelled():
                return f"flow run {flow_run.name!r} of {self._deployment} was cancelled"
            if status is None and not state.is_crashed():
                said = state.message or state.name
                return f"flow run {flow_run.name!r} of {self._deployment} ended before it trained: {said}"
        if status is not None and status.outcome is not None:
            return None if status.outcome.kind is None else self._count_lost(trial, "max_preemptions")
        return self._count_lost(trial, self._budget_of(trial, flow_run_id))

    def _goes_on_elsewhere(self, trial: TrialRecord) -> bool:
        """Return whether another flow run trains the trial, which `start` takes over, such as one started by an automation."""
        try:
            with without_retries():
                return bool(find_alive(trial))
        except Exception as exc:
            if not is_outage(exc):
                raise
            return True  # assumed: `start` looks again

    def _budget_of(self, trial: TrialRecord, flow_run_id: UUID) -> _Budget:
        """Return the budget against which a training counts a killed flow, which has recorded no outcome."""
        run = self._sweep.beside(trial.run)
        attempts = list(list_attempts(run))
        led = {attempt.number for attempt in attempts if attempt.owner.flow_run_id == str(flow_run_id)}
        has_committed = led and max(led) in committed_attempts(run, attempts)
        return "max_preemptions" if has_committed else "max_infrastructure_failures"

    def _count_lost(self, trial: TrialRecord, budget: _Budget) -> str | None:
        """Count a lost flow run as a training counts it; return why the trial has failed if the budget is used up."""
        most: int = getattr(self._training.failure, budget)
        self._num_lost[trial.number, budget] += 1
        num_lost = self._num_lost[trial.number, budget]
        if most == UNLIMITED or num_lost <= most:
            return None
        return f"its flow run was lost {num_lost} times, with {budget}={most}"


def _given_of(config: BaseModel, exclude: set[str] | None = None) -> dict[str, Any]:
    """Return the settings that were given, as JSON: the deployment of an older version refuses those that it does not know."""
    return config.model_dump(mode="json", exclude=exclude, exclude_unset=True)


def _whole(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a flow run as JSON, with all defaults: an earlier version gave them; a start may, too."""
    try:
        configs = {name: config.model_validate(parameters[name]).model_dump(mode="json") for name, config in _CONFIGS.items()}
    except ValueError:  # of another version, with a setting that this one does not know
        configs = {}
    return cast("dict[str, Any]", to_jsonable_python({**parameters, **configs}))
