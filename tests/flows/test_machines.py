"""Trainings on several hosts: network namespaces, whose cables can be cut."""

import json
import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import machine_trainings
import pytest
from agents import WITHOUT_COMPILER
from forked_programs import Popen
from network_hosts import NO_HOSTS, can_make_hosts, network
from prefect.settings import PREFECT_API_URL
from prefect_servers import assert_task_runs_of_ranks_are_final
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts, read_outcomes
from prefect_torch.flows import FailureConfig, Hosts, NotEnoughMachinesError, RunConfig, ScalingConfig, train
from prefect_torch.tasks.rank import spec

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = [pytest.mark.skipif(not can_make_hosts(), reason=NO_HOSTS), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with network(tmp_path_factory.mktemp("hosts"), *"abcde") as made:
        yield made


@pytest.fixture(scope="module")
def cut_off(hosts):
    """Hosts that a test leaves cut off, each with what will be known of it."""
    return {}


@pytest.fixture(autouse=True)
def nothing_is_left(hosts, cut_off):
    yield
    wait_for(lambda: not any(map(hosts.processes, set(hosts.names) - cut_off.keys())), 45, every_s=0.2)


def cluster(hosts, *names, **more):
    usual = {"wait_s": 0, "environment": WITHOUT_COMPILER}
    return Hosts(list(names), command=hosts.command, leader_address=hosts.address, **{**usual, **more})


def test_ranks_on_two_hosts_are_told_where_they_are(hosts, run, monkeypatch):
    """Two ranks on one host and one on the other: torchrun's variables, and a group of the user's own by env://.

    They also agree on a report as the ranks of large trainings do, with the messages of each host aggregated.
    """
    monkeypatch.setattr(spec, "MOST_SENDERS", 2)
    scaling = ScalingConfig(num_workers=3, cluster=cluster(hosts, "a", "b", ranks_per_host=2))
    result = train("machine_trainings:tell_places", {}, scaling, run)
    told = result.return_value
    assert [rank["host"] for rank in told] == ["a", "a", "b"]
    common = {"WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses["a"], "GLOO_SOCKET_IFNAME": "lan0"}
    for rank, (node, local, on_node) in zip(told, [(0, 0, 2), (0, 1, 2), (1, 0, 1)], strict=True):
        expected = {
            **common,
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(on_node),
            "GROUP_RANK": str(node),
            "NODE_RANK": str(node),
            "MASTER_PORT": told[0]["variables"]["MASTER_PORT"],
        }
        assert {name: rank["variables"][name] for name in expected} == expected
        assert rank["context"] == [node, local, on_node]
        assert rank["sum"] == rank["sum of my own group"] == 3.0
        assert rank["nodes"] == 2
    (manifest,) = CheckpointStore.open(run.storage, "run").list()
    assert [(file.path, file.rank) for file in manifest.files] == [(f"rank{rank}", rank) for rank in range(3)]


def test_machines_that_never_reached_each_other_are_named(hosts, run):
    """As behind a firewall that lets them reach only the flow's machine and that of rank 0."""
    scaling = ScalingConfig(num_workers=3, cluster=cluster(hosts, "a", "b", "c", ranks_per_host=1))
    failure = FailureConfig(max_infrastructure_failures=0)
    with (
        hosts.parted("b", "c"),
        pytest.raises(RuntimeError, match=r"machine (b does not reach machine c|c does not reach machine b) at "),
    ):
        train("machine_trainings:tell_places", {}, scaling, run, failure=failure)


def test_no_rank_is_started_unless_there_is_room_for_all(hosts, run, monkeypatch):
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_FORK_RANKS", "false")  # nor is what forks them
    scaling = ScalingConfig(num_workers=3, cluster=cluster(hosts, "a", "b", "nowhere", ranks_per_host=1))
    with pytest.raises(NotEnoughMachinesError) as caught:
        train("machine_trainings:tell_places", {}, scaling, run, failure=FailureConfig(max_infrastructure_failures=0))
    assert str(caught.value).startswith(
        "3 ranks wanted, the cluster has room for 2: a: 1; b: 1; nowhere: its command ended with 255: ssh: "
    )


def wait_for(condition, longest_s=120, *, every_s=0.02):
    deadline_s = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(every_s)


@pytest.fixture
def told(tmp_path):
    """A folder in which ranks tell how far they are, and are told to go on."""
    (tmp_path / "told").mkdir()
    return tmp_path / "told"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The result of six epochs on one machine."""
    config = {"epochs": 6, "told": str(tmp_path_factory.mktemp("undisturbed"))}
    run = RunConfig(name="run", storage=f"{config['told']}/store")
    return train("machine_trainings:train_exactly", config, ScalingConfig(num_workers=2), run)


def weights_at(step, storage):
    """Return the weights of the checkpoint of this step."""
    store, state = CheckpointStore.open(storage, "run"), machine_trainings.make_state()
    (manifest,) = [it for it in store.list() if it.step == step]
    store.checkpoint(manifest).load_state(state)
    return machine_trainings.weights_of(state["model"])


def test_a_cable_that_is_cut_costs_the_training_nothing_but_time(hosts, cut_off, run, told, undisturbed, caplog):
    """Six seconds without a cable are survived. One that stays cut costs a restart on the host in reserve.

    The cut is between the look of rank 0 for newer attempts and its manifest: on its host, it goes on and is refused.
    """
    cut_s, cut = [], []

    def disturb():
        wait_for(lambda: (told / "1-1").exists() and (told / "1-1").read_text())
        cut.append((told / "1-1").read_text())  # of the hosts, the first two that came are used
        other = next(host for host in hosts.names if host not in cut and hosts.find(host, "rank.main"))
        hosts.cut(other)
        time.sleep(6)
        hosts.mend(other)
        (told / "go").touch()
        wait_for((told / "commits").exists)
        hosts.cut(cut[0])
        cut_s.append(time.time())
        wait_for((told / "fence").exists, 30)

    config = {"epochs": 6, "told": str(told), "waits": {"1-1": "go"}, "fenced": 2}
    scaling = ScalingConfig(num_workers=2, cluster=cluster(hosts, "a", "b", "c"))
    with ThreadPoolExecutor(1) as disturber:
        disturbed = disturber.submit(disturb)
        result = train("machine_trainings:train_exactly", config, scaling, run)
        disturbed.result()
    watcher = ThreadPoolExecutor(1)
    longest_s = cut_s[0] + 60 - time.time()
    cut_off[cut[0]] = watcher.submit(wait_for, lambda: not hosts.processes(cut[0]), longest_s, every_s=0.2)
    watcher.shutdown(wait=False)
    assert (told / "fence").read_text() == "FencedError"
    assert result.return_value == {"begun": 2, "attempt": 2, "world size": 2, "weights": undisturbed.return_value["weights"]}
    store = CheckpointStore.open(run.storage, "run")
    assert [(it.attempt, it.step) for it in store.list()] == [(1, 0), (1, 1), *((2, step) for step in range(2, 6))]
    noticed_s = next(it.created for it in caplog.records if f"machine {cut[0]} is lost" in it.getMessage())
    assert noticed_s - cut_s[0] < 25
    outcomes = read_outcomes(store)
    assert [(it.ending, it.kind) for it in outcomes] == [("failed", "infrastructure"), ("completed", None)]
    assert f"machine {cut[0]} is lost: it has sent nothing for 10 s" in outcomes[0].error
    lines = [it.getMessage() for it in caplog.records if it.getMessage().startswith("waiting for go, line ")]
    assert {f"waiting for go, line {number}" for number in range(len(lines) // 2)} == set(lines)
    assert_task_runs_of_ranks_are_final(run.storage)


@contextmanager
def started_flow(hosts, run, told, **options):
    """Train on hosts d and e in a process of its own, which waits in its second and fifth epoch; it ends with the context."""
    config = {"epochs": 6, "told": str(told), "waits": {"1-1": "go", "1-4": "never"}}
    scaling = {"num_workers": 2, "use_gpu": False, "cluster": cluster(hosts, "d", "e").model_dump(mode="json")}
    arguments = [run.storage, "machine_trainings:train_exactly", *map(json.dumps, (config, scaling, {}))]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "PREFECT_API_URL": PREFECT_API_URL.value()}
    with Popen([sys.executable, SUPPORT / "run_on_gpus.py", *arguments], env=environment, **options) as flow:
        try:
            wait_for(lambda: (told / "1-1").exists() or flow.poll() is not None)
            yield flow
        finally:
            flow.kill()


def test_a_leader_that_is_stopped_for_15_s_loses_no_machine_and_no_line_and_leaves_nothing_when_it_is_killed(
    hosts, run, told, undisturbed, tmp_path
):
    def numbers(rank):
        said = re.findall(rf"'rank-{rank}' - waiting for (\w+), line (\d+)\n", (tmp_path / "output").read_text())
        assert [int(number) for _, number in said] == list(range(len(said)))
        return {awaited for awaited, _ in said}

    with (tmp_path / "output").open("wb") as output, started_flow(hosts, run, told, stdout=output, stderr=output) as flow:
        flow.send_signal(signal.SIGSTOP)
        time.sleep(15)
        flow.send_signal(signal.SIGCONT)
        (told / "go").touch()
        wait_for(lambda: (told / "1-4").exists() or flow.poll() is not None)  # of the first attempt: no machine was lost
        assert flow.poll() is None
        wait_for(lambda: all(numbers(rank) == {"go", "never"} for rank in range(2)))
        assert all(hosts.find(host, name) for host in "de" for name in ("rank.main", "guard.py", "fork_server"))
        flow.kill()
    wait_for(lambda: not any(map(hosts.processes, "de")), 20)  # agents give the leader up after 30 s of silence
    assert [(it.attempt, it.step) for it in CheckpointStore.open(run.storage, "run").list()] == [(1, step) for step in range(4)]
    assert weights_at(3, run.storage) == weights_at(3, Path(undisturbed.path).parent)


def test_what_is_left_on_a_host_that_stays_cut_off_ends_by_itself(hosts, cut_off):
    """After 30 s, of which others make use; the leader has long stopped to wait for it."""
    if not cut_off:
        pytest.skip("no host was cut off")
    for host, is_empty in list(cut_off.items()):
        try:
            is_empty.result()
        finally:
            hosts.mend(host)
            del cut_off[host]


def test_machines_that_are_taken_away_leave_a_smaller_training(hosts, run, told, undisturbed):
    """Of four wanted hosts three are there; one is going to be terminated, and then the agent of another is killed."""

    def disturb():
        wait_for((told / "1-2").exists)
        (agent,) = hosts.find("c", "machine.agent")
        agent.terminate()
        wait_for((told / "2-3").exists)
        (agent,) = hosts.find("b", "machine.agent")
        agent.kill()
        wait_for(lambda: not hosts.processes("b"), 8)  # before the leader would give it up by its silence

    config = {"epochs": 6, "told": str(told), "waits": {"1-2": "never", "2-3": "never"}}
    nobody = cluster(hosts, "a", "b", "c", "nowhere", ranks_per_host=1)
    scaling = ScalingConfig(num_workers=(1, 4), cluster=nobody)
    with ThreadPoolExecutor(1) as disturber:
        disturbed = disturber.submit(disturb)
        result = train("machine_trainings:train_exactly", config, scaling, run, failure=FailureConfig(grace_s=60))
        disturbed.result()
    assert result.return_value["weights"] == pytest.approx(undisturbed.return_value["weights"], rel=1e-4, abs=1e-6)
    store = CheckpointStore.open(run.storage, "run")
    assert [attempt.world_size for attempt in list_attempts(store)] == [3, 2, 1]
    outcomes = [(it.ending, it.kind) for it in read_outcomes(store)]
    assert outcomes == [("failed", "preemption"), ("failed", "infrastructure"), ("completed", None)]
    assert_task_runs_of_ranks_are_final(run.storage)
    assert [(it.attempt, it.step) for it in store.list()] == [
        *((1, step) for step in range(3)),
        *((3, step) for step in (3, 4, 5)),
    ]
