"""Automations of a real server: who crashed or fell silent is run again, and every new best is evaluated."""

import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID, uuid4

import httpx
import psutil
import pytest
from forked_programs import Popen
from prefect import Task, flow, task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    DeploymentFilter,
    DeploymentFilterId,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
)
from prefect.events import Event
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.logging import disable_run_logger
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Pending, Running, Scheduled
from prefect_servers import wait_until
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import newest_attempt
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.text import show_some
from prefect_torch.deployments import (
    create_work_pool,
    deploy,
    evaluate_new_best,
    make_deployment,
    resume_crashed,
    serve,
    training,
)
from prefect_torch.deployments.command_line.doctor.software_checks import check_api
from prefect_torch.deployments.restarts import restarted_in_pools
from prefect_torch.deployments.resuming import resume
from prefect_torch.flows import RunConfig, sweep, train
from prefect_torch.flows.monitoring.events.heartbeats import HEARTBEAT
from prefect_torch.flows.monitoring.pages.head import write_head
from prefect_torch.flows.monitoring.restarted import CallTry, EarlierTries, Restart, restarted_before
from prefect_torch.flows.monitoring.text import page_url
from prefect_torch.flows.run_names import default_run_name, name_run
from prefect_torch.tasks.prefect_api.flow_run import flow_run_above
from prefect_torch.tasks.training.leadership import lineage_of
from prefect_torch.tasks.training.liveness import may_be_led
from process_trees import kill_tree

SUPPORT = Path(__file__).parents[1] / "support"
DEFAULTS = {"silent_s": 540.0, "confirm_s": 200.0, "pending_s": 1800.0}
UPTAKE_S = 2.0  # the server takes an automation up, or its change, some time after it answered; until then it sees no event
pytestmark = pytest.mark.usefixtures("prefect_server")


@flow
def judge(checkpoint: str, threshold: float = 0.0):
    """What a user would deploy to evaluate checkpoints."""


@task
def judge_once():
    """What a flow run that got so far has run."""


@pytest.fixture(scope="module")
def trained(prefect_server):
    """A deployment in a work pool without workers, so that flow runs stay as a test leaves them."""
    create_work_pool("pool", "process")
    return deploy("trained", "my_training:train_fn", run=RunConfig(storage="/store"), work_pool="pool", tags=["t"])


def begin(client, deployment_id, end=None, **run):
    """Return a flow run that is running, or has ended."""
    flow_run = take(client, deployment_id, **run)
    for state in (Running(), *([] if end is None else [end])):
        client.set_flow_run_state(flow_run.id, state)
    return client.read_flow_run(flow_run.id)


def take(client, deployment_id, **run):
    """Return a flow run that a worker has taken, and not begun."""
    parameters = {"run": {"storage": "/store", **run}}
    flow_run = client.create_flow_run_from_deployment(deployment_id, parameters=parameters)
    client.set_flow_run_state(flow_run.id, Pending())
    return client.read_flow_run(flow_run.id)


def beat(client, flow_run, age_s):
    """Let a heartbeat of a flow run be known that is so old."""
    about = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}"}
    heartbeat = Event(event=HEARTBEAT, resource=about, occurred=datetime.now(timezone.utc) - timedelta(seconds=age_s))
    tell(client, heartbeat)
    wait_until(partial(is_known, client, heartbeat), "the heartbeat")


def tell(client, event):
    client.request("POST", "/events", json=[event.model_dump(mode="json")])


def is_known(client, event):
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)  # an event may be of a clock that is ahead
    body = {"filter": {"id": {"id": [str(event.id)]}, "occurred": {"until": tomorrow.isoformat()}}}
    return client.request("POST", "/events/filter", json=body).json()["total"] == 1


def flow_runs_of(client, deployment):
    chosen = DeploymentFilter(id=DeploymentFilterId(any_=[client.read_deployment_by_name(deployment).id]))
    return client.read_flow_runs(deployment_filter=chosen)


def resumed(client, flow_run, confirm_s=0.0, **options):
    with disable_run_logger():
        again = resume.fn(str(flow_run.id), confirm_s=confirm_s, **options)  # not as a flow run: those take seconds
    return None if again is None else client.read_flow_run(UUID(again))


def test_a_crashed_flow_run_is_run_again_once_on_its_own_run(client, trained):
    crashed = begin(client, trained, Crashed(), resume="never")
    again = resumed(client, crashed)
    assert again.deployment_id == trained
    assert again.name == f"{crashed.name}-restart-1"
    assert again.parameters["train_fn"] == "my_training:train_fn"
    assert again.parameters["run"]["name"] == default_run_name(crashed.name, str(crashed.id))
    assert again.parameters["run"]["storage"] == "/store"
    assert sorted(again.tags) == ["restart", "t"]
    assert resumed(client, crashed).id == again.id
    of_crashed = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[crashed.id]))
    assert [it.data for it in client.read_artifacts(artifact_filter=of_crashed)] == [
        f"Restart 1 of 3: [{again.name}]({page_url('flow-run', again.id)})"
    ]
    assert Restart.of(again) == Restart(1, crashed.id, crashed.name)
    assert Restart.of(crashed) is None


