"""A machine that sees another storage than the flow's: refused by its name before the first step."""

import subprocess

import pytest
from agents import WITHOUT_COMPILER
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import read_outcomes
from prefect_torch.flows import Hosts, RankFailedError, RunConfig, ScalingConfig, train

HIDE = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]


def can_hide_folders() -> bool:
    try:
        return subprocess.run(HIDE, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_hide_folders(), reason="needs the right to mount in a namespace")
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
