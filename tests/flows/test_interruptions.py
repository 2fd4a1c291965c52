"""A training that is suspended, or gives way to a more urgent one, leaves its machine and goes on in the same flow run."""

import os
import subprocess
import sys
import threading
import uuid
from asyncio import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import httpx
import pytest
from forked_programs import Popen
from http_proxy import Response, proxied
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import FlowRunPolicy
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, ObjectNotFound, Pause, TerminationSignal
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling, Failed, Pending, Running, Scheduled, Suspended
from prefect.task_runners import ThreadPoolTaskRunner
from prefect_servers import api_that_answers, wait_until
from prefect_torch.ckpt import CheckpointStore, FencedError, StorageError
from prefect_torch.ckpt.runs.attempts.attempt import GAVE_WAY, SUSPENDED, Outcome, read_outcomes
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.log_files import LogFiles
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.retry import RetryingStorage
from prefect_torch.deployments.command_line import execution
from prefect_torch.flows import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    SearchConfig,
    evaluate,
    evaluation,
    interruptions,
    leading,
    sweep,
    sweeping,
    train,
    uniform,
    urgency,
)
from prefect_torch.flows.calls.short_tracebacks import short_tracebacks
from prefect_torch.flows.calls.submitted_call import _switches_of, terminated_with_caller
from prefect_torch.flows.interruptions import (
    cancellable,
    find_interruption,
    interruptible,
    spared_from_suspension,
    suspendable,
)
from prefect_torch.tasks.gang import termination as termination_module
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.termination import TERMINATIONS, CancelledInPrefect, Interruption, Termination, TerminationSwitch
from prefect_torch.tasks.prefect_api import paging
from prefect_torch.tasks.prefect_api.flow_run import flow_runs_from, is_being_cancelled, is_cancellation, is_unknown
from prefect_torch.tasks.training import attempt_leader, backoff, outcomes, recorder
from prefect_torch.tasks.training.retention_schedule import RetentionSchedule
from ranks import Attempt, folder

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def pool(client):
    """A work pool without workers, with an urgent queue and another one."""
    name = f"pool-{uuid.uuid4().hex[:8]}"
    client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    for queue, priority in (("urgent", 1), ("background", 7)):
        client.create_work_queue(queue, work_pool_name=name, priority=priority)
    return name


def begin(client, pool, queue="background", *states, **parameters):
    """Return a flow run of a deployment in a queue of the pool."""
    deployment_id = client.create_deployment(
        client.create_flow(train),
        queue,
        entrypoint="prefect_torch.flows.training:train",
        work_pool_name=pool,
        work_queue_name=queue,
        parameters={"train_fn": f"{SUPPORT / 'trainings.py'}:leave_once", **parameters},
    )
    flow_run = client.create_flow_run_from_deployment(deployment_id)
    for state in states:
        client.set_flow_run_state(flow_run.id, state, force=True)
    return client.read_flow_run(flow_run.id)