def test_a_restart_has_the_queue_and_the_job_variables_of_the_crashed_flow_run(client, trained):
    crashed = client.create_flow_run_from_deployment(trained, work_queue_name="high", job_variables={"memory": 7})
    for state in (Pending(), Running(), Crashed()):
        client.set_flow_run_state(crashed.id, state)
    again = resumed(client, crashed)
    assert (again.work_queue_name, again.job_variables) == ("high", {"memory": 7})


def test_a_crashed_flow_run_that_was_retried_and_crashed_once_more_is_run_again_once_more(client, trained):
    crashed = begin(client, trained, Crashed())
    first = resumed(client, crashed)
    client.set_flow_run_state(first.id, Cancelled(), force=True)
    for state in (Scheduled(), Pending(), Running(), Crashed()):
        client.set_flow_run_state(crashed.id, state, force=True)
    second = resumed(client, crashed)
    assert second.id != first.id
    assert second.name == f"{crashed.name}-restart-1"
    assert second.parameters["run"] == first.parameters["run"]
    assert resumed(client, crashed).id == second.id
    of_crashed = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[crashed.id]))
    assert [page_url("flow-run", second.id) in it.data for it in client.read_artifacts(artifact_filter=of_crashed)] == [True]


def test_a_chain_of_restarts_keeps_its_run_and_has_an_end(client, trained):
    first = begin(client, trained, Crashed(), name="named")
    second = resumed(client, first, max_restarts=2)
    client.set_flow_run_state(second.id, Crashed(), force=True)
    third = resumed(client, second, max_restarts=2)
    assert third.name == f"{first.name}-restart-2"
    assert third.parameters["run"]["name"] == "named"
    client.set_flow_run_state(third.id, Crashed(), force=True)
    assert resumed(client, third, max_restarts=2) is None


def kill_for_memory(client, flow_run):
    """Let Prefect's Kubernetes worker have told that a flow run's container was killed, as prefect-kubernetes 0.7 does."""
    related = {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.role": "flow-run"}
    about = {"prefect.resource.id": "prefect.kubernetes.pod.1f", "kubernetes.reason": "OOMKilled"}
    killed = Event(event="prefect.kubernetes.pod.evicted", resource=about, related=[related])
    tell(client, killed)
    wait_until(partial(is_known, client, killed), "the pod's event")


def test_a_training_that_kubernetes_killed_for_memory_is_run_again_only_as_often_as_asked(client, trained):
    crashed = begin(client, trained, Crashed())
    assert resumed(client, crashed) is not None
    kill_for_memory(client, crashed)
    assert resumed(client, crashed) is None
    told_by_message = begin(client, trained, Crashed(message="Container 'job' was killed: OOMKilled"))
    assert resumed(client, told_by_message) is None

    parameters = {"run": {"storage": "/store"}, "failure": {"max_out_of_memory_failures": 1}}
    first = client.create_flow_run_from_deployment(trained, parameters=parameters)
    client.set_flow_run_state(first.id, Crashed(), force=True)
    kill_for_memory(client, first)
    second = resumed(client, first, max_restarts=9)
    client.set_flow_run_state(second.id, Crashed(), force=True)
    third = resumed(client, second, max_restarts=9)  # that one died of something else
    client.set_flow_run_state(third.id, Crashed(), force=True)
    kill_for_memory(client, third)
    assert resumed(client, third, max_restarts=9) is None


def test_a_run_that_begins_anew_does_so_once_whichever_of_its_flow_runs_lived_long_enough(client, trained):
    """A task run says nothing: its process may have been killed before the claim, which alone makes the fresh start."""
    store, anew = CheckpointStore.open("memory://anew", "anew"), RunConfig(resume="never")
    claim_attempt(store, Owner.current("of last week"), world_size=1)
    first = begin(client, trained, name="anew", resume="never")
    client.create_task_run(judge_once, first.id, "0", state=Running())
    client.set_flow_run_state(first.id, Crashed())
    second = resumed(client, first)
    client.set_flow_run_state(second.id, Crashed(), force=True)
    third = resumed(client, second)
    assert [it.parameters["run"]["resume"] for it in (second, third)] == ["never", "never"]

    flow_runs = (str(third.id), *restarted_before(client, third))
    assert flow_runs == (str(third.id), str(second.id), str(first.id))
    assert lineage_of(newest_attempt(store), anew, flow_runs) is None
    claim_attempt(store, Owner.current(str(first.id)), world_size=1)
    assert lineage_of(newest_attempt(store), anew, flow_runs) == 2
    client.delete_flow_run(second.id)
    assert restarted_before(client, third) == (str(second.id),)


@flow
def research():
    """What a user would deploy: it calls trainings."""


def begin_below(client, above, name, of, **options):
    """Return a subflow run that runs, below a flow run or one of its task runs, as Prefect's engine relates them."""
    call = client.create_task_run(Task(name=name, fn=of.fn), above.id, "0", name=name, state=Running())
    below = client.create_flow_run(of, parent_task_run_id=call.id, state=Pending(), **options)
    client.set_flow_run_state(below.id, Running())
    return client.read_flow_run(below.id)


def test_the_restart_of_a_flow_of_one_s_own_goes_on_with_the_trainings_that_it_calls(client):
    deployment_id = client.create_deployment(client.create_flow(research), "own", entrypoint="research.py:research")
    first = client.create_flow_run_from_deployment(deployment_id)
    client.set_flow_run_state(first.id, Running(), force=True)
    training = begin_below(client, first, "train", train)
    deeper = begin_below(client, training, "judge", judge)
    client.create_task_run(judge_once, deeper.id, "1", state=Running())
    for flow_run in (first, training):
        left = "\n".join(write_head("run", "running", (), "/store/run", 0.0))
        client.create_artifact(ArtifactCreate(key="run-summary", type="markdown", data=left, flow_run_id=flow_run.id))
    completed = begin_below(client, first, "completed", judge)
    client.set_flow_run_state(completed.id, Completed())
    named = CheckpointStore.open("memory://own", "named")
    claim_attempt(named, replace(Owner.current(str(training.id)), host="another machine"), world_size=1)

    client.set_flow_run_state(first.id, Crashed())
    second = resumed(client, first)
    dead = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[training.id, deeper.id])))
    assert [it.state.name for it in dead] == ["Crashed"] * 2
    task_runs = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[training.id, deeper.id])))
    assert [it.state.name for it in task_runs] == ["Crashed"] * 2
    of_both = ArtifactFilter(
        key=ArtifactFilterKey(any_=["run-summary"]), flow_run_id=ArtifactFilterFlowRunId(any_=[first.id, training.id])
    )
    pages = [it.data for it in client.read_artifacts(artifact_filter=of_both)]
    assert [page.splitlines()[2:5:2] for page in pages] == [["**lost**", "The process of its flow run is dead."]] * 2
    assert client.read_flow_run(completed.id).state.is_completed()
    assert not may_be_led(read_status(named))

    client.set_flow_run_state(second.id, Crashed(), force=True)
    third = resumed(client, second)
    below = [begin_below(client, it, "train", train) for it in (second, third)]
    assert [name_run(client, it) for it in below] == [name_run(client, training)] * 2


