"""A training whose machines are this one, each process of which is killed by its pid."""

import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from agents import WITHOUT_COMPILER, agents
from prefect_servers import assert_task_runs_of_ranks_are_final, wait_until
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts, read_outcomes
from prefect_torch.flows import FailureConfig, Hosts, RankFailedError, RunConfig, ScalingConfig, train
from prefect_torch.tasks.gang import gang

pytestmark = pytest.mark.timeout(200)
HERE = {"command": "exec {agent}", "leader_address": "127.0.0.1", "wait_s": 0, "environment": WITHOUT_COMPILER}
# An agent whose ranks outlast every signal, as in the kernel, which waits for a GPU or a disk; they end with the agent.
STUCK_RANKS = """
import sys
from prefect_torch.tasks.gang.machine import agent

obey = agent._Rank.obey
agent._Rank.obey = lambda rank, order: order in ("terminate", "kill") or obey(rank, order)
agent._END_S = 0.0
sys.exit(agent.main(sys.argv[4:]))
"""


def test_a_training_that_completes_within_the_grace_of_its_machine_is_not_repeated(tmp_path):
    cluster = Hosts(["a"], **HERE)
    run = RunConfig(name="run", storage=str(tmp_path / "store"))
    failure = FailureConfig(max_failures=0, max_infrastructure_failures=0, max_preemptions=0)
    scaling = ScalingConfig(num_workers=2, cluster=cluster.model_copy(update={"ranks_per_host": 2}))
    result = train("machine_trainings:complete_on_a_terminated_machine", {}, scaling, run, failure=failure)
    assert result.return_value == "complete"
    (outcome,) = read_outcomes(CheckpointStore.open(run.storage, "run"))
    assert outcome.ending == "completed"


def test_machines_that_are_taken_away_before_any_checkpoint_are_failures_of_the_infrastructure(tmp_path):
    """As at a time limit that is too short: nothing would ever be saved, without an end."""
    run = RunConfig(name="run", storage=str(tmp_path / "store"))
    failure = FailureConfig(grace_s=0, max_infrastructure_failures=1)
    with pytest.raises(RankFailedError, match="machine a is being terminated"):
        train(
            "machine_trainings:lose_the_machine",
            {"attempts": 2},
            ScalingConfig(cluster=Hosts(["a"], **HERE)),
            run,
            failure=failure,
        )
    outcomes = read_outcomes(CheckpointStore.open(run.storage, "run"))
    assert [(it.ending, it.kind) for it in outcomes] == [("failed", "infrastructure")] * 2


def test_a_rank_its_guard_and_an_agent_are_killed_one_after_the_other(tmp_path):
    """The two ranks go on each time; without an agent, on the machine that is left. No process outlives what started it.

    After one failure the ranks are forked again by the servers that are there; after two, the machines are asked for again.
    """
    servers = []

    def disturb():
        for attempt, victim in enumerate(("rank", "guard", "agent"), 1):
            wait_until((tmp_path / f"{attempt}-{attempt}").exists, f"epoch {attempt} of attempt {attempt}")
            agent = next(iter(agents()))
            (server,) = [it for it in agent.children() if "fork_server" in " ".join(it.cmdline())]
            (guard,) = server.children()
            (rank,) = guard.children()
            servers.append(server.pid)
            {"rank": rank, "guard": guard, "agent": agent}[victim].kill()
            ended = [guard, rank] if attempt == 1 else [agent, server, guard, rank]
            assert not psutil.wait_procs(ended, 30)[1]

    config = {"epochs": 5, "told": str(tmp_path), "waits": dict.fromkeys(("1-1", "2-2", "3-3"), "never")}
    cluster = Hosts(["a", "b"], ranks_per_host=1, **HERE)
    run = RunConfig(name="run", storage=str(tmp_path / "store"))
    failure = FailureConfig(max_failures=0, max_infrastructure_failures=3)
    with ThreadPoolExecutor(1) as disturber:
        disturbed = disturber.submit(disturb)
        result = train(
            "machine_trainings:train_exactly", config, ScalingConfig(num_workers=(1, 2), cluster=cluster), run, failure=failure
        )
        disturbed.result()
    assert (result.return_value["begun"], result.return_value["world size"]) == (3, 1)
    store = CheckpointStore.open(run.storage, "run")
    assert [attempt.world_size for attempt in list_attempts(store)] == [2, 2, 2, 1]
    assert [(it.ending, it.kind) for it in read_outcomes(store)] == [("failed", "infrastructure")] * 3 + [("completed", None)]
    assert_task_runs_of_ranks_are_final(run.storage)
    assert servers[0] == servers[1] != servers[2]
    assert not agents()


def test_a_machine_whose_ranks_cannot_be_killed_is_lost_and_another_one_used(tmp_path, monkeypatch, caplog):
    """Nothing waits for it longer than the minute, which here are two looks that find no other rank left."""
    waits = tmp_path / "waits"
    scripts = {"a": 'exec "$@"', "b": f'exec {sys.executable} {tmp_path}/stuck.py "$@"', "c": f'test -e {waits} && exec "$@"'}
    for name, text in {**scripts, "stuck.py": STUCK_RANKS}.items():
        (tmp_path / name).write_text(text)
    looks = iter(range(2))

    def wait(has_exited, _):
        num_left = 1 if next(looks, None) is not None else 0
        wait_until(lambda: len(has_exited.__self__.running()) <= num_left, "ranks end")
        return has_exited()

    monkeypatch.setattr(gang, "wait_until", wait)
    cluster = Hosts(list("abc"), ranks_per_host=1, **{**HERE, "command": f"exec sh {tmp_path}/{{host}} {{agent}}"})
    run = RunConfig(name="run", storage=str(tmp_path / "store"))
    failure = FailureConfig(max_failures=1, max_infrastructure_failures=0)
    scaling = ScalingConfig(num_workers=2, cluster=cluster)
    result = train("machine_trainings:fail_beside_a_rank_that_waits", {"waits": str(waits)}, scaling, run, failure=failure)
    assert result.return_value == 2
    outcomes = read_outcomes(CheckpointStore.open(run.storage, "run"))
    assert [(it.ending, it.kind) for it in outcomes] == [("failed", "user"), ("completed", None)]
    assert "rank 0 has failed" in outcomes[0].error
    assert "machine b is given up, since its ranks have not exited" in caplog.text
    assert_task_runs_of_ranks_are_final(run.storage)
    wait_until(lambda: not agents(), "the agent of b ends, and its rank with it")
