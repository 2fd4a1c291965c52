"""The process that leads a training is killed, ended, or started twice."""

import contextlib
import json
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from forked_programs import Popen
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling
from prefect_home import prepared_home
from prefect_servers import assert_ranks_ended, assert_task_runs_of_ranks_are_final
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, newest_attempt, read_outcomes
from prefect_torch.flows import Result
from prefect_torch.flows.monitoring.pages.live_artifact import artifact_key
from prefect_torch.flows.monitoring.text import flow_run_page
from servers import free_port, rclone_command, running

SUPPORT = Path(__file__).parents[1] / "support"
EXAMPLES = Path(__file__).parents[2] / "examples"
MARK = "PREFECT_TORCH_TEST_MARK"


_started: "list[Started]" = []


@pytest.fixture(autouse=True)
def nothing_outlives_a_test():
    """A test that fails leaves no program behind."""
    yield
    while _started:
        started = _started.pop()
        if started.process.poll() is None:
            started.kill()


class Started:
    """A program whose descendants can be found, wherever they hide, by a mark in their environment."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = Popen(
            [sys.executable, *arguments],
            env={**os.environ, MARK: self.mark, "PYTHONPATH": str(SUPPORT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # as at a terminal of its own
        )
        _started.append(self)

    def living(self) -> list[psutil.Process]:
        def is_ours(process):
            try:
                return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                return False

        return [process for process in psutil.process_iter() if is_ours(process)]

    def wait_for(self, condition):
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, "it did not come to pass"
            assert self.process.poll() is None, self.process.communicate()[0][-4000:]
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 30
        while living := self.living():
            assert time.monotonic() < deadline, [process.cmdline() for process in living]
            time.sleep(0.1)

    def finish(self, longest_s=120) -> str:
        output, _ = self.process.communicate(timeout=longest_s)
        return output


@pytest.fixture
def storage(tmp_path):
    return str(tmp_path / "store")


def start(storage, train_fn, config, checkpoint=None, environment=None, grace_s=10, **run):
    return Started(
        str(SUPPORT / "run_training.py"),
        *(storage, f"trainings:{train_fn}", json.dumps(config), json.dumps(run), json.dumps(checkpoint or {}), str(grace_s)),
        **(environment or {"PREFECT_API_URL": PREFECT_API_URL.value()}),
    )


def embedded_servers(leader):
    found = []
    for process in leader.living():
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [process] if "uvicorn" in process.cmdline() else []
    return found


def committed(storage):
    return CheckpointStore.open(storage, "run").list()


def result_of(output):
    return json.loads(next(line for line in output.splitlines() if line.startswith('{"returned"')))


def test_a_killed_leader_takes_its_ranks_along_and_the_next_start_continues_with_all_reports(storage):
    """The first checkpoints are pruned before the leader is killed, and with them all else that remembers their metrics."""
    keep_one = {"num_to_keep": 1}
    leader = start(storage, "train_epochs", {"epochs": 100, "pause_s": 0.1}, keep_one)
    leader.wait_for(lambda: committed(storage) and committed(storage)[-1].step >= 4)
    leader.kill()
    leader.assert_nothing_is_left()
    last = committed(storage)[-1]
    output = start(storage, "train_epochs", {"epochs": last.step + 3}, keep_one).finish()
    assert result_of(output) == {
        "returned": {"begun": last.step + 1, "attempt": 2},
        "resumed_from": f"{storage}/run/checkpoints/{last.id}",
    }
    result = Result.from_storage(storage, "run")
    assert [record.step for record in result.history] == list(range(last.step + 3))
    assert len(committed(storage)) == 1
    assert_task_runs_of_ranks_are_final(storage)


def summaries(store):
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=[f"{artifact_key(store.run, store.path)}-summary"]))
    with get_client(sync_client=True) as client:
        return [it.data for it in client.read_artifacts(artifact_filter=wanted, sort=ArtifactSort.UPDATED_DESC)]


@pytest.mark.parametrize(("resume", "goes_on"), [("auto", "continues the training"), ("never", "has begun the training anew")])
def test_the_page_of_a_killed_flow_run_links_to_the_one_that_continues_its_training(storage, resume, goes_on):
    leader = start(storage, "train_epochs", {"epochs": 1000, "pause_s": 0.1})
    store = CheckpointStore.open(storage, "run")
    leader.wait_for(lambda: committed(storage) and summaries(store))
    leader.kill()
    assert "**running** · attempt 1" in summaries(store)[0]
    start(storage, "train_epochs", {"epochs": committed(storage)[-1].step + 3}, resume=resume).finish()
    pages = summaries(store)
    assert len(pages) == 2
    assert all("running" not in page for page in pages)
    (killed,) = [page for page in pages if "**lost** · attempt 1" in page]
    page = flow_run_page(newest_attempt(store).owner.flow_run_id)
    assert f"Its process was killed or overtaken; [another flow run]({page}) {goes_on}." in killed


def test_even_children_in_sessions_of_their_own_end_with_the_leader(storage, tmp_path):
    pids = tmp_path / "pids"
    pids.mkdir()
    leader = start(storage, "hang_with_a_child", {"pids": str(pids)})
    leader.wait_for(lambda: len(list(pids.iterdir())) == 2 and all(file.read_text() for file in pids.iterdir()))
    leader.kill()
    leader.assert_nothing_is_left()


def test_a_second_living_leader_is_refused_and_one_that_takes_over_fences_the_first(storage):
    first = start(storage, "train_epochs", {"epochs": 400, "pause_s": 0.5})
    first.wait_for(lambda: len(committed(storage)) >= 1)
    refused = start(storage, "train_epochs", {"epochs": 1})
    output = refused.finish()
    assert refused.process.returncode != 0
    assert f"RunBusyError: run 'run' in {storage} is being trained by flow run" in output
    assert f"process {first.process.pid} on" in output
    assert first.process.poll() is None

    beyond_the_first = committed(storage)[-1].step + 100
    second = start(storage, "train_epochs", {"epochs": beyond_the_first}, takeover=True)
    assert result_of(second.finish())["returned"]["attempt"] == 2
    output = first.finish()
    assert first.process.returncode != 0
    assert "overtaken by attempt 2" in output
    assert "work is safe up to" not in output  # the second one is further
    newest = committed(storage)[-1]
    assert (newest.attempt, newest.step) == (2, beyond_the_first - 1)


def test_sigterm_lets_ranks_commit_a_last_checkpoint_though_all_processes_get_it(storage, tmp_path):
    """As those of a systemd unit do when it is stopped."""
    started = tmp_path / "started"
    leader = start(storage, "checkpoint_when_told", {"started": str(started)})
    leader.wait_for(started.exists)
    flow = psutil.Process(leader.process.pid)
    for process in (flow, *flow.children(recursive=True)):
        process.send_signal(signal.SIGTERM)
    output = leader.finish()
    assert leader.process.returncode != 0
    leader.assert_nothing_is_left()
    assert [manifest.metrics["epoch"] for manifest in committed(storage)] == [41], output[-3000:]
    assert "or after 10 s" in output  # of run_training.py, not the default
    assert "work is safe up to step 0" in output
    state = flow_run_state(storage)
    assert state.is_crashed()
    assert f"work is safe up to step 0 ({committed(storage)[0].id})" in state.message


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_is_closed_lets_ranks_commit_unless_that_is_ignored(storage, tmp_path, is_ignored):
    started = tmp_path / "started"
    shown, terminal = os.openpty()
    arguments = [storage, "trainings:checkpoint_when_told", json.dumps({"started": str(started)})]
    command = [*(["nohup"] if is_ignored else []), sys.executable, str(SUPPORT / "run_training.py"), *arguments]
    leader = subprocess.Popen(
        # At a terminal of its own, whatever this process ignores, as under nohup.
        ["setsid", "--ctty", "env", "--default-signal=HUP", *command],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), "PREFECT_API_URL": PREFECT_API_URL.value()},
        cwd=tmp_path,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    try:
        while not started.exists():
            assert leader.poll() is None
            if select.select([shown], [], [], 0.05)[0]:
                os.read(shown, 65536)
        os.close(shown)
        os.close(terminal)
        if is_ignored:
            with pytest.raises(subprocess.TimeoutExpired):
                leader.wait(1)
            leader.terminate()
        assert leader.wait(120) == -signal.SIGTERM
    finally:
        leader.kill()
    assert [manifest.metrics["epoch"] for manifest in committed(storage)] == [41]
    state = flow_run_state(storage)
    assert state.is_crashed()
    assert f"work is safe up to step 0 ({committed(storage)[0].id})" in state.message


@pytest.mark.parametrize("notice", [signal.SIGINT, signal.SIGTERM])
def test_the_first_checkpoint_that_is_committed_after_the_notice_is_the_last(storage, tmp_path, notice):
    goes_on = tmp_path / "goes_on"
    leader = start(storage, "commit_on_and_on", {"goes_on": str(goes_on)})
    leader.wait_for(lambda: committed(storage))
    leader.process.send_signal(notice)
    assert any("the ranks end with their next checkpoint" in line for line in leader.process.stdout)
    goes_on.touch()
    output = leader.finish()
    leader.assert_nothing_is_left()
    assert [manifest.step for manifest in committed(storage)] == [0, 1], output[-3000:]
    assert f"work is safe up to step 1 ({committed(storage)[-1].id})" in output
    (outcome,) = read_outcomes(CheckpointStore.open(storage, "run"))
    assert_ranks_ended(outcome.flow_run_id, rank_0="Completed", rank_1="Completed")  # by themselves, before the grace


def test_sigterm_ends_a_training_whose_storage_is_away_and_no_attempt_follows(tmp_path):
    """The reports, the outcome and the history are all refused; what is safe is told from memory."""
    port, folder = free_port(), tmp_path / "buckets"
    (folder / "bucket").mkdir(parents=True)
    stored = str(folder / "bucket")
    with running(rclone_command(port, folder), port) as server, ExitStack() as stack:
        environment = {name.upper(): value for name, value in server.options().items()}
        leader = start(
            "s3://bucket",
            "report_once_and_when_told",
            {},
            grace_s=3,
            environment={"PREFECT_API_URL": PREFECT_API_URL.value(), **environment},
        )
        stack.callback(leader.kill)
        leader.wait_for((folder / "bucket/run/metrics").exists)  # by then the leader knows of the commit
        stack.pop_all()
    leader.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output = leader.finish(90)
    assert leader.process.returncode != 0
    leader.assert_nothing_is_left()
    assert "the outcome of attempt 1 of run 'run' could not be written" in output, output[-3000:]
    assert len(list((folder / "bucket/run/attempts").iterdir())) == 1
    state = flow_run_state(stored)
    assert state.is_crashed()
    assert f"work is safe up to step 0 ({committed(stored)[0].id})" in state.message
    assert time.monotonic() - began < 60


def test_ctrl_c_lets_ranks_commit_and_is_told_though_the_embedded_server_gets_it_too(storage, tmp_path):
    started, home = tmp_path / "started", prepared_home(tmp_path / "home")
    embedded = {"PREFECT_HOME": str(home), "PREFECT_API_URL": ""}
    leader = start(storage, "checkpoint_when_told", {"started": str(started)}, environment=embedded)
    leader.wait_for(started.exists)
    os.killpg(leader.process.pid, signal.SIGINT)
    output = leader.finish()
    leader.assert_nothing_is_left()
    assert [manifest.metrics["epoch"] for manifest in committed(storage)] == [41], output[-3000:]
    assert "terminated (Ctrl-C); work is safe up to step" in output, output[-3000:]
    assert "ConnectError" not in output
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        assert database.execute("select state_type from flow_run").fetchall() == [("CRASHED",)]


@pytest.mark.timeout(500)
def test_an_embedded_server_that_dies_alone_is_started_again_and_told_the_end(storage, tmp_path):
    home = prepared_home(tmp_path / "home")
    embedded = {"PREFECT_HOME": str(home), "PREFECT_API_URL": ""}
    goes_on = tmp_path / "goes_on"
    leader = start(storage, "commit_on_and_on", {"goes_on": str(goes_on)}, environment=embedded)
    leader.wait_for(lambda: committed(storage))
    (server,) = embedded_servers(leader)
    server.kill()
    goes_on.touch()
    output = leader.finish(240)
    assert leader.process.returncode == 0, output[-4000:]
    assert "embedded server has died (exit code -9): starting it again" in output
    leader.assert_nothing_is_left()
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        assert database.execute("select state_type from flow_run").fetchall() == [("COMPLETED",)]


DIES_LATE = """
import sys
from prefect.flow_engine import FlowRunEngine
from prefect.server.api.server import SubprocessASGIServer
from prefect_torch.flows import RunConfig, train