@pytest.mark.parametrize("others", [{}, {"run": "nightly", "failure": "mail"}, {"run": {"storage": "/store"}}], ids=range(3))
def test_a_flow_of_one_s_own_is_run_again_with_its_own_parameters_whatever_they_are_called(client, others):
    deployment_id = client.create_deployment(client.create_flow(research), "named-alike", entrypoint="research.py:research")
    parameters = {"train_fn": "my_training:train_fn", "day": "2026-11-30", **others}
    crashed = client.create_flow_run_from_deployment(deployment_id, parameters=parameters)
    client.set_flow_run_state(crashed.id, Crashed(), force=True)
    assert resumed(client, crashed).parameters == parameters


def test_a_sweep_is_run_again_on_its_own_run(client):
    deployment_id = client.create_deployment(client.create_flow(sweep), "again", entrypoint="sweep.py:sweep")
    crashed = client.create_flow_run_from_deployment(deployment_id, parameters={"train_fn": "my_training:train_fn"})
    client.set_flow_run_state(crashed.id, Crashed(), force=True)
    assert resumed(client, crashed).parameters["run"] == {"name": default_run_name(crashed.name, str(crashed.id))}


def test_a_subflow_run_of_a_deployment_outlives_the_flow_that_waits_for_it(client, trained):
    deployment_id = client.create_deployment(client.create_flow(research), "waits", entrypoint="research.py:research")
    first = client.create_flow_run_from_deployment(deployment_id)
    client.set_flow_run_state(first.id, Running(), force=True)
    call = client.create_task_run(judge_once, first.id, "0", state=Running())
    elsewhere = client.create_flow_run_from_deployment(trained, parent_task_run_id=call.id)
    client.set_flow_run_state(elsewhere.id, Running(), force=True)
    client.set_flow_run_state(first.id, Crashed())
    assert resumed(client, first) is not None
    assert client.read_flow_run(elsewhere.id).state.is_running()


