"""A server that loses its leases ends trainings with a concurrency limit, which resume, and no others."""

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import yaml
from forked_programs import Popen
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect_servers import postgres, postgres_program, server_in_use, wait_until
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import read_outcomes
from prefect_torch.ckpt.runs.history import read_history
from prefect_torch.deployments import create_work_pool, deploy, make_deployment, resume_crashed, serve
from prefect_torch.deployments.command_line.doctor.software_checks import check_api
from process_trees import kill_tree

SUPPORT = Path(__file__).parents[1] / "support"
DEPLOYMENTS = yaml.safe_load((Path(__file__).parents[2] / "prefect.yaml").read_text())["deployments"]


@pytest.fixture(scope="module")
def prefect_server(tmp_path_factory):
    """A server with PostgreSQL where there is one: with SQLite, it may give up an event of a crash, which it may not write."""
    with ExitStack() as stack:
        url = stack.enter_context(postgres()) if postgres_program("initdb") else None
        patient = {"PREFECT_SERVER_EVENTS_EXPIRED_BUCKET_BUFFER": "P1D"}
        yield stack.enter_context(server_in_use(tmp_path_factory.mktemp("prefect"), url, **patient))


@pytest.fixture
def served(prefect_server, tmp_path):
    """The folder of two trainings that another process serves, one with a limit and one without."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": prefect_server.api,
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PYTHONPATH": str(SUPPORT),
    }
    with Popen([sys.executable, str(SUPPORT / "serve_limited.py"), str(tmp_path)], env=environment) as server:
        try:
            yield tmp_path
        finally:
            kill_tree(server.pid)


def begin(client, name):
    wait_until(partial(client.read_automations_by_name, f"Resume train/{name}"), "the automation")
    deployment = client.read_deployment_by_name(f"train/{name}")
    return client.create_flow_run_from_deployment(deployment.id)


def flow_runs(client, name):
    chosen = DeploymentFilter(id=DeploymentFilterId(any_=[client.read_deployment_by_name(f"train/{name}").id]))
    return client.read_flow_runs(deployment_filter=chosen)


def newest(store):
    return max(((manifest.attempt, manifest.step) for manifest in store.list()), default=(0, -1))


def has_ended(client, flow_run):
    return client.read_flow_run(flow_run.id).state.is_final()


@pytest.mark.timeout(400)
def test_a_lost_lease_is_a_preemption_and_without_one_a_server_may_restart(client, prefect_server, served):
    limited, free = (CheckpointStore.open(str(served / name), "run") for name in ("limited", "free"))
    first, unlimited = begin(client, "limited"), begin(client, "free")
    wait_until(lambda: newest(limited) >= (1, 3) and newest(free) >= (1, 3), "reports")

    lease = client.read_flow_run(first.id).state.state_details.deployment_concurrency_lease_id
    client.request("POST", "/v2/concurrency_limits/decrement-with-lease", json={"lease_id": str(lease)})
    wait_until(lambda: newest(limited)[0] == 2, "the resumed training")
    (served / "limited" / "end-2").touch()
    wait_until(lambda: len(flow_runs(client, "limited")) == 2, "the second flow run")
    (again,) = (it for it in flow_runs(client, "limited") if it.id != first.id)
    wait_until(partial(has_ended, client, again), "its end")
    ended, completed = read_outcomes(limited)
    assert [it.metrics["told"] for it in read_history(limited) if it.attempt == 1][-1], "the function is told, and returns"
    safe = max(it.step for it in limited.list() if it.attempt == 1)  # that of the report before, if it was under way
    assert (ended.ending, ended.kind, completed.ending) == ("preempted", "preemption", "completed")
    assert ended.error.startswith(f"terminated (CancelledError); work is safe up to step {safe} ")
    state = client.read_flow_run(first.id).state
    assert state.is_crashed()
    assert ended.error in state.message
    assert client.read_flow_run(again.id).state.is_completed()

    prefect_server.stop()
    at_restart = newest(free)
    prefect_server.start()
    wait_until(lambda: newest(free) >= (1, at_restart[1] + 12), "reports for two renewals after the restart")
    (served / "free" / "end-1").touch()
    wait_until(partial(has_ended, client, unlimited), "the end")
    assert client.read_flow_run(unlimited.id).state.is_completed()
    assert [outcome.ending for outcome in read_outcomes(free)] == ["completed"]


def test_a_limit_whose_lease_is_in_memory_is_warned_of(client, recwarn, monkeypatch):
    create_work_pool("warned-pool", "process")
    deployment_id = deploy("warned", "my_training:train_fn", work_pool="warned-pool", max_restarts=1)
    assert not recwarn.list
    client._client.patch(f"/deployments/{deployment_id}", json={"concurrency_limit": 1}).raise_for_status()
    with pytest.warns(UserWarning, match="'warned' has a concurrency limit: each flow run holds a lease"):
        resume_crashed(deployment_id)
    (found, restarts) = (it for it in check_api() if it.check in ("deployments", "restarts"))
    assert restarts.status == "ok", "this server notices a death a day later, too"
    assert (found.status, "warned" in found.found) == ("warning", True)
    assert "work-queue set-concurrency-limit" in found.advice

    limited = make_deployment("limited-too", "my_training:train_fn")
    limited.concurrency_limit = 1
    monkeypatch.setattr("prefect.serve", lambda *_: None)
    with pytest.warns(UserWarning, match="'limited-too' has a concurrency limit"):
        serve(limited)


@pytest.mark.parametrize("entry", DEPLOYMENTS, ids=lambda entry: entry["name"])
def test_no_deployment_of_prefect_yaml_needs_a_lease(entry):
    assert "concurrency_limit" not in entry
    assert entry["work_pool"]["work_queue_name"] != "default"


def test_what_resumes_is_named_once_its_queue_has_a_limit(client):
    """A flow run whose machine vanished kept the only slot, and its resumer waited for it for ever."""

    def deploy_again():
        deploy("crowded", "my_training:train_fn", work_pool="crowded-pool", work_queue="crowded", max_restarts=1)
        return [it for it in check_api() if it.check == "queues" and "train-crowded" in it.found]

    create_work_pool("crowded-pool", "process")
    assert deploy_again() == []
    queue = client.read_work_queue_by_name("crowded", work_pool_name="crowded-pool")
    client.update_work_queue(queue.id, concurrency_limit=1)
    (told,) = (it for it in check_api() if it.check == "queues")
    assert (told.status, "train-crowded" in told.found) == ("warning", True)
    assert deploy_again() == []


def test_what_resumes_does_not_wait_for_the_place_of_what_it_resumes(client):
    create_work_pool("limited-pool", "process")
    deployment_id = deploy("queued", "my_training:train_fn", work_pool="limited-pool")
    queue = client.request("POST", "/work_pools/limited-pool/queues/", json={"name": "one", "concurrency_limit": 1}).json()
    client._client.patch(f"/deployments/{deployment_id}", json={"work_queue_name": "one"}).raise_for_status()
    assert str(client.read_deployment(deployment_id).work_queue_id) == queue["id"]
    resume_crashed(deployment_id)
    assert client.read_deployment_by_name("resume/train-queued").work_queue_name == "default"
    client.update_work_queue(client.read_work_pool("limited-pool").default_queue_id, concurrency_limit=1)
    with pytest.warns(UserWarning, match="the resumer of 'queued' waits in the work queue 'default'"):
        resume_crashed(deployment_id)
