"""The flow runs of trials in Prefect: their states, which are alive, which are lost, and their cancellation."""

import time
from collections.abc import Iterable, Mapping
from contextvars import Context, copy_context
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectException
from prefect.states import Cancelling, Crashed
from prefect_torch.ckpt import StorageError
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus, read_status
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.flows.monitoring.events.signs_of_life import LONGEST_BEGINNING_S, begins_immediately, last_sign, silence_s
from prefect_torch.flows.monitoring.messages import tag_of
from prefect_torch.flows.sweeps.journal.history import TrialRecord
from prefect_torch.tasks.prefect_api.flow_run import has_left_machine
from prefect_torch.tasks.prefect_api.paging import read_pages
from prefect_torch.tasks.prefect_api.settings import without_retries
from prefect_torch.tasks.run_logs import get_run_logger
from prefect_torch.tasks.training.backoff import Backoff

from .untaken import Untaken

_LOOK_FOR_LOST_S = 5.0
_LOOK_FOR_HEARTBEAT_S = 30.0
_GONE_S = 10.0  # after which no runner or worker reports the end of a process to Prefect any more


class FlowRunWatch:
    """Reads the states of running trials' flow runs; while Prefect's API is unavailable, it retries after pauses.

    Args:
        sweep: The sweep.

    """

    def __init__(self, sweep: Run) -> None:
        self._sweep = sweep
        self._gone_since_s: dict[UUID, float] = {}
        self._looked_s = 0.0
        self._silence = _Silence()
        self._untaken = Untaken()
        self._pauses: Backoff | None = None  # while Prefect's API is away

    def look(self, running: Iterable[tuple[TrialRecord, UUID]]) -> tuple[dict[UUID, FlowRun], set[UUID]] | None:
        """Return the flow runs as Prefect has them, by id, and which of them are lost; None while its API is away.

        Args:
            running: The trials that run, with their flow runs.

        """
        if self._pauses is not None and self._pauses.wait_s():
            return None
        trials = {flow_run_id: trial for trial, flow_run_id in running}
        try:
            with without_retries(), get_client(sync_client=True) as client:
                known = FlowRunFilter(id=FlowRunFilterId(any_=list(trials)))
                found = {it.id: it for it in read_pages(client.read_flow_runs, flow_run_filter=known)} if trials else {}
                lost = self._lost(client, trials, found)
        except (PrefectException, httpx.HTTPError, ValueError) as exc:  # the trials go on; the last is for a proxy's page
            self._silence.forget()
            if self._pauses is None:
                get_run_logger().warning("Prefect's API is away, trials go on without it: %r", exc)
                self._pauses = Backoff()
            self._pauses.record()
            return None
        self._pauses = None
        if (warning := self._untaken.warning(found.values(), time.monotonic())) is not None:
            get_run_logger().warning("%s", warning)
        return found, lost

    def _lost(self, client: SyncPrefectClient, trials: Mapping[UUID, TrialRecord], found: Mapping[UUID, FlowRun]) -> set[UUID]:
        """Set flow runs that have not ended to Crashed if their process is gone or silent, and return their ids."""
        if time.monotonic() < self._looked_s + _LOOK_FOR_LOST_S:
            return set()
        self._looked_s = time.monotonic()
        alive = [it for it in trials if it in found and not has_ended(found[it])]
        # Concurrently, since trials wait for decisions meanwhile.
        try:
            statuses = dict(zip(alive, read_all(alive, lambda it: self._status(trials[it], found[it])), strict=True))
        except StorageError as exc:  # the trials go on, and their heartbeats with them
            get_run_logger().warning("no trial counts as lost until the storage answers: %s", exc)
            return set()
        gone = [it for it, status in statuses.items() if status is not None and status.is_process_gone]
        self._gone_since_s = {it: self._gone_since_s.get(it, self._looked_s) for it in gone}
        lost = {it: "its process is gone" for it, since_s in self._gone_since_s.items() if self._looked_s - since_s >= _GONE_S}
        message = "no sign of life: its process, or the one that was to begin it, is dead or cut off"
        lost |= dict.fromkeys(self._silent(client, found, statuses), message)
        for flow_run_id, message in lost.items():
            client.set_flow_run_state(flow_run_id, Crashed(message=message), force=True)
        return set(lost)

    def _silent(
        self, client: SyncPrefectClient, found: Mapping[UUID, FlowRun], statuses: Mapping[UUID, AttemptStatus | None]
    ) -> list[UUID]:
        """Return the flow runs that have been silent for long, of those whose process this machine does not see."""
        unseen = [it for it, status in statuses.items() if status is None or status.is_process_gone is None]
        contexts = [copy_context() for _ in unseen]  # with the settings of this thread

        def lasts_long(one: tuple[UUID, Context]) -> bool:
            flow_run_id, context = one
            has_claimed = statuses[flow_run_id] is not None
            return context.run(self._silence.lasts_long, client, found[flow_run_id], has_claimed=has_claimed)

        lasting = read_all(zip(unseen, contexts, strict=True), lasts_long)
        return [it for it, is_long in zip(unseen, lasting, strict=True) if is_long]

    def _status(self, trial: TrialRecord, flow_run: FlowRun) -> AttemptStatus | None:
        """Return the status of the trial's newest attempt if the flow run leads it, else None.

        None, too, for a flow run that has left its machine, as one that is suspended or gives way, and has not begun again.
        """
        if flow_run.state is not None and has_left_machine(flow_run.state):
            return None
        status = read_status(self._sweep.beside(trial.run))
        return status if status is not None and status.attempt.owner.flow_run_id == str(flow_run.id) else None