def test_the_restart_of_a_flow_run_that_a_flow_started_goes_on_with_the_trainings_that_it_calls(client):
    """Nothing above the restart is known to Prefect, unlike above the flow run that crashed."""
    deployment_id = client.create_deployment(client.create_flow(research), "below", entrypoint="research.py:research")
    outer = client.create_flow_run_from_deployment(deployment_id)
    call = client.create_task_run(judge_once, outer.id, "0", state=Running())
    first = client.create_flow_run_from_deployment(deployment_id, parent_task_run_id=call.id)
    client.set_flow_run_state(first.id, Crashed(), force=True)
    second = resumed(client, first)
    client.set_flow_run_state(second.id, Crashed(), force=True)
    third = resumed(client, second)
    names = [name_run(client, begin_below(client, it, "train", train)) for it in (first, second, third)]
    assert names == [names[0]] * 3


def test_a_subflow_run_in_a_work_pool_outlives_the_flow_that_called_it(client, trained):
    """Prefect's infrastructure decorators bind a flow to a work pool: its run there has a container and no deployment."""
    deployment_id = client.create_deployment(client.create_flow(research), "bound", entrypoint="research.py:research")
    first = client.create_flow_run_from_deployment(deployment_id)
    client.set_flow_run_state(first.id, Running(), force=True)
    bound = begin_below(client, first, "train", train, work_pool_name="pool", job_variables={})
    below_bound = begin_below(client, bound, "judge", judge)
    assert flow_run_above(client, bound) is None
    assert flow_run_above(client, below_bound).id == bound.id
    client.set_flow_run_state(first.id, Crashed())
    assert resumed(client, first) is not None
    alive = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[bound.id, below_bound.id])))
    assert [it.state.name for it in alive] == ["Running"] * 2


def test_the_restart_of_a_flow_of_one_s_own_knows_the_earlier_tries_of_its_calls(client):
    deployment_id = client.create_deployment(client.create_flow(research), "tries", entrypoint="research.py:research")
    first = client.create_flow_run_from_deployment(deployment_id)
    below = begin_below(client, first, "train", train)
    begun = CallTry("call", ((str(first.id), 1),), "a process")
    begun.record(client, below.id)
    client.set_flow_run_state(first.id, Crashed(), force=True)
    again = resumed(client, first)
    restarted = restarted_before(client, again)
    assert str(below.id) in EarlierTries(CallTry("call", ((str(again.id), 1),), "another process"), restarted)
    assert str(below.id) in EarlierTries(replace(begun, steps=((str(first.id), 2),)), ())
    assert str(below.id) in EarlierTries(replace(begun, process="after a suspension"), ())
    assert str(below.id) not in EarlierTries(begun, ()), "in a loop of the same try"
    assert str(below.id) not in EarlierTries(replace(begun, call="another", process="another"), restarted)
    others = (str(again.id), str(uuid4()), "not of Prefect", None)  # one that recorded no try, and unknown ones
    assert [it in EarlierTries(begun, restarted) for it in others] == [False] * 4


@pytest.mark.parametrize("end", [Completed(), Failed(), Cancelled()], ids=lambda state: state.name)
def test_a_flow_run_that_ended_between_two_heartbeats_is_left_as_it_ended(client, trained, end):
    ended = begin(client, trained, end)
    beat(client, ended, age_s=3600)
    assert resumed(client, ended) is None
    assert client.read_flow_run(ended.id).state.type == end.type


def test_a_silent_flow_run_is_declared_dead_and_run_again(client, trained):
    silent = begin(client, trained)
    beat(client, silent, age_s=700)
    for name in ("train-digits", "rank-0"):
        client.create_task_run(judge_once, silent.id, name, name=name, state=Running())
    again = resumed(client, silent, silent_s=600)
    assert again.name == f"{silent.name}-restart-1"
    left = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[silent.id])))
    assert [it.state.name for it in left] == ["Crashed"] * 2
    state = client.read_flow_run(silent.id).state
    assert state.is_crashed()
    assert "No heartbeat for 600 s" in state.message


def test_a_flow_run_whose_heartbeat_comes_after_an_outage_of_the_server_is_left_alone(client, trained, monkeypatch):
    alive = begin(client, trained)
    beat(client, alive, age_s=3600)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            beat(client, alive, age_s=0)

    clock = SimpleNamespace(sleep=wait, monotonic=lambda: sum(waits))
    monkeypatch.setattr("prefect_torch.deployments.resuming.time", clock)
    assert resumed(client, alive, silent_s=540, confirm_s=200) is None
    assert len(waits) == 3
    assert client.read_flow_run(alive.id).state.is_running()
    dead = begin(client, trained)
    beat(client, dead, age_s=345)
    waits.append(0.0)
    assert resumed(client, dead, silent_s=540, confirm_s=200).name == f"{dead.name}-restart-1"
    assert sum(waits[4:]) == pytest.approx(200)


@pytest.mark.parametrize("state", [Cancelling(), Scheduled()], ids=lambda state: state.name)
def test_a_silent_flow_run_that_is_cancelled_or_retried_meanwhile_is_not_run_again(client, trained, monkeypatch, state):
    silent = begin(client, trained)
    beat(client, silent, age_s=3600)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        client.set_flow_run_state(silent.id, state, force=True)

    clock = SimpleNamespace(sleep=wait, monotonic=lambda: sum(waits))
    monkeypatch.setattr("prefect_torch.deployments.resuming.time", clock)
    assert resumed(client, silent, silent_s=540, confirm_s=5) is None
    assert waits == [5]
    assert client.read_flow_run(silent.id).state.type == state.type


