"""The trials of a sweep as flow runs of a deployment: a work pool brings the machines."""

import time
from collections import Counter
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Cancelling, Crashed
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.reporting.decisions import DecisionMaker, DecisionPoints, Verdict
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.standing import Standing, read_standing
from prefect_torch.flows.sweeps.asked_decisions import answer_questions
from prefect_torch.flows.sweeps.history import TrialRecord
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from prefect_torch.flows.sweeps.trial_storage import read_end
from prefect_torch.tasks import RunConfig
from prefect_torch.tasks.options.config import UNLIMITED

from .monitoring.messages import portable_storage, tag_of
from .prefect_api.deployments import read_deployment
from .trial_runs import Training, TrialDecisions

_FLOW = "train"
_PAUSE_S = 0.5
_LOOK_FOR_LOST_S = 5.0
_GONE_S = 10.0  # after which no runner or worker tells Prefect of a process that is gone
_CANCEL_S = 60.0
_MOST_ROWS = 200  # of one answer of Prefect's API


def check_deployment(name: str, run_config: RunConfig, storage: StorageSpec) -> None:
    """Raise unless trials can be flow runs of a deployment; one request.

    Raises:
        ValueError: If there is none of that name, it is one of another flow, or its machines would not have the storage.

    """
    if name.partition("/")[0] != _FLOW or not name.partition("/")[2]:
        raise ValueError(f"trials_on={name!r}: give a deployment of the flow {_FLOW!r}, such as '{_FLOW}/gpu'")
    if run_config.sync is not None or storage.url.startswith("memory:"):
        raise ValueError(f"trials_on={name!r} needs a storage that all machines reach themselves, not {storage.url}")
    with get_client(sync_client=True) as client:
        try:
            read_deployment(client, name)
        except ObjectNotFound as exc:
            raise ValueError(f"trials_on={name!r}: {exc}") from None


