"""A machine that sees another storage than the flow's: refused by its name before the first step."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import machine_trainings
import pytest
from agents import WITHOUT_COMPILER, agents
from prefect_servers import wait_until
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts, read_outcomes
from prefect_torch.flows import FailureConfig, Hosts, RankFailedError, RunConfig, ScalingConfig, train
from prefect_torch.tasks.gang.machine import gathering

pytestmark = pytest.mark.timeout(200)
HIDE = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]


def can_hide_folders() -> bool:
    try:
        return subprocess.run(HIDE, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


can_hide = pytest.mark.skipif(not can_hide_folders(), reason="needs the right to mount in a namespace")


@can_hide
def test_a_machine_without_the_storage_is_named_before_the_first_step(tmp_path):
    store = tmp_path / "store"
    (tmp_path / "a").write_text('exec "$@"')
    (tmp_path / "b").write_text(f'mount -t tmpfs none {store} && exec "$@"')
    command = f"unshare --mount sh {tmp_path}/{{host}} {{agent}}"
    cluster = Hosts(["a", "b"], command=command, leader_address="127.0.0.1", wait_s=0, environment=WITHOUT_COMPILER)
    run = RunConfig(name="run", storage=str(store))
    store.mkdir()
    with pytest.raises(
        RankFailedError, match=r"rank 1 on machine b cannot see run 'run' in .*every rank needs the same storage"
    ):
        train("trainings:train_epochs", {"epochs": 1}, ScalingConfig(num_workers=2, cluster=cluster), run)
    written = CheckpointStore.open(run.storage, "run")
    assert [(it.ending, it.kind) for it in read_outcomes(written)] == [("failed", "final")]
    assert not written.list()


@can_hide
@pytest.mark.parametrize("hidden", ["the storage", "the function's module"])
def test_a_machine_that_lacks_what_earlier_attempts_had_is_avoided_and_the_training_goes_on(
    tmp_path, hidden, monkeypatch, caplog
):
    """It replaces one that is lost, as a machine that comes back from a reboot without its mounts."""
    folder, committed = tmp_path / "store", tmp_path / "1-1"
    folder.mkdir()
    lost = folder if hidden == "the storage" else Path(machine_trainings.__file__).parent
    hide = f"test -e {committed} && mount -t tmpfs none {lost} && "
    for host in "abc":
        (tmp_path / host).write_text(f'{hide if host == "c" else ""}exec "$@"')
    monkeypatch.setattr(gathering, "_MORE_S", 60.0)

    def disturb():
        wait_until(committed.exists, "a checkpoint is committed")
        (agent,) = [process for process, words in agents().items() if words[words.index("--name") + 1] == "b"]
        agent.kill()

    command = f"unshare --mount sh {tmp_path}/{{host}} {{agent}}"
    here = {"leader_address": "127.0.0.1", "wait_s": 0, "environment": WITHOUT_COMPILER, "ranks_per_host": 1}
    scaling = ScalingConfig(num_workers=(1, 2), cluster=Hosts(["a", "b", "c"], command=command, **here))
    config = {"epochs": 3, "told": str(tmp_path), "waits": {"1-1": "never"}}
    failure = FailureConfig(max_failures=0, max_infrastructure_failures=2)
    run = RunConfig(name="run", storage=str(folder))
    with ThreadPoolExecutor(1) as disturber:
        disturbed = disturber.submit(disturb)
        result = train("machine_trainings:train_exactly", config, scaling, run, failure=failure)
        disturbed.result()
    assert (result.return_value["attempt"], result.return_value["world size"]) == (3, 1)
    store = CheckpointStore.open(run.storage, "run")
    assert [attempt.world_size for attempt in list_attempts(store)] == [2, 2, 1]
    outcomes = read_outcomes(store)
    assert [(it.ending, it.kind) for it in outcomes] == [("failed", "infrastructure")] * 2 + [("completed", None)]
    assert "rank 1 of attempt 2 on machine c failed: " in outcomes[1].error
    assert "machine c is avoided for 5 minutes: it lacks what earlier attempts had" in caplog.text