@pytest.mark.parametrize("age_s", [None, 500, -30, -3000], ids=["never had any", "recent", "clock ahead", "hours ahead"])
def test_a_flow_run_that_may_be_alive_is_left_alone(client, trained, monkeypatch, age_s):
    alive = begin(client, trained)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if sum(waits) >= 90:
            beat(client, alive, age_s - 180)

    clock = SimpleNamespace(sleep=wait, monotonic=lambda: sum(waits))
    monkeypatch.setattr("prefect_torch.deployments.resuming.time", clock)
    if age_s is not None:
        beat(client, alive, age_s)
    assert resumed(client, alive, silent_s=600) is None
    assert client.read_flow_run(alive.id).state.is_running()


@pytest.mark.parametrize("age_s", [-3000, 300])
def test_a_silent_flow_run_whose_clock_was_ahead_is_dead_after_as_long_by_this_one(client, trained, monkeypatch, age_s):
    dead = begin(client, trained)
    beat(client, dead, age_s)
    waits = []
    clock = SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits))
    monkeypatch.setattr("prefect_torch.deployments.resuming.time", clock)
    assert resumed(client, dead, silent_s=30, confirm_s=20).name == f"{dead.name}-restart-1"
    assert sum(waits) == pytest.approx(30 if age_s < 0 else 20)


def test_a_flow_run_that_a_worker_took_and_never_began_is_run_again(client, trained):
    taken = take(client, trained)
    assert resumed(client, taken) is None
    assert client.read_flow_run(taken.id).state.is_pending()
    again = resumed(client, taken, pending_s=1e-6)
    assert again.name == f"{taken.name}-restart-1"
    assert again.parameters["run"]["name"] == default_run_name(taken.name, str(taken.id))
    assert "Pending for 1e-06 s" in client.read_flow_run(taken.id).state.message


def test_a_flow_run_that_begins_and_crashes_while_it_is_waited_for_is_run_again_once(client, trained, monkeypatch):
    taken, waits = take(client, trained), []

    def wait(seconds):
        waits.append(seconds)
        for state in (Running(), Crashed()):
            client.set_flow_run_state(taken.id, state, force=True)

    clock = SimpleNamespace(sleep=wait, monotonic=lambda: sum(waits))
    monkeypatch.setattr("prefect_torch.deployments.resuming.time", clock)
    again = resumed(client, taken, pending_s=1e-6, confirm_s=200)
    assert len(waits) == 1
    assert resumed(client, taken).id == again.id, "of the other trigger"


@pytest.mark.parametrize("states", [[Running()], [Scheduled(), Pending()]], ids=["begun", "taken again"])
def test_a_flow_run_that_begins_after_an_outage_of_the_server_is_left_alone(client, trained, monkeypatch, states):
    taken = take(client, trained)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        if sum(waits) == 200:
            for state in states:
                client.set_flow_run_state(taken.id, state, force=True)

    clock = SimpleNamespace(sleep=wait, monotonic=lambda: sum(waits))
    monkeypatch.setattr("prefect_torch.deployments.resuming.time", clock)
    assert resumed(client, taken, pending_s=1e-6, confirm_s=200) is None
    assert sum(waits) == 200
    assert client.read_flow_run(taken.id).state.type == states[-1].type


@pytest.mark.timeout(180)
def test_the_automation_notices_what_was_taken_and_never_begun(client, trained):
    slow = deploy("late", "my_training:train_fn", run=RunConfig(storage="/store"), work_pool="pool")
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: 30}):
        resume_crashed(slow, begins_within=50)
    begun, taken = [], []

    def is_noticed():
        begun.append(f"prefect.flow-run.{begin(client, slow).id}")
        taken.append(f"prefect.flow-run.{take(client, slow).id}")
        return flow_runs_of(client, "resume/train-late")

    wait_until(is_noticed, "a flow run that resumes what never began", every_s=UPTAKE_S)
    resumers = [it.parameters for it in flow_runs_of(client, "resume/train-late")]
    assert {it["flow_run"] for it in resumers} <= set(taken)
    assert [(it["pending_s"], it["confirm_s"]) for it in resumers] == [(50, 50)] * len(resumers)


def test_where_a_flow_run_may_wait_for_a_machine_it_may_wait_for_ever(client):
    create_work_pool("queued", "kubernetes")
    run = RunConfig(storage="s3://bucket/runs")
    waiting = deploy("queued", "my_training:train_fn", run=run, work_pool="queued", image="image", max_restarts=1)
    for given, limit_s in [({}, None), ({"begins_within": timedelta(hours=2)}, 7200)]:
        automation = resume_crashed(waiting, **given)
        assert automation.actions[0].parameters["pending_s"] == limit_s
        assert ("Pending for 2" in automation.description) == (limit_s is not None)