class _Silence:
    """How long flow runs have given no sign of life, by this machine's clock, while Prefect's API was there.

    A sign is a heartbeat, or another state. One that is Pending, or has no heartbeat and has not claimed its trial, has the
    time that a flow run may take to begin. Never lost are those that are Pending in a work pool where they may wait for a
    machine, and those that train without heartbeats.
    """

    def __init__(self) -> None:
        self._looked_s: dict[UUID, float] = {}
        self._newest: dict[UUID, tuple[UUID, float]] = {}

    def forget(self) -> None:
        """Begin anew: heartbeats are lost while Prefect's API is away."""
        self._newest.clear()

    def lasts_long(self, client: SyncPrefectClient, flow_run: FlowRun, *, has_claimed: bool) -> bool:
        """Return whether a flow run is dead or cut off; one or two requests every half minute."""
        state, now_s = flow_run.state, time.monotonic()
        if state is None or not (state.is_running() or state.is_pending()):
            self._newest.pop(flow_run.id, None)
            return False
        if now_s < self._looked_s.get(flow_run.id, -_LOOK_FOR_HEARTBEAT_S) + _LOOK_FOR_HEARTBEAT_S:
            return False
        self._looked_s[flow_run.id] = now_s
        sign = last_sign(client, flow_run)
        newest = state.id if sign is None else sign.id
        known, since_s = self._newest.get(flow_run.id, (None, now_s))
        if known != newest:
            self._newest[flow_run.id] = (newest, now_s)
            return False
        if state.is_running() and sign is not None:
            return now_s - since_s >= silence_s()
        may_be_dead = not has_claimed and now_s - since_s >= LONGEST_BEGINNING_S
        return may_be_dead and (not state.is_pending() or begins_immediately(client, flow_run))


def has_ended(flow_run: FlowRun) -> bool:
    """Return whether a flow run is in a final state."""
    return flow_run.state is not None and flow_run.state.is_final()


def is_ending(flow_run: FlowRun) -> bool:
    """Return whether a flow run is being cancelled."""
    return flow_run.state is not None and flow_run.state.is_cancelling()


def find_alive(trial: TrialRecord) -> list[FlowRun]:
    """Return the flow runs of a trial that have not ended."""
    tags = FlowRunFilter(tags=FlowRunFilterTags(all_=[tag_of(trial.run)]))
    with get_client(sync_client=True) as client:
        return [it for it in read_pages(client.read_flow_runs, flow_run_filter=tags) if not has_ended(it)]


def cancel(trial: TrialRecord, flow_run_id: UUID, reason: str) -> bool:
    """Cancel a flow run of a trial, and return whether this succeeded; an error is logged, lest the others go on."""
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run_id, Cancelling(message=reason))
    except (PrefectException, httpx.HTTPError, ValueError) as exc:
        get_run_logger().error("trial %d could not be cancelled: %s", trial.number, exc)
        return False
    return True


def cancel_flow_runs(trials: Iterable[TrialRecord], reason: str) -> list[TrialRecord]:
    """Cancel the flow runs of trials that have not ended, by requests that are made once; errors are logged.

    Args:
        trials: The trials, of a sweep whose trials are flow runs of a deployment.
        reason: The message of their state.

    Returns:
        The trials whose flow runs may go on, since Prefect's API is away, or refuses the requests.

    """
    with without_retries():  # else each trial would wait for minutes while the API is away
        return [trial for trial in trials if not _cancel_flow_runs(trial, reason)]


def _cancel_flow_runs(trial: TrialRecord, reason: str) -> bool:
    try:
        alive = [it for it in find_alive(trial) if not is_ending(it)]
    except (PrefectException, httpx.HTTPError, ValueError) as exc:
        get_run_logger().warning("flow runs of trial %d may go on, since they could not be found: %s", trial.number, exc)
        return False
    for flow_run in alive:
        get_run_logger().info("flow run %r ends: %s", flow_run.name, reason)
    return all([cancel(trial, flow_run.id, reason) for flow_run in alive])  # noqa: C419 - each of them, also after a failure
