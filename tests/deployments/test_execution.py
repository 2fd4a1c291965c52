"""What a container runs, told to end by SIGTERM: real processes, with less patience of Prefect's so that the test is short."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from forked_programs import Popen, run_program
from http_proxy import Response, proxied
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import AwaitingRetry, Cancelling, Suspended
from prefect.types.entrypoint import EntrypointType
from prefect_servers import wait_until
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import read_outcomes
from prefect_torch.deployments import create_work_pool, deploy, make_deployment
from prefect_torch.deployments.command_line import execution
from prefect_torch.flows import FailureConfig, Result, RunConfig
from slow_checkpoint import endless

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = str(Path(sys.executable).with_name("prefect-torch"))
LONG_S = 4.0  # than the second after which Prefect kills in hurried_execute


class Container:
    """A flow run, and processes that execute it one after the other."""

    def __init__(self, client, api, folder):
        self.client = client
        self.started = folder / "started"
        self.store = CheckpointStore.open(str(folder / "store"), "run")
        deployment = make_deployment(
            f"contained-{folder.name}",
            f"{SUPPORT / 'slow_checkpoint.py'}:train_slowly",
            {"started": str(self.started), "checkpoint_s": LONG_S},
            run=RunConfig(name="run", storage=str(folder / "store")),
            failure=FailureConfig(grace_s=60),
        )
        self.flow_run = client.create_flow_run_from_deployment(deployment.apply())
        self._environment = {**os.environ, "PREFECT_API_URL": api, "PREFECT__FLOW_RUN_ID": str(self.flow_run.id)}

    def start(self, behavior, *command):
        environment = {**self._environment, "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": behavior}
        return Popen([sys.executable, str(SUPPORT / "hurried_execute.py"), *command], env=environment)

    def terminate_when_training(self, process, before=lambda: None):
        def trains():
            assert process.poll() is None
            return self.started.exists()

        wait_until(trains, "the training")
        before()
        process.send_signal(signal.SIGTERM)
        return process.wait(90)

    def state(self):
        return self.client.read_flow_run(self.flow_run.id).state


@pytest.fixture
def container(prefect_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Prefect copies all of it to where the flow runs
    with get_client(sync_client=True) as client:
        yield Container(client, prefect_server.api, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("api", "said"), [(None, "has no flow run {}: set PREFECT_API_URL to"), ("http://127.0.0.1:1/api", "does not answer: ")]
)
def test_a_flow_run_that_cannot_be_read_is_one_sentence(prefect_server, api, said):
    api, flow_run_id = api or prefect_server.api, str(uuid4())
    done = run_program(
        [SCRIPT, "execute", flow_run_id],
        env={**os.environ, "PREFECT_API_URL": api},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"prefect-torch: {api} {said.format(flow_run_id)}")
    assert len(done.stderr.splitlines()) == 1


def test_a_state_that_cannot_be_proposed_is_one_sentence(monkeypatch):
    monkeypatch.setattr(execution.signal, "signal", lambda *_: None)
    with (
        temporary_settings({PREFECT_API_URL: "http://me:secret@127.0.0.1:1/api"}),
        pytest.raises(ConnectionError, match=r"^http://127\.0\.0\.1:1/api does not answer: "),
    ):
        execution._propose(uuid4(), AwaitingRetry())


@pytest.mark.timeout(300)
def test_a_flow_run_is_executed_though_the_server_has_no_database_as_it_begins(prefect_server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty_training.py").write_text("def train_fn(config):\n    pass\n")
    deployment = make_deployment(
        "short", f"{tmp_path}/empty_training.py:train_fn", run=RunConfig(storage=str(tmp_path / "store"))
    )
    failed = []

    def change(method: str, path: str, response: Response) -> Response:
        if path != f"/api/flow_runs/{flow_run.id}" or len(failed) == 5:
            return response
        failed.append(method)
        return Response(500, b"{}", {"Retry-After": "0.1"})

    with get_client(sync_client=True) as client, proxied(prefect_server.url) as proxy:
        flow_run = client.create_flow_run_from_deployment(deployment.apply())
        proxy.change = change
        environment = {**os.environ, "PREFECT_API_URL": f"{proxy.endpoint}/api"}
        done = run_program([SCRIPT, "execute", str(flow_run.id)], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, failed) == (0, ["GET"] * 5), done.stderr
        assert client.read_flow_run(flow_run.id).state.is_completed()


@pytest.mark.timeout(300)
def test_a_flow_run_begins_where_its_container_does_and_nothing_there_is_copied(prefect_server, client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "pipe")  # cannot be copied
    (tmp_path / "where.py").write_text("import os\ndef train_fn():\n    return os.getcwd()\n")
    create_work_pool("containers", "docker", image="registry/train")
    run = RunConfig(name="run", storage=str(tmp_path / "store"))
    flow_run = client.create_flow_run_from_deployment(deploy("where", "where.py:train_fn", run=run, work_pool="containers"))
    environment = {**os.environ, "PREFECT_API_URL": prefect_server.api}
    done = run_program([SCRIPT, "execute", str(flow_run.id)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Result.from_storage(run.storage, "run").return_value == str(tmp_path)


@pytest.mark.timeout(300)
def test_the_trainings_of_a_users_own_flow_may_have_any_grace():
    def longest_grace_s(**parameters):
        return execution._grace_s(SimpleNamespace(parameters=parameters))

    assert longest_grace_s(path="data.csv") == 3600
    assert longest_grace_s(train_fn="m:f", failure={"grace_s": 7}) == 7
    assert longest_grace_s(train_fn="m:f") == FailureConfig().grace_s


def test_a_cancelled_flow_that_does_not_end_is_killed(prefect_server, tmp_path, monkeypatch):
    """Nobody ends its container: it waited for ever. The limit is a second here, after the grace in the parameters."""
    monkeypatch.chdir(tmp_path)
    started = tmp_path / "started"
    environment = {**os.environ, "PREFECT_API_URL": prefect_server.api, "PYTHONPATH": str(SUPPORT)}
    with get_client(sync_client=True) as client:
        given = {"started": str(started), "failure": {"grace_s": 0}}
        deployment = endless.to_deployment("endless", parameters=given, entrypoint_type=EntrypointType.MODULE_PATH)
        flow_run = client.create_flow_run_from_deployment(deployment.apply())
        command = [sys.executable, str(SUPPORT / "hurried_execute.py"), "prefect-torch", "execute", str(flow_run.id)]
        with Popen(command, env=environment) as process:
            wait_until(started.exists, "the flow")
            client.set_flow_run_state(flow_run.id, Cancelling())
            try:
                process.wait(120)
            finally:
                process.kill()
        assert client.read_flow_run(flow_run.id).state.is_cancelled()


def test_prefects_own_command_kills_a_flow_that_still_checkpoints(container):
    """The fault is real: once Prefect waits for as long as one says, ours can go."""
    container.terminate_when_training(container.start("reschedule", "prefect", "flow-run", "execute"))
    assert container.store.list() == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("behavior", ["reschedule", "relinquish"])
def test_a_container_told_to_end_checkpoints_and_the_next_goes_on_in_the_same_flow_run(container, behavior):
    first = container.terminate_when_training(container.start(behavior, "prefect-torch", "execute"))
    assert [(it.attempt, it.step) for it in container.store.list()] == [(1, 7)]
    assert (first, container.state().name) == ((0, "AwaitingRetry") if behavior == "reschedule" else (1, "Running"))
    assert container.start(behavior, "prefect-torch", "execute").wait(120) == 0
    assert container.state().is_completed()
    endings = [(outcome.ending, outcome.return_value) for outcome in read_outcomes(container.store)]
    assert endings == [("preempted", None), ("completed", "resumed")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("behavior", ["reschedule", "crash", "relinquish"])
def test_a_flow_run_that_is_suspended_waits_though_its_container_is_told_to_end(container, behavior):
    """As by an operator who suspends it to empty a machine, and then does that: it began again on the next one."""

    def suspend():
        assert container.client.set_flow_run_state(container.flow_run.id, Suspended()).state.is_paused()

    process = container.start(behavior, "prefect-torch", "execute")
    assert container.terminate_when_training(process, before=suspend) == 0
    assert container.state().name == "Suspended"
    assert [(it.attempt, it.step) for it in container.store.list()] == [(1, 7)]