def run(flow_run):
    """Start the process that a worker would start."""
    return Popen(
        [sys.executable, str(SUPPORT / "run_flow_run.py"), str(flow_run.id)],
        env={**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["suspended", "yielded"])
def test_an_interrupted_training_leaves_after_a_last_checkpoint_and_goes_on_in_its_flow_run(client, pool, tmp_path, how):
    started = tmp_path / "started"
    flow_run = begin(
        client,
        pool,
        config={"started": str(started)},
        checkpoint={"num_to_keep": 1},  # so that there is something to prune when it leaves
        run={"name": "run", "storage": str(tmp_path / "store"), "yields_to_urgent": True},
    )
    store = CheckpointStore.open(tmp_path / "store", "run")
    with run(flow_run) as process:
        try:
            wait_until(lambda: started.exists() or process.poll() is not None, "the training")
            if how == "suspended":
                client.set_flow_run_state(flow_run.id, Suspended())
            else:
                urgent = begin(client, pool, "urgent", Scheduled(name="Late"))
            output = process.communicate(timeout=170)[0]
        finally:
            process.kill()
    (last,) = store.list()
    state = client.read_flow_run(flow_run.id).state
    (outcome,) = read_outcomes(store)
    assert (outcome.ending, outcome.kind, outcome.state) == ("preempted", None, how), output
    assert f"work is safe up to step 1 ({last.id})" in outcome.error
    if how == "suspended":
        assert (state.type, state.name) == ("PAUSED", "Suspended"), output
        assert outcome.error.startswith("suspended; ")
        client.resume_flow_run(flow_run.id)
    else:
        assert (state.type, state.name) == ("SCHEDULED", "Yielded"), output
        assert outcome.error.startswith(f"gave way to the more urgent flow run {urgent.name!r}; ")
    assert client.read_flow_run(flow_run.id).state.is_scheduled()
    state = run_flow(train, flow_run=client.read_flow_run(flow_run.id), return_type="state")
    assert client.read_flow_run(flow_run.id).state.is_completed(), state
    assert [it.ending for it in read_outcomes(store)] == ["preempted", "completed"]
    assert read_outcomes(store)[1].return_value == {"resumed": last.id}


@task(cache_policy=NO_CACHE)
def prune_something():
    return "pruned"


def test_a_rank_that_fails_within_its_grace_is_warned_of_with_its_traceback(tmp_path, caplog):
    """That costs no budget, and without a word each termination would lose the work since the last checkpoint."""
    started, switch = tmp_path / "started", TerminationSwitch()
    run_config = RunConfig(name="run", storage=str(tmp_path / "store"))

    def terminate():
        wait_until(started.exists, "the training")
        switch.cause = CancelledInPrefect()

    terminating = threading.Thread(target=terminate)
    terminating.start()
    with switch.governs(), pytest.raises(CancelledInPrefect):
        train("trainings:fail_when_told", {"started": str(started)}, ScalingConfig(num_workers=2), run_config)
    terminating.join()
    warnings = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    (told,) = [it for it in warnings if it.startswith("rank 0 of attempt 1 failed")]
    assert "in fail_when_told" in told
    assert told.endswith("ValueError: nothing to save")
    (outcome,) = read_outcomes(CheckpointStore.open(run_config.storage, "run"))
    assert outcome.ending == "cancelled"


def test_the_outcome_of_a_terminated_attempt_is_stored_before_its_last_prune_and_the_end_of_its_lease(tmp_path, monkeypatch):
    """These may take longer than what terminates the process waits before it kills it."""
    started, switch = tmp_path / "started", TerminationSwitch()
    run_config = RunConfig(name="run", storage=str(tmp_path / "store"), log_ranks="rank0")
    store = CheckpointStore.open(run_config.storage, "run")
    stored = {}

    def terminate():
        wait_until(started.exists, "the training")
        switch.cause = CancelledInPrefect()

    def look(before):
        stored[before] = [it.ending for it in read_outcomes(store)]

    class Schedule(RetentionSchedule):
        def finish(self, recorded, **options):
            look("prune")
            super().finish(recorded, **options)

    @contextmanager
    def lend(_):
        try:
            yield None
        finally:
            look("end of the lease")

    class Files(LogFiles):
        def flush(self):
            look("last lines")
            super().flush()

    monkeypatch.setattr(recorder, "RetentionSchedule", Schedule)
    monkeypatch.setattr(attempt_leader, "LogFiles", Files)
    monkeypatch.setattr(attempt_leader.AttemptLeader, "_lend", lend)
    terminating = threading.Thread(target=terminate)
    terminating.start()
    with switch.governs(), pytest.raises(CancelledInPrefect):
        train("trainings:leave_once", {"started": str(started)}, run=run_config, checkpoint=CheckpointConfig(num_to_keep=1))
    terminating.join()
    assert stored == {what: ["cancelled"] for what in ("prune", "last lines", "end of the lease")}
    (last,) = store.list()
    assert last.step == 1


def test_a_termination_ends_the_verification_of_the_checkpoint_that_an_attempt_begins_with(tmp_path, monkeypatch):
    """It reads every byte, which may take longer than the grace: the attempt had no outcome, and counted as killed."""
    store, switch, requested, read = CheckpointStore.open(tmp_path / "store", "run"), TerminationSwitch(), threading.Event(), []
    Attempt(store).session().report({}, folder(tmp_path / "c", **{f"part-{number}": "1" for number in range(40)}))

    def request(self, cause, original=Termination.request):
        original(self, cause)
        requested.set()

    def digest(self, key, original=LocalStorage.digest):
        read.append(key)
        switch.cause = CancelledInPrefect()
        assert requested.wait(60)
        return original(self, key)

    monkeypatch.setattr(Termination, "request", request)
    monkeypatch.setattr(LocalStorage, "digest", digest)
    with switch.governs(), pytest.raises(CancelledInPrefect):
        train("trainings:leave_once", run=RunConfig(name="run", storage=str(tmp_path / "store"), takeover=True))
    assert 0 < len(read) < 40
    (outcome,) = read_outcomes(store)
    assert (outcome.ending, "no rank was started" in outcome.error) == ("cancelled", True)


def test_a_claim_that_outlasts_the_wait_for_the_leader_takes_no_gpus(tmp_path, monkeypatch):
    """Nobody would release them before the end of the process, such as a notebook's kernel."""
    switch, goes_on, taken = TerminationSwitch(), threading.Event(), []

    def claim(*args, original=attempt_leader.claim):
        switch.cause = CancelledInPrefect()
        assert goes_on.wait(60)
        return original(*args)

    monkeypatch.setattr(attempt_leader, "claim", claim)
    monkeypatch.setattr(GpuAllocation, "take", lambda *_: taken.append(None))
    monkeypatch.setattr(termination_module, "_LAST_S", 0.0)
    run_config = RunConfig(name="run", storage=str(tmp_path))
    with switch.governs(), pytest.raises(CancelledInPrefect):
        train("trainings:leave_once", run=run_config, failure=FailureConfig(grace_s=0))
    (leader,) = [thread for thread in threading.enumerate() if thread.name == "leader"]
    goes_on.set()
    leader.join(60)
    assert not taken
    (outcome,) = read_outcomes(CheckpointStore.open(tmp_path, "run"))
    assert outcome.ending == "cancelled"


def test_an_attempt_that_was_overtaken_while_it_waited_for_gpus_starts_nothing(tmp_path, monkeypatch):
    store, started = CheckpointStore.open(tmp_path, "run"), []
    monkeypatch.setattr(GpuAllocation, "take", lambda *_: claim_attempt(store, Owner.current("another"), world_size=1))
    monkeypatch.setattr(attempt_leader, "record_world_size", lambda _, claimed, *__: started.append(claimed) or claimed)
    with pytest.raises(FencedError, match="attempt 1 of run 'run' was overtaken by attempt 2"):
        train("trainings:leave_once", run=RunConfig(name="run", storage=str(tmp_path)), failure=FailureConfig(grace_s=0))
    assert not started


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_process_that_another_one_of_its_flow_run_has_overtaken_leaves_the_state_to_it(tmp_path, monkeypatch, by_itself):
    store = CheckpointStore.open(tmp_path, "run")
    job = SimpleNamespace(failure=FailureConfig(), store=store)
    releasable = SimpleNamespace(release=lambda: None, close=lambda: None)

    @flow(persist_result=False)
    def overtaken():
        this = Owner.current(flow_run.id)
        claim_attempt(store, this, world_size=1)
        assert leading.state_if_continued(store) is None
        claim_attempt(store, replace(this, pid=1) if by_itself else replace(this, flow_run_id="another"), world_size=1)
        with pytest.raises(Pause if by_itself else FencedError) as raised:
            leading.lead_training(job, releasable, releasable, Termination(1.0), [])
        if by_itself:
            assert raised.value.state.is_running()

    def fenced(*_):
        raise FencedError("overtaken")

    monkeypatch.setattr(leading, "train_workers", SimpleNamespace(with_options=lambda **_: fenced))
    overtaken()


def test_no_task_of_a_training_is_hindered_once_its_flow_run_is_suspended():
    @flow
    def suspended():
        request = FlowRunContext.get().flow_run_suspension_request
        with spared_from_suspension() as state:
            assert state() is None
            request.mark_requested(Suspended())
            yielded.extend([prune_something.submit().result(), state().name])
        prune_something.submit()  # here Prefect raises

    yielded = []
    with pytest.raises(Pause):
        suspended()
    assert yielded == ["pruned", "Suspended"]


@pytest.mark.parametrize("watching", [suspendable, partial(interruptible, yields_to_urgent=False)])
def test_an_evaluation_or_a_training_in_a_flow_that_is_suspended_leaves_in_its_grace(monkeypatch, watching):
    """An evaluation went on to the end of its checkpoint, whose metrics were lost, or to that of the training."""
    monkeypatch.setattr(interruptions, "_POLL_S", 0.01)
    termination, pruned = Termination(5.0), []

    def lead():
        wait_until(lambda: termination.is_requested, "the request", every_s=0.01)
        pruned.append(prune_something.submit().result())

    @flow
    def suspended():
        request = FlowRunContext.get().flow_run_suspension_request
        with watching(termination):
            request.mark_requested(Suspended())
            termination.outlast(lead)

    with pytest.raises(Pause) as raised:
        suspended()
    assert (raised.value.state.name, termination.cause.reason, pruned) == ("Suspended", "suspended", ["pruned"])


@pytest.mark.parametrize(
    "error", [ObjectNotFound(None), httpx.ReadTimeout("no answer"), JSONDecodeError("a proxy's page", "<", 0)]
)
def test_what_prefect_cannot_say_now_is_asked_again(monkeypatch, error):
    monkeypatch.setattr(interruptions, "_POLL_S", 0.0)
    answers, termination = iter([error, Interruption("suspended")]), Termination(1.0)

    def find():
        answer = next(answers)
        if answer is error:
            raise error
        return answer

    interruptions._watch(find, termination, threading.Event())
    assert termination.cause.reason == "suspended"


@pytest.mark.parametrize("why", [Interruption(GAVE_WAY, yields=True), Interruption(SUSPENDED)])
def test_a_proxys_page_does_not_keep_a_flow_run_that_leaves_from_waiting_to_continue(monkeypatch, why):
    """It was Failed, and nobody continued it."""

    class Client:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def _answer(self, state):
            asked.append(state)
            if len(asked) == 1:
                raise JSONDecodeError("a proxy's page", "<", 0)
            return SimpleNamespace(state=state, empirical_policy=FlowRunPolicy())

        def set_flow_run_state(self, flow_run_id, state, *, force):
            return self._answer(state)

        def read_flow_run(self, flow_run_id):
            return self._answer(Suspended())

    asked = []
    monkeypatch.setattr(interruptions, "get_client", lambda **_: Client())
    monkeypatch.setattr(backoff, "FIRST_PAUSE_S", 0.01)
    this = SimpleNamespace(id=uuid.uuid4(), deployment_id=uuid.uuid4(), parent_task_run_id=None)
    monkeypatch.setattr(interruptions, "current_flow_run", lambda: this)
    with pytest.raises(Pause) as left, interruptible(Termination(1.0), yields_to_urgent=False):
        raise why
    assert (left.value.state.name, len(asked)) == (("Yielded", 3) if why.yields else ("Suspended", 2))


@pytest.mark.parametrize("how", ["yielded", "suspended", "told to end"])
def test_a_flow_run_that_was_retried_in_its_process_is_given_to_a_worker_when_that_ends(client, pool, monkeypatch, how):
    """Prefect left it to the process that had ended: it waited for ever."""
    this = begin(client, pool, "background", Pending(), Running())
    client.update_flow_run(this.id, empirical_policy=FlowRunPolicy(retries=1, retry_delay=0))
    assert client.set_flow_run_state(this.id, Failed()).state.name == "AwaitingRetry"
    client.set_flow_run_state(this.id, Running())
    if how == "yielded":
        interruptions._leave(this, Interruption(GAVE_WAY, yields=True))
    elif how == "suspended":
        client.set_flow_run_state(this.id, Suspended(timeout_seconds=60))
        assert interruptions._leave(this, Interruption(SUSPENDED)).name == "Suspended"
        client.resume_flow_run(this.id)
    else:
        monkeypatch.setattr(execution.signal, "signal", lambda *_: None)
        execution._propose(this.id, AwaitingRetry())
    soon = datetime.now(timezone.utc) + timedelta(minutes=1)
    due = client.get_scheduled_flow_runs_for_work_pool(pool, scheduled_before=soon)
    assert [it.flow_run.id for it in due] == [this.id]
    assert client.read_flow_run(this.id).empirical_policy.retries == 1


def test_it_is_watched_between_two_attempts_too(monkeypatch):
    """After a restart, nothing noticed that the flow run was suspended, cancelled without a worker, or in the way."""
    monkeypatch.setattr(interruptions, "_POLL_S", 0.0)
    termination = Termination(1.0)
    termination.outlast(lambda: None)  # an attempt
    interruptions._watch(lambda: Interruption("suspended"), termination, threading.Event())
    assert termination.cause.reason == "suspended"


def test_a_cancellation_that_nobody_carries_out_ends_the_training_after_half_a_minute(client, pool, monkeypatch):
    """Its worker may be gone: it trained on to its end, and its flow run stayed Cancelling."""
    cancelled = begin(client, pool, "background", Pending(), Running(), Cancelling())
    found = find_interruption(client, cancelled, yields_to_urgent=False)
    assert type(found) is TerminationSignal
    seen_s = {100.0: found, 120.0: found, 130.0: None, 140.0: found, 169.0: found, 170.0: found}
    found_at, answers = iter(seen_s), iter(seen_s.values())
    monkeypatch.setattr(interruptions, "_POLL_S", 0.0)
    monkeypatch.setattr(interruptions, "time", SimpleNamespace(monotonic=lambda: next(found_at)))
    termination = Termination(30)
    interruptions._watch(lambda: next(answers), termination, threading.Event())
    assert termination.cause is found
    assert next(found_at, None) is None


@pytest.mark.parametrize("watching", [cancellable, suspendable, partial(interruptible, yields_to_urgent=False)])
def test_what_a_cancelled_flow_has_called_ends_after_half_a_minute(client, monkeypatch, watching):
    """A sweep, and a training below a flow or a task of one's own, went on to its end where the worker was gone."""
    at_exit, termination = [], Termination(30)
    monkeypatch.setattr(interruptions, "_POLL_S", 0.01)
    monkeypatch.setattr(interruptions, "_UNHEEDED_S", 0.1)
    monkeypatch.setattr(interruptions, "atexit", SimpleNamespace(register=lambda *call: at_exit.append(call)))

    @flow
    def called():
        with watching(termination):
            termination.outlast(lambda: wait_until(lambda: termination.is_requested, "the request", every_s=0.01))

    @task(cache_policy=NO_CACHE)
    def call():
        called()

    @flow
    def cancelled():
        begun.append(UUID(flow_run.id))
        client.set_flow_run_state(begun[0], Cancelling(), force=True)
        call()

    begun = []
    with pytest.raises(CancelledInPrefect):
        cancelled()
    assert client.read_flow_run(begun[0]).state.is_crashed()  # by Prefect's engine; an automation would run it again
    ((record, *which),) = at_exit
    record(*which)
    assert client.read_flow_run(begun[0]).state.is_cancelled()


@pytest.mark.parametrize("above_too", [False, True])
def test_a_flow_goes_on_after_the_cancellation_of_a_training_that_it_has_called_unless_it_is_cancelled(
    client, monkeypatch, above_too
):
    """The cancellation of one training crashed its caller, and an automation trained all of it again."""
    monkeypatch.setattr(interruptions, "_POLL_S", 0.01)
    monkeypatch.setattr(interruptions, "_UNHEEDED_S", 0.1)
    monkeypatch.setattr(interruptions, "atexit", SimpleNamespace(register=lambda *_: None))

    def cancel(flow_run_id):
        client.set_flow_run_state(UUID(flow_run_id), Cancelling(), force=True)

    @short_tracebacks
    @flow(persist_result=False)
    def called():
        begun.append(flow_run.id)
        cancel(flow_run.id)
        termination = Termination(30)

        def lead():
            wait_until(lambda: termination.is_requested, "the request", every_s=0.01)
            if above_too:
                cancel(begun[0])

        with suspendable(termination):
            termination.outlast(lead)

    @flow
    def caller():
        begun.append(flow_run.id)
        with pytest.raises(CancelledRun, match="Nobody ended its process"):
            called()
        assert called(return_state=True).is_cancelled()
        return "went on"

    begun = []
    if above_too:
        with pytest.raises(CancelledInPrefect):
            caller()
        assert len(begun) == 2
    else:
        assert caller() == "went on"
        assert [client.read_flow_run(UUID(it)).state.name for it in begun] == ["Completed", "Cancelled", "Cancelled"]


def test_a_flow_run_whose_work_ends_as_it_is_cancelled_does_not_stay_cancelling(client, monkeypatch):
    """Prefect refuses to complete it, and where nobody ended its process, nobody else records the cancellation."""
    at_exit, answers = [], []
    second = threading.Event()  # the first answer is remembered by then

    def is_cancellation_noted(state):
        answers.append(is_so := is_cancellation(state))
        if answers.count(True) == 2:
            second.set()
        return is_so

    monkeypatch.setattr(interruptions, "_POLL_S", 0.01)
    monkeypatch.setattr(interruptions, "is_cancellation", is_cancellation_noted)
    monkeypatch.setattr(interruptions, "atexit", SimpleNamespace(register=lambda *call: at_exit.append(call)))

    @flow
    def cancelled():
        begun.append(UUID(flow_run.id))
        client.set_flow_run_state(begun[0], Cancelling(), force=True)
        termination = Termination(30)
        with cancellable(termination):
            termination.outlast(lambda: second.wait(60))

    begun = []
    cancelled(return_state=True)
    assert client.read_flow_run(begun[0]).state.is_cancelling()
    ((record, *which),) = at_exit
    record(*which)
    assert client.read_flow_run(begun[0]).state.is_cancelled()


def test_what_a_cancelled_flow_has_called_is_cancelled(client):
    """A worker cancels the outer flow run: the attempt below was recorded as preempted, and its flow run could end Crashed."""

    @flow
    def called():
        before = is_being_cancelled(flow_run.id)
        client.set_flow_run_state(begun[0], Cancelling(), force=True)
        return before, is_being_cancelled(flow_run.id)

    @task(cache_policy=NO_CACHE)
    def call():
        return called()

    @flow
    def cancelled():
        begun.append(UUID(flow_run.id))
        seen.append(call())
        raise RuntimeError

    begun, seen = [], []
    with pytest.raises(RuntimeError):
        cancelled()
    assert seen == [(False, True)]
    assert not is_being_cancelled(str(uuid.uuid4()))
    with api_that_answers(200, b"<html>under maintenance</html>"):
        assert not is_being_cancelled(str(begun[0]))
        assert not is_unknown(str(begun[0]))


def test_a_terminated_training_does_not_wait_for_the_end_of_a_maintenance(prefect_server, client):
    """Prefect's client repeats requests until then, without a limit, and the ranks were killed meanwhile."""
    refused = []

    def refuse(method: str, path: str, response: Response) -> Response:
        if "/flow_runs/" not in path or len(refused) == 3:
            return response
        refused.append(f"{method} {path}")
        return Response(503, b"{}", {"Prefect-Maintenance": "true", "Retry-After": "0"})

    this = client.create_flow_run(flow(lambda: None, name="maintained"), state=Cancelling())
    with proxied(prefect_server.url) as proxy, temporary_settings({PREFECT_API_URL: f"{proxy.endpoint}/api"}):
        proxy.change = refuse
        assert not is_being_cancelled(str(this.id))
        assert len(refused) == 1


def test_a_flow_run_of_a_deployment_goes_on_without_the_flow_that_has_started_it(client, pool):
    started = begin(client, pool).model_copy(update={"parent_task_run_id": uuid.uuid4()})
    assert [it.id for it in flow_runs_from(client, started)] == [started.id]


def test_the_state_of_a_training_that_its_timeout_ended_says_what_is_safe(client, pool):
    assert leading.set_terminated_state in train.on_failure_hooks
    safe_work = "work is safe up to step 3"
    for name, message in (("TimedOut", f"exceeded timeout; {safe_work}"), ("Failed", "exceeded timeout")):
        failed = begin(client, pool, "background", Failed(name=name, message="exceeded timeout"))
        outcome = Outcome(1, "preempted", str(failed.id), "preemption", f"terminated (CancelledError); {safe_work}")
        leading._record_termination(outcome)
        leading.set_terminated_state(train, failed, failed.state)
        state = client.read_flow_run(failed.id).state
        assert (state.name, state.message) == (name, message)


def test_hooks_of_the_caller_do_not_replace_the_one_that_sets_the_state_of_a_terminated_training():
    def told(flow, flow_run, state):
        pass

    hooked = train.with_options(on_crashed=[told], on_failure=[told]).with_options(name="mine", on_failure=[told])
    assert hooked.on_crashed_hooks == hooked.on_failure_hooks == [leading.set_terminated_state, told]
    assert sweep.with_options(on_failure=[told]).on_failure_hooks == [told]


@pytest.mark.parametrize(("elapsed_s", "by"), [(99, "timeout_seconds=80"), (60, "CancelledError")])
def test_what_is_recorded_of_a_timeout_names_it(monkeypatch, elapsed_s, by):
    began = datetime.now(timezone.utc) - timedelta(seconds=elapsed_s)
    context = SimpleNamespace(flow=SimpleNamespace(timeout_seconds=80.0), start_time=began)
    monkeypatch.setattr(outcomes, "FlowRunContext", SimpleNamespace(get=lambda: context))
    termination = Termination(30)
    termination.request(CancelledError())
    assert outcomes._terminated_by(termination, 30) == by


def check_that_it_tries_once():
    """The storage is away."""

    def get_bytes(_):
        raise ConnectionResetError

    away = SimpleNamespace(url="memory://away", get_bytes=get_bytes)
    with pytest.raises(StorageError, match="failed 1 times"):
        RetryingStorage(lambda: away, RetryPolicy(deadline_s=0, first_wait_s=0, longest_wait_s=0)).get_bytes("x")


def test_a_terminated_evaluation_does_not_retry_for_longer_than_its_process_lives(tmp_path, monkeypatch):
    checked = []

    def evaluate_one(*_, termination, **__):
        termination.end_retries()  # as once its grace has ended
        check_that_it_tries_once()
        checked.append(None)

    monkeypatch.setattr(evaluation, "evaluate_checkpoint", evaluate_one)
    store = CheckpointStore.open(tmp_path / "store", "run")
    Attempt(store).session().report({}, folder(tmp_path / "c", a="1"))
    assert evaluate("json:loads", store.spec.url, "run") == {}
    assert len(checked) == 1


def test_the_outcome_of_a_terminated_sweep_is_tried_once(tmp_path, monkeypatch):
    recorded = []

    def record(_, __, outcome):
        check_that_it_tries_once()
        recorded.append(outcome.ending)

    @contextmanager
    def cancelled(termination, _):
        termination.request(CancelledInPrefect())
        yield

    monkeypatch.setattr(sweeping, "cancellable", cancelled)
    monkeypatch.setattr(sweeping, "record_outcome", record)
    run_config, search = RunConfig(name="sweep", storage=tmp_path), SearchConfig(metric="loss")
    with pytest.raises(CancelledInPrefect):
        sweep(f"{SUPPORT / 'trainings.py'}:report_a_name", {"lr": uniform(0, 1)}, search=search, run=run_config)
    assert recorded == ["cancelled"]


def test_a_sweep_is_cancellable_and_has_recorded_that_before_its_page_is_shown(monkeypatch, tmp_path):
    """It went on to its end where it was cancelled and its worker was gone. Prefect may be slow, and its process be killed."""
    recorded = []

    @contextmanager
    def cancelled(termination, _):
        termination.request(CancelledInPrefect())
        yield

    @contextmanager
    def page(run, *_):
        try:
            yield
        finally:
            recorded.extend(read_outcomes(run))

    monkeypatch.setattr(sweeping, "cancellable", cancelled)
    monkeypatch.setattr(sweeping, "show_sweep", page)
    with pytest.raises(CancelledInPrefect):
        sweep(
            f"{SUPPORT / 'trainings.py'}:report_a_name",
            {"lr": uniform(0, 1)},
            search=SearchConfig(metric="loss"),
            run=RunConfig(name="sweep", storage=tmp_path),
        )
    (outcome,) = read_outcomes(CheckpointStore.open(tmp_path, "sweep"))
    assert recorded == [outcome]
    assert outcome.ending == "cancelled"
    assert outcome.error == "cancelled (in Prefect); trials that ran go on when the sweep is started again"


def test_an_evaluation_that_watches_is_cancellable(monkeypatch, tmp_path):
    """It went on until the training had ended."""

    @contextmanager
    def cancelled(termination):
        termination.request(CancelledInPrefect())
        yield

    monkeypatch.setattr(evaluation, "suspendable", cancelled)
    claim_attempt(CheckpointStore.open(tmp_path, "run"), Owner.current(), world_size=1)
    with pytest.raises(CancelledInPrefect):
        evaluate("json:loads", tmp_path, "run", watch=True, poll_s=60)


def test_a_training_stays_where_nothing_more_urgent_could_begin(client, pool):
    this = begin(client, pool, "background", Pending(), Running())
    assert find_interruption(client, this, yields_to_urgent=True) is None
    urgent = begin(client, pool, "urgent", Scheduled(name="Late"))
    found = find_interruption(client, this, yields_to_urgent=True)
    assert found.reason == f"gave way to the more urgent flow run {urgent.name!r}"
    assert find_interruption(client, this, yields_to_urgent=False) is None
    after_it = begin(client, pool, "background", Pending(), Running())
    assert find_interruption(client, after_it, yields_to_urgent=True) is None  # workers have chosen it though that one waited
    queue = client.read_work_queue(urgent.work_queue_id)
    client.update_work_queue(queue.id, concurrency_limit=1)
    assert find_interruption(client, this, yields_to_urgent=True) is not None
    begin(client, pool, "urgent", Pending(), Running())
    assert find_interruption(client, this, yields_to_urgent=True) is None  # that takes the only slot
    client.update_work_queue(queue.id, concurrency_limit=2, is_paused=True)
    assert find_interruption(client, this, yields_to_urgent=True) is None
    client.update_work_queue(queue.id, is_paused=False)
    assert find_interruption(client, this, yields_to_urgent=True) is not None
    client.update_work_pool(pool, WorkPoolUpdate(is_paused=True))
    assert find_interruption(client, this, yields_to_urgent=True) is None
    client.update_work_pool(pool, WorkPoolUpdate(is_paused=False))
    equal = begin(client, pool, "urgent", Pending(), Running())
    assert find_interruption(client, equal, yields_to_urgent=True) is None


@pytest.fixture
def yielding(client, pool):
    """A function that begins a training with `yields_to_urgent`, in a queue of the pool."""
    client.create_work_queue("idle", work_pool_name=pool, priority=9)
    return lambda queue: begin(client, pool, queue, Pending(), Running(), run={"name": "run", "yields_to_urgent": True})


def test_as_many_trainings_give_way_as_urgent_flow_runs_wait(client, pool, yielding):
    """All of them left, for a flow run that needs one slot: the least urgent and youngest one loses least."""
    idle, old, young = (yielding(queue) for queue in ("idle", "background", "background"))
    begin(client, pool, "idle", Pending(), Running(), run={"name": "run"})

    def leave(*trainings):
        found = {it.name: find_interruption(client, it, yields_to_urgent=True) for it in trainings}
        return {name: interruption.reason for name, interruption in found.items() if interruption is not None}

    def reason(urgent):
        return f"gave way to the more urgent flow run {urgent.name!r}"

    first = begin(client, pool, "urgent", Scheduled(name="Late"))
    assert leave(old, young, idle) == {idle.name: reason(first)}
    second = begin(client, pool, "urgent", Scheduled(name="Late"))
    assert leave(old, young, idle) == {idle.name: reason(first), young.name: reason(second)}
    client.set_flow_run_state(idle.id, Scheduled(name="Yielded"), force=True)  # and the slot that it leaves is not taken yet
    assert leave(old, young) == {young.name: reason(second)}


def test_another_training_gives_way_if_the_one_whose_turn_it_is_leaves_no_slot(client, pool, yielding, monkeypatch):
    """It may be dead."""
    trainings = [yielding("background") for _ in range(3)]
    urgent = begin(client, pool, "urgent", Scheduled(name="Late"))

    def leave_after(passed_s):
        now = urgent.state.timestamp + timedelta(seconds=passed_s)
        monkeypatch.setattr(urgency, "datetime", SimpleNamespace(now=lambda _: now))
        return [find_interruption(client, it, yields_to_urgent=True) is not None for it in trainings]

    assert [leave_after(passed_s) for passed_s in (-30, 119, 121, 241)] == [
        [False, False, True],
        [False, False, True],
        [False, True, True],
        [True, True, True],
    ]


def test_a_flow_run_of_a_deployment_that_another_flow_has_started_gives_way(client, pool, monkeypatch):
    monkeypatch.setattr(interruptions, "_POLL_S", 0.01)
    this = begin(client, pool, "background", Pending(), Running()).model_copy(update={"parent_task_run_id": uuid.uuid4()})
    monkeypatch.setattr(interruptions, "current_flow_run", lambda: this)
    begin(client, pool, "urgent", Scheduled(name="Late"))
    termination = Termination(5.0)
    with pytest.raises(Pause) as left, interruptible(termination, yields_to_urgent=True):
        termination.outlast(lambda: wait_until(lambda: termination.is_requested, "the request", every_s=0.01))
    assert left.value.state.name == "Yielded"


def test_flow_runs_beyond_the_first_page_of_the_api_count(client, pool, monkeypatch):
    """With pages of two flow runs; Prefect's own have 200."""
    read = client.read_flow_runs
    monkeypatch.setattr(client, "read_flow_runs", lambda *, limit=2, **asked: read(limit=limit, **asked))
    monkeypatch.setattr(paging, "_PAGE", 2)
    this = begin(client, pool, "background", Pending(), Running())
    urgent = begin(client, pool, "urgent", Scheduled(name="Late"))
    for _ in range(3):
        client.create_flow_run_from_deployment(urgent.deployment_id, state=Running())
    client.update_work_queue(urgent.work_queue_id, concurrency_limit=3)
    assert find_interruption(client, this, yields_to_urgent=True) is None
    client.update_work_queue(urgent.work_queue_id, concurrency_limit=4)
    for _ in range(3):
        client.create_flow_run_from_deployment(this.deployment_id, state=Scheduled(name="Late"))
    found = find_interruption(client, this, yields_to_urgent=True)
    assert found.reason == f"gave way to the more urgent flow run {urgent.name!r}"


def test_only_flow_runs_of_more_urgent_queues_are_listed_and_those_under_way_once(client, pool, monkeypatch):
    """Each training with `yields_to_urgent` listed all late flow runs of its work pool, every five seconds."""
    this = begin(client, pool, "background", Pending(), Running())
    most_urgent = begin(client, pool, "urgent", Pending(), Running())
    for deployed in (this, this, most_urgent, most_urgent):
        client.create_flow_run_from_deployment(deployed.deployment_id, state=Scheduled(name="Late"))
    client.update_work_queue(most_urgent.work_queue_id, concurrency_limit=1)
    read, listed = client.read_flow_runs, []

    def record(**asked):
        listed.append(read(**asked))
        return listed[-1]

    monkeypatch.setattr(client, "read_flow_runs", record)
    assert find_interruption(client, this, yields_to_urgent=True) is None
    assert [[(it.work_queue_name, it.state.name) for it in page] for page in listed] == [
        [("urgent", "Late")] * 2,
        [("urgent", "Running")],
    ]
    assert find_interruption(client, most_urgent, yields_to_urgent=True) is None
    assert len(listed) == 2


@pytest.mark.parametrize("is_in_subflow", [False, True])
@pytest.mark.parametrize("ends_by", ["Ctrl-C", "timeout"])
def test_a_training_that_a_task_in_a_thread_calls_ends_when_its_flow_does(is_in_subflow, ends_by):
    """Ctrl-C, SIGTERM and a timeout reach the main thread alone, which then waits for the tasks: the training went on."""
    begun, has_ended, gives_up = threading.Event(), threading.Event(), threading.Event()

    @flow
    def below():
        train_here()

    @task(cache_policy=NO_CACHE)
    def train_in_thread():
        (below if is_in_subflow else train_here)()

    def train_here():
        with terminated_with_caller():
            termination = Termination(30)

            def lead():
                begun.set()
                while not termination.is_requested and not gives_up.wait(0.01):
                    pass
                has_ended.set()

            termination.outlast(lead)

    @flow
    def pipeline():
        timer = threading.Timer(60, gives_up.set)
        timer.daemon = True
        timer.start()
        train_in_thread.submit()
        assert begun.wait(60)
        if ends_by == "Ctrl-C":
            raise KeyboardInterrupt
        raise TimeoutError  # as Prefect's alarm does in the flow's thread, after `timeout_seconds`

    if ends_by == "Ctrl-C":
        with pytest.raises(KeyboardInterrupt):
            pipeline()
    else:
        assert pipeline.with_options(timeout_seconds=600)(return_state=True).name == "TimedOut"
    assert has_ended.is_set()
    assert not gives_up.is_set()


def test_a_flow_that_does_not_wait_for_the_task_of_a_training_ends_it_only_by_an_interruption():
    switch, runner = TerminationSwitch(), ThreadPoolTaskRunner()
    with runner:
        _switches_of(runner, None).append(switch)
    with suppress(ValueError), runner:
        raise ValueError("of the flow's own")
    assert switch.cause is None
    with suppress(KeyboardInterrupt), runner:
        raise KeyboardInterrupt
    assert isinstance(switch.cause, TERMINATIONS)