tell_success = FlowRunEngine.handle_success

def die_and_tell(engine, result):
    SubprocessASGIServer().server_process.kill()
    return tell_success(engine, result)

FlowRunEngine.handle_success = die_and_tell
train("trainings:train_epochs", {"epochs": 1}, run=RunConfig(name="run", storage=sys.argv[1]))
"""


@pytest.mark.timeout(500)
def test_an_embedded_server_that_dies_after_the_body_is_started_again_and_told_the_end(storage, tmp_path):
    """Else the flow run is Running for ever, and its process waits for minutes to send the last lines."""
    home = prepared_home(tmp_path / "home")
    # However slow the second start is, these retries last longer.
    embedded = {"PREFECT_HOME": str(home), "PREFECT_API_URL": "", "PREFECT_CLIENT_MAX_RETRIES": "8"}
    leader = Started("-c", DIES_LATE, storage, **embedded)
    output = leader.finish(400)
    assert leader.process.returncode == 0, output[-4000:]
    leader.assert_nothing_is_left()
    with closing(sqlite3.connect(home / "prefect.db")) as database:
        assert database.execute("select state_type from flow_run").fetchall() == [("COMPLETED",)]


@pytest.mark.parametrize("kill_at", ["the server's process", "the server's database"])
def test_a_flow_killed_while_its_embedded_server_starts_leaves_none(tmp_path, kill_at):
    home = tmp_path / "home"
    flow = "import prefect, prefect_torch.flows\n@prefect.flow\ndef it(): pass\nit()"
    leader = Started("-c", flow, PREFECT_HOME=str(home), PREFECT_API_URL="")
    leader.wait_for(lambda: embedded_servers(leader))
    if kill_at == "the server's database":
        leader.wait_for((home / "prefect.db").exists)
    leader.kill()
    leader.assert_nothing_is_left()


def test_a_server_that_was_started_before_this_package_was_imported_does_not_outlive_a_killed_flow(tmp_path):
    ready = tmp_path / "ready"
    flow = f"""