def test_one_call_makes_one_automation_that_runs_what_resumes(client):
    called = deploy("called", "my_training:train_fn", run=RunConfig(storage="/store"), work_pool="pool")
    first = resume_crashed("train/called", max_restarts=1)
    assert resume_crashed(called, max_restarts=4).id == first.id
    (automation,) = client.read_automations_by_name("Resume train/called")
    assert automation.actions[0].parameters["max_restarts"] == 4
    assert client.read_deployment_by_name("resume/train-called").parameters == {"max_restarts": 4, **DEFAULTS}
    crashed = []

    def is_in_force():
        if not flow_runs_of(client, "resume/train-called"):
            crashed.append(f"prefect.flow-run.{begin(client, called, Crashed()).id}")
        return flow_runs_of(client, "resume/train-called")

    wait_until(is_in_force, "a flow run that resumes", every_s=UPTAKE_S)
    flow_run = flow_runs_of(client, "resume/train-called")[0]
    assert flow_run.parameters in [{"flow_run": it, "max_restarts": 4, **DEFAULTS} for it in crashed]
    assert f"prefect.flow-run.{resume(**flow_run.parameters)}" not in (*crashed, f"prefect.flow-run.{flow_run.id}")
    dead = client.read_flow_run(UUID(flow_run.parameters["flow_run"].removeprefix("prefect.flow-run.")))
    (resumer,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[f"resume-{dead.name}"])))
    assert resumer.parameters == flow_run.parameters


def test_a_new_deployment_forgets_no_flow_run_that_died_a_moment_ago(client):
    """An automation that is replaced awaits no heartbeat that the former one awaited."""
    options = {"run": RunConfig(storage="/store"), "work_pool": "pool"}
    again = deploy("again", "my_training:train_fn", **options, max_restarts=1)
    dead, beginning, ended = begin(client, again), take(client, again), begin(client, again)
    for flow_run in (dead, ended):
        beat(client, flow_run, age_s=5)
    client.set_flow_run_state(ended.id, Completed())

    def triggers():
        (automation,) = client.read_automations_by_name("Resume train/again")
        listed = client.request("POST", "/automations/filter", json={"limit": 200}).json()
        (stored,) = (it for it in listed if it["id"] == str(automation.id))
        return {it["id"] for it in stored["trigger"]["triggers"]}

    before = triggers()
    deploy("again", "my_training:train_fn", **options, max_restarts=1, tags=["new"])
    assert triggers() == before
    assert flow_runs_of(client, "resume/train-again") == []
    resume_crashed(again, max_restarts=2)
    assert triggers().isdisjoint(before)
    resumers = flow_runs_of(client, "resume/train-again")
    assert {it.parameters["flow_run"] for it in resumers} == {str(dead.id), str(beginning.id)}
    assert {it.parameters["max_restarts"] for it in resumers} == {2}


@pytest.mark.usefixtures("trained")  # for its work pool
def test_a_deployment_without_max_restarts_is_restarted_no_more_unless_by_a_call_of_its_own(client, monkeypatch):
    options = {"run": RunConfig(storage="/store"), "work_pool": "pool"}
    resumers = DeploymentFilter(name=DeploymentFilterName(any_=["train-unwatched"]))

    def watched():
        automations = client.read_automations_by_name("Resume train/unwatched")
        assert len(client.read_deployments(deployment_filter=resumers)) == len(automations)
        return len(automations)

    deploy("unwatched", "my_training:train_fn", **options, max_restarts=3)
    assert watched() == 1
    deploy("unwatched", "my_training:train_fn", **options)
    assert watched() == 0
    resume_crashed("train/unwatched")
    deploy("unwatched", "my_training:train_fn", **options)
    assert watched() == 1
    monkeypatch.setattr("prefect.serve", lambda *_: None)
    serve(make_deployment("unwatched", "my_training:train_fn"))
    assert watched() == 0


@pytest.mark.usefixtures("trained")
def test_a_key_that_may_not_see_automations_deploys_without_restarts(client, monkeypatch):
    def refuses(_, name):
        answer = httpx.Response(403, request=httpx.Request("POST", "http://127.0.0.1/api/automations/filter"))
        raise PrefectHTTPStatusError("Forbidden for url 'http://me:secret@host'", request=answer.request, response=answer)

    monkeypatch.setattr(SyncPrefectClient, "read_automations_by_name", refuses)
    said = r"may go on: Prefect refuses to tell .* 'Resume train/unseen' \(Forbidden for url 'http://host'\)"
    with pytest.warns(UserWarning, match=said):
        deployment_id = deploy("unseen", "my_training:train_fn", run=RunConfig(storage="/store"), work_pool="pool")
    assert client.read_deployment(deployment_id).name == "unseen"