class DeployedTrials:
    """Runs each trial as a flow run of a deployment of the flow `train`, which asks this process at its reports.

    A flow run that an earlier process of the sweep has started, and that has not ended, is taken over.

    Args:
        training: What all trials have in common.
        search: The search.
        sweep: The sweep.
        deployment: The deployment's name, "train/name".
        function: The location of the training function, which the deployment's machines have.

    """

    def __init__(self, training: Training, search: Search, sweep: Run, deployment: str, function: str) -> None:
        self._training = training
        self._search = search
        self._sweep = sweep
        self._deployment = deployment
        self._function = function
        self._running: dict[int, tuple[TrialRecord, UUID]] = {}
        self._num_lost: Counter[int] = Counter()
        self._gone_since_s: dict[UUID, float] = {}
        self._looked_s = 0.0
        self._give_up_s: float | None = None

    def start(self, trial: TrialRecord) -> None:
        """Start the flow run of a trial; see `TrialRuns`."""
        flow_run = self._alive(trial)
        if flow_run is None:
            created = run_deployment(
                name=self._deployment,
                parameters=self._parameters(trial),
                flow_run_name=trial.run,
                tags=[tag_of(trial.run)],
                timeout=0,
            )
            assert isinstance(created, FlowRun)  # no coroutine: the sweep's flow is no async one
            flow_run = created
        else:
            get_run_logger().info("trial %d goes on in flow run %r", trial.number, flow_run.name)
        self._running[trial.number] = (trial, flow_run.id)

    def take_ended(self, timeout_s: float) -> dict[int, TrialEnd | None]:
        """Answer what trials ask, and return how trials have ended; see `TrialRuns`."""
        until_s = time.monotonic() + timeout_s
        while self._running:
            num_answered = answer_questions(self._sweep, self._decides_on)
            if ended := self._ended():
                return ended
            if time.monotonic() >= until_s:
                break
            if not num_answered:
                time.sleep(min(_PAUSE_S, timeout_s))
        return {}

    def num_running(self) -> int:
        """Return how many trials run."""
        return len(self._running)

    def running_runs(self) -> frozenset[str]:
        """Return the names of the runs of the trials that run."""
        return frozenset(trial.run for trial, _ in self._running.values())

    def close(self) -> None:
        """Do nothing: they share nothing here; see `TrialRuns`."""

    def terminate(self, cause: BaseException) -> None:
        """Cancel the flow runs of all trials, which commit a last checkpoint; see `TrialRuns`."""
        self._give_up_s = time.monotonic() + self._training.failure.grace_s + _CANCEL_S
        with get_client(sync_client=True) as client:
            for trial, flow_run_id in self._running.values():
                try:
                    client.set_flow_run_state(flow_run_id, Cancelling(message=f"the sweep ends: {cause!r}"))
                except (PrefectException, httpx.HTTPError) as exc:  # the other trials end nevertheless
                    get_run_logger().error("trial %d could not be cancelled: %s", trial.number, exc)

    def _decides_on(self, name: str) -> DecisionMaker | None:
        run = f"{self._sweep.name}/{name}"
        for trial in tuple(self._search.trials.values()):
            if trial.run == run and trial.state == "running":
                return TrialDecisions(self._search, self._training.storage, trial.number)
            if run in (trial.run, *trial.earlier_runs):
                return _Stops()
        return None

    def _alive(self, trial: TrialRecord) -> FlowRun | None:
        tags = FlowRunFilter(tags=FlowRunFilterTags(all_=[tag_of(trial.run)]))
        with get_client(sync_client=True) as client:
            found = client.read_flow_runs(flow_run_filter=tags)
        return next((it for it in found if it.state is None or not it.state.is_final()), None)

    def _parameters(self, trial: TrialRecord) -> dict[str, Any]:
        training, source = self._training, trial.source
        run = training.run_config.model_dump(mode="json", exclude={"name", "resume", "takeover", "storage"})
        storage = portable_storage(training.run_config, training.storage)
        parameters: dict[str, Any] = {
            "train_fn": self._function,
            "config": training.config_of(trial),
            "scaling": training.scaling.model_dump(mode="json"),
            "run": {**run, "name": trial.run, "resume": "auto", "takeover": True, "storage": storage},
            "checkpoint": training.checkpoint.model_dump(mode="json"),
            "failure": training.failure.model_dump(mode="json"),
        }
        return parameters if source is None else {**parameters, "resume_from": f"{source.run}/{source.checkpoint}"}

    def _ended(self) -> dict[int, TrialEnd | None]:
        ids = [flow_run_id for _, flow_run_id in self._running.values()]
        try:
            with get_client(sync_client=True) as client:
                parts = [ids[first : first + _MOST_ROWS] for first in range(0, len(ids), _MOST_ROWS)]
                filters = (FlowRunFilter(id=FlowRunFilterId(any_=part)) for part in parts)
                rows = [row for each in filters for row in client.read_flow_runs(flow_run_filter=each, limit=_MOST_ROWS)]
        except httpx.HTTPError as exc:  # the trials go on meanwhile
            get_run_logger().warning("Prefect's API is away, trials go on without it: %r", exc)
            return {}
        found = {it.id: it for it in rows}
        lost = self._lost(found)
        is_late = self._give_up_s is not None and time.monotonic() >= self._give_up_s
        over = [
            number
            for number, (_, flow_run_id) in self._running.items()
            if is_late or flow_run_id in lost or flow_run_id not in found or _has_ended(found[flow_run_id])
        ]
        return {number: self._end_of(*self._running.pop(number), found) for number in over}

    def _lost(self, found: dict[UUID, FlowRun]) -> set[UUID]:
        """Return the flow runs whose process on this machine is gone though Prefect takes them for running, now Crashed."""
        lost: set[UUID] = set()
        if time.monotonic() < self._looked_s + _LOOK_FOR_LOST_S:
            return lost
        self._looked_s = time.monotonic()
        for trial, flow_run_id in self._running.values():
            if flow_run_id not in found or _has_ended(found[flow_run_id]) or not self._is_gone(trial, flow_run_id):
                self._gone_since_s.pop(flow_run_id, None)
            elif self._looked_s - self._gone_since_s.setdefault(flow_run_id, self._looked_s) >= _GONE_S:
                with get_client(sync_client=True) as client:
                    client.set_flow_run_state(flow_run_id, Crashed(message="its process is gone"), force=True)
                lost.add(flow_run_id)
        return lost

    def _is_gone(self, trial: TrialRecord, flow_run_id: UUID) -> bool:
        standing = self._standing_of(trial, flow_run_id)
        return standing is not None and standing.is_process_gone is True

    def _standing_of(self, trial: TrialRecord, flow_run_id: UUID) -> Standing | None:
        """Return the standing of the newest attempt if the flow run leads it."""
        standing = read_standing(Run.open(self._training.storage, trial.run))
        return standing if standing is not None and standing.attempt.owner.flow_run_id == str(flow_run_id) else None

    def _end_of(self, trial: TrialRecord, flow_run_id: UUID, found: dict[UUID, FlowRun]) -> TrialEnd | None:
        """Return how a trial has ended by its storage; None if it was interrupted, or has stopped unasked, and can go on."""
        answer_questions(self._sweep, self._decides_on)  # its last question, if this process has been slower than its end
        flow_run, standing = found.get(flow_run_id), self._standing_of(trial, flow_run_id)
        if self._give_up_s is not None:
            return None
        if standing is None and flow_run is not None and flow_run.state is not None and not flow_run.state.is_crashed():
            said = flow_run.state.message or flow_run.state.name
            return TrialEnd("failed", f"flow run {flow_run.name!r} of {self._deployment} ended before it trained: {said}")
        if standing is None or standing.outcome is None:
            return self._count_lost(trial.number)
        if standing.outcome.ending == "preempted":
            return None
        end = read_end(Run.open(self._training.storage, trial.run), None)
        is_unasked = end is not None and end.outcome == "stopped" and self._search.trials[trial.number].state == "running"
        return None if is_unasked else end

    def _count_lost(self, number: int) -> TrialEnd | None:
        self._num_lost[number] += 1
        most = self._training.failure.max_infrastructure_failures
        if most == UNLIMITED or self._num_lost[number] <= most:
            return None
        return TrialEnd("failed", f"its flow run was lost {self._num_lost[number]} times")


class _Stops:
    """Decides on a run whose trial does not go on in it."""

    def points(self) -> DecisionPoints | None:
        """Return that the first report asks."""
        return DecisionPoints("training_iteration", 0, asks_always=True)

    def decide(self, request: DecisionRequest) -> Verdict:  # noqa: ARG002 - as the others
        """Return that it ends."""
        return Verdict(goes_on=False)


def _has_ended(flow_run: FlowRun) -> bool:
    return flow_run.state is not None and flow_run.state.is_final()