import pathlib, time, prefect

@prefect.flow
def wait():
    from prefect_torch.tasks.prefect_api.embedded_server.tying import tie_running_servers

    tie_running_servers()
    pathlib.Path({str(ready)!r}).touch()
    time.sleep(600)

wait()
"""
    leader = Started("-c", flow, PREFECT_HOME=str(prepared_home(tmp_path / "home")), PREFECT_API_URL="")
    leader.wait_for(ready.exists)
    leader.kill()
    leader.assert_nothing_is_left()


def test_a_cancelled_flow_run_lets_ranks_commit_and_its_page_and_its_record_say_what_is_safe(storage, tmp_path):
    """As the UI's button and `prefect flow-run cancel` do it, to a flow run that a worker or `serve` runs."""
    started = tmp_path / "started"
    environment = {"PREFECT_API_URL": PREFECT_API_URL.value(), "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    server = Started(str(SUPPORT / "serve_training.py"), **environment)
    parameters = {
        "train_fn": f"{SUPPORT / 'trainings.py'}:checkpoint_when_told",
        "config": {"started": str(started)},
        "scaling": {"num_workers": 2},
        "run": {"name": "run", "storage": storage},
    }
    try:
        with get_client(sync_client=True) as client:
            server.wait_for(lambda: deployment_of(client) is not None)
            flow_run = client.create_flow_run_from_deployment(deployment_of(client).id, parameters=parameters)
            server.wait_for(started.exists)
            client.set_flow_run_state(flow_run.id, Cancelling())
            server.wait_for(lambda: is_final(client, flow_run.id))
            server.wait_for(lambda: len(server.living()) == 1)
            state = client.read_flow_run(flow_run.id).state
            page = summary_of(client, flow_run.id)
    finally:
        server.kill()
    assert state.is_cancelled(), state
    assert [manifest.metrics["epoch"] for manifest in committed(storage)] == [41]
    safe = f"work is safe up to step 0 ({committed(storage)[0].id}), where the next training named 'run' continues"
    (outcome,) = read_outcomes(CheckpointStore.open(storage, "run"))
    assert outcome == Outcome(1, "cancelled", str(flow_run.id), error=f"cancelled (TerminationSignal); {safe}")
    assert "**cancelled**" in page
    assert safe in page


def summary_of(client, flow_run_id):
    chosen = {"key": {"like_": "run-%-summary"}, "flow_run_id": {"any_": [str(flow_run_id)]}}
    (artifact,) = client.request("POST", "/artifacts/filter", json={"artifacts": chosen}).json()
    return artifact["data"]


def deployment_of(client):
    try:
        return client.read_deployment_by_name("train/cancelled-by-a-test")
    except ObjectNotFound:
        return None


def is_final(client, flow_run_id):
    return client.read_flow_run(flow_run_id).state.is_final()


def flow_run_state(storage):
    attempt = newest_attempt(CheckpointStore.open(storage, "run"))
    with get_client(sync_client=True) as client:
        return client.read_flow_run(attempt.owner.flow_run_id).state


def test_the_demo_killed_at_any_moment_continues_and_finishes(tmp_path):
    """At its start, at a restart and at a checkpoint; at last with Prefect's embedded server, which must not be left behind."""
    arguments = (str(EXAMPLES / "digits.py"), "--storage", str(tmp_path / "demo"))
    served = {"PREFECT_API_URL": PREFECT_API_URL.value()}
    embedded = {"PREFECT_HOME": str(prepared_home(tmp_path / "home")), "PREFECT_API_URL": ""}
    attempts, manifests = tmp_path / "demo/digits/attempts", tmp_path / "demo/digits/manifests"

    def kill_at(moment, environment):
        demo = Started(*arguments, **environment)
        demo.wait_for(moment)
        demo.kill()
        demo.assert_nothing_is_left()

    kill_at(attempts.exists, served)
    assert not list(manifests.glob("*.json"))
    restart = len(list(attempts.glob("*.json"))) + 2  # after the attempt whose rank kills itself
    kill_at(lambda: len(list(attempts.glob("*.json"))) == restart, served)
    before = set(manifests.glob("*.json"))
    assert before
    kill_at(lambda: set(manifests.glob("*.json")) - before, embedded)
    last = Started(*arguments, **embedded)
    output = last.finish()
    assert last.process.returncode == 0, output[-4000:]
    assert "epoch" in output
    last.assert_nothing_is_left()