@pytest.mark.usefixtures("trained")
def test_an_automation_that_somebody_has_paused_stays_paused(client, monkeypatch):
    options = {"run": RunConfig(storage="/store"), "work_pool": "pool"}
    paused = deploy("paused", "my_training:train_fn", **options, max_restarts=1)
    (automation,) = client.read_automations_by_name("Resume train/paused")
    client.pause_automation(automation.id)
    beat(client, begin(client, paused), age_s=700)
    deploy("paused", "my_training:train_fn", **options, max_restarts=1)
    deploy("paused", "my_training:train_fn", **options, max_restarts=2)
    monkeypatch.setattr("prefect.serve", lambda *_: None)
    serve(make_deployment("paused", "my_training:train_fn"), max_restarts=2)
    (automation,) = client.read_automations_by_name("Resume train/paused")
    assert (automation.enabled, automation.actions[0].parameters["max_restarts"]) == (False, 2)
    assert flow_runs_of(client, "resume/train-paused") == []


def test_a_served_flow_run_whose_heartbeats_ended_unnoticed_is_run_again(client, monkeypatch):
    """As if the server had been away when it died; `serve` looks for such flow runs as it starts, and after each outage."""
    deployment = make_deployment("left", "my_training:train_fn", run=RunConfig(storage="/store"))
    left = deployment.apply()
    dead, fresh, never_beat, ended = (begin(client, left) for _ in range(4))
    for flow_run, age_s in [(dead, 700), (fresh, 300), (ended, 700)]:
        beat(client, flow_run, age_s)
    client.set_flow_run_state(ended.id, Completed())

    class Served(Exception):  # noqa: N818 - no error
        pass

    def ends(*deployments):
        raise Served(*(it.name for it in deployments))

    monkeypatch.setattr("prefect.serve", ends)
    for _ in range(2):
        with pytest.raises(Served) as served:
            serve(deployment, max_restarts=2)
        assert served.value.args == ("left", "train-left")
    (resumer,) = flow_runs_of(client, "resume/train-left")
    assert resumer.parameters == {
        "flow_run": str(dead.id),
        "max_restarts": 2,
        "silent_s": 540.0,
        "confirm_s": 200.0,
        "pending_s": 1800.0,
    }
    again = resumed(client, dead, silent_s=600)
    assert again.name == f"{dead.name}-restart-1"
    assert [client.read_flow_run(it.id).state.is_running() for it in (dead, fresh, never_beat)] == [False, True, True]


def test_a_silent_flow_run_whose_resumer_died_is_looked_after_by_another(client, monkeypatch):
    """As if `serve` had been stopped before it had waited for a heartbeat: Prefect leaves such a resumer Running."""
    deployment = make_deployment("orphan", "my_training:train_fn", run=RunConfig(storage="/store"))
    beat(client, begin(client, deployment.apply()), age_s=700)
    monkeypatch.setattr("prefect.serve", lambda *_: None)
    found = []
    for ends in [(Pending(), Running()), (Pending(), Crashed()), (Cancelled(),)]:
        serve(deployment, max_restarts=2)
        (resumer,) = (it for it in flow_runs_of(client, "resume/train-orphan") if it.id not in found)
        assert resumer.state.is_scheduled()
        found.append(resumer.id)
        for state in ends:
            client.set_flow_run_state(resumer.id, state)
    serve(deployment, max_restarts=2)
    assert len(flow_runs_of(client, "resume/train-orphan")) == len(found)  # one that somebody has cancelled is wanted no more


def test_served_flow_runs_are_restarted_after_an_outage_only_while_their_automation_is_enabled(client, monkeypatch):
    deployment = make_deployment("watched", "my_training:train_fn", run=RunConfig(storage="/store"))
    told, started = [], []

    @contextmanager
    def remembers(after_outage):
        told.append(after_outage)
        yield

    def serves(*_):
        (automation,) = client.read_automations_by_name("Resume train/watched")
        beat(client, begin(client, deployment.apply()), age_s=700)
        for change in (client.pause_automation, client.resume_automation, client.delete_automation):
            change(automation.id)
            told[0]()
            started.append(len(flow_runs_of(client, "resume/train-watched")))
            beat(client, begin(client, deployment.apply()), age_s=700)

    monkeypatch.setattr(training, "runner_outlasts_outages", remembers)
    monkeypatch.setattr("prefect.serve", serves)
    serve(deployment, max_restarts=2)
    assert started == [0, 2, 2]


def test_an_outage_after_which_a_death_goes_unnoticed_is_warned_of(client, trained):
    resume_crashed(trained)
    (found,) = (it for it in check_api() if it.check == "restarts")
    watched = restarted_in_pools(client)
    assert "train-trained" in watched
    assert found.found.startswith(f"of {show_some(sorted(watched))}: ")
    assert (found.status, "more than 60 s" in found.found) == ("warning", True)
    assert "PREFECT_SERVER_EVENTS_EXPIRED_BUCKET_BUFFER=P1D" in found.advice
    assert "train-left" not in watched


