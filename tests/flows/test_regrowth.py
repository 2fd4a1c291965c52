"""A training that goes on with more ranks when its cluster has grown."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from agents import WITHOUT_COMPILER
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts, read_outcomes
from prefect_torch.flows import FailureConfig, Hosts, RunConfig, ScalingConfig, train

pytestmark = pytest.mark.timeout(200)
NO_RESTARTS = FailureConfig(max_failures=0, max_infrastructure_failures=0, max_preemptions=0)


def test_a_training_goes_on_with_more_ranks_after_a_checkpoint_once_there_is_room(tmp_path, caplog):
    """Its first attempt waits for that in epoch 1; its last one finishes, and asks for no more."""
    caplog.set_level(logging.INFO)
    hosts = tmp_path / "hosts"
    hosts.mkdir()
    (hosts / "a").touch()

    def grow():
        deadline_s = time.monotonic() + 100
        while not (tmp_path / "1-1").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        (hosts / "b").touch()

    cluster = Hosts(
        ["a", "b"],
        command=f"test -e {hosts}/{{host}} && exec {{agent}}",
        leader_address="127.0.0.1",
        wait_s=0,
        environment=WITHOUT_COMPILER,
    )
    scaling = ScalingConfig(num_workers=(1, 2), cluster=cluster, regrow_after_s=0.1)
    run = RunConfig(name="run", storage=str(tmp_path / "store"))
    config = {"epochs": 4, "told": str(tmp_path), "waits": {"1-1": "never"}}
    with ThreadPoolExecutor(1) as growing:
        grown = growing.submit(grow)
        result = train("machine_trainings:train_exactly", config, scaling, run, failure=NO_RESTARTS)
        grown.result()
    assert {**result.return_value, "weights": None} == {"begun": 2, "attempt": 2, "world size": 2, "weights": None}
    store = CheckpointStore.open(run.storage, "run")
    assert [(it.attempt, it.step, it.world_size) for it in store.list()] == [(1, 0, 1), (1, 1, 1), (2, 2, 2), (2, 3, 2)]
    assert [attempt.world_size for attempt in list_attempts(store)] == [1, 2]
    outcomes = [(it.ending, it.kind) for it in read_outcomes(store)]
    assert outcomes == [("preempted", None), ("completed", None)]
    assert "the cluster has room for 1 more" in caplog.text