def test_what_cannot_be_looked_after_is_refused(client, trained):
    make_deployment("served", "my_training:train_fn").apply()
    with pytest.raises(ValueError, match=r"'served' has no work pool.*serve\(..., max_restarts=n\)"):
        resume_crashed("train/served")
    with pytest.raises(ValueError, match="within=0:02:00 is not longer than the 180 s between two heartbeats"):
        resume_crashed(trained, within=120)
    with pytest.raises(ValueError, match="begins_within=0:02:00 is shorter than the 200 s for which the resumer waits"):
        resume_crashed(trained, begins_within=120)
    with pytest.raises(ValueError, match="max_restarts=-1: give 0 or more"):
        resume_crashed(trained, max_restarts=-1)
    for gone in ("train/gone", UUID(int=3)):
        with pytest.raises(
            ObjectNotFound, match=f"there is no deployment '{gone}'; those deployed are: .*train/served, .*train/trained"
        ):
            resume_crashed(gone)


def committed(step, is_best, run="digits"):
    labels = {"run": run, "storage": "/store", "checkpoint": f"/store/{run}/checkpoints/{step}", "is_best": is_best}
    about = {"prefect.resource.id": f"prefect-torch.checkpoint./store/{run}/checkpoints/{step}", **labels}
    return Event(event="prefect-torch.checkpoint.committed", resource=about)


def test_every_new_best_of_a_run_is_evaluated_and_nothing_else(client):
    judge.to_deployment("each").apply()
    automation = evaluate_new_best("judge/each", run="digits", parameters={"threshold": 0.5})
    assert evaluate_new_best("judge/each", run="digits", parameters={"threshold": 0.75}).id == automation.id

    def evaluated():
        return [flow_run.parameters for flow_run in flow_runs_of(client, "judge/each")]

    def is_in_force():
        if expected(0) not in evaluated():
            tell(client, committed(0, "true"))
        return expected(0) in evaluated()

    def expected(step):
        return {"checkpoint": f"/store/digits/checkpoints/{step}", "threshold": 0.75}

    wait_until(is_in_force, "the automation", every_s=UPTAKE_S)
    for event in (committed(1, "true"), committed(2, "false"), committed(3, "true", run="other"), committed(4, "true")):
        tell(client, event)
    wait_until(lambda: expected(1) in evaluated() and expected(4) in evaluated(), "two evaluations")
    later = [parameters for parameters in evaluated() if not parameters["checkpoint"].endswith("/0")]
    assert sorted(later, key=str) == [expected(1), expected(4)]


def has_ended(client, flow_run):
    return client.read_flow_run(flow_run.id).state.is_final()


def leader_of(server, storage):
    """Return the process that leads the training, below the one that serves, once it has committed a checkpoint."""
    runs = [path for path in storage.iterdir() if path.is_dir()] if storage.exists() else []
    stores = [CheckpointStore.open(str(storage), path.name) for path in runs]
    if not stores or not stores[0].list():
        return None
    attempt = newest_attempt(stores[0])
    children = {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
    return psutil.Process(attempt.owner.pid) if attempt.owner.pid in children else None


@pytest.mark.timeout(240)
def test_a_flow_process_that_is_killed_is_run_again_and_the_training_resumes(client, prefect_server, tmp_path):
    environment = {**os.environ, "PREFECT_API_URL": prefect_server.api, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    command = [sys.executable, str(SUPPORT / "served_training.py"), str(tmp_path)]
    with Popen(command, env=environment) as server:
        try:
            wait_until(partial(client.read_automations_by_name, "Resume train/mortal"), "the automation")
            deployment = client.read_deployment_by_name("train/mortal")
            first = client.create_flow_run_from_deployment(deployment.id)
            wait_until((tmp_path / "reported-1").exists, "a checkpoint")
            leader_of(server, tmp_path / "store").send_signal(signal.SIGKILL)
            (tmp_path / "end-2").touch()
            wait_until((tmp_path / "reported-2").exists, "the training's second attempt")
            wait_until(lambda: len(flow_runs_of(client, "train/mortal")) == 2, "the second flow run")
            (second,) = (it for it in flow_runs_of(client, "train/mortal") if it.id != first.id)
            wait_until(partial(has_ended, client, second), "the end")
        finally:
            kill_tree(server.pid)
    assert client.read_flow_run(first.id).state.is_crashed()
    assert client.read_flow_run(second.id).state.is_completed()
    (run,) = (tmp_path / "store").iterdir()
    store = CheckpointStore.open(str(tmp_path / "store"), run.name)
    assert [(manifest.attempt, manifest.step) for manifest in store.list()] == [(1, 0), (2, 1)]
    assert newest_attempt(store).resumed_from == f"{store.path}/checkpoints/{store.list()[0].id}"
