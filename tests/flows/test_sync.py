"""Trainings whose machines share no storage."""

import shutil
import sys
from pathlib import Path

import pytest
from full_disk import copy_until_the_second_manifest
from prefect.filesystems import RemoteFileSystem
from prefect_torch.ckpt import CommitFailedError
from prefect_torch.flows import FailureConfig, Result, RunConfig, ScalingConfig, SyncConfig, train


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
def test_another_machine_goes_on_from_what_rsync_brought_elsewhere(tmp_path):
    rsync = "rsync -a {source} {target}"
    sync = SyncConfig(upload=rsync, download=rsync, target=str(tmp_path / "there"), period_s=3600)
    config = {"lr": 0.3, "epochs": 2}

    def on(machine: str, **changes) -> RunConfig:
        return RunConfig(
            name="run", storage=str(tmp_path / machine), sync=sync.model_copy(update=changes), storage_deadline_s=0
        )

    first = train("sweep_trainings:climb", config, run=on("one"))
    assert first.checkpoint.step == 1
    shutil.rmtree(tmp_path / "one")
    second = train("sweep_trainings:climb", {**config, "epochs": 4}, run=on("other"))
    assert [row["step"] for row in second.metrics_dataframe.to_dict("records")] == [0, 1, 2, 3]
    assert second.attempts == 2
    assert Result.from_storage(tmp_path / "there", "run").metrics == second.metrics  # all is there, the metrics too

    failing = {"upload": copy_until_the_second_manifest}
    run = RunConfig(
        name="failing",
        storage=str(tmp_path / "one"),
        sync=SyncConfig(**failing, download=rsync, target=str(tmp_path / "there")),
        storage_deadline_s=0,
    )
    with pytest.raises(CommitFailedError, match="the disk there is full"):
        train("sweep_trainings:climb", config, run=run, failure=FailureConfig(max_infrastructure_failures=0))
    assert Result.from_storage(tmp_path / "one", "failing").checkpoint.step == 0
    assert Result.from_storage(tmp_path / "there", "failing").checkpoint.step == 0


def test_the_ranks_of_a_machine_with_their_working_directory_download_nothing(tmp_path, monkeypatch):
    """Their machine has packed it, and downloaded the run before it began the attempt."""
    downloads = tmp_path / "downloads"

    def upload(source, target):
        shutil.copytree(source, target, dirs_exist_ok=True)

    def download(source, target):
        with downloads.open("a") as file:
            file.write(f"{source}\n")
        upload(source, target)

    monkeypatch.setattr(sys, "path", list(sys.path))
    (project := tmp_path / "project").mkdir()
    (project / "short_training.py").write_text("def main():\n    pass\n")
    sync = SyncConfig(upload=upload, download=download, target=str(tmp_path / "there"))
    run = RunConfig(name="run", storage=str(tmp_path / "here"), sync=sync, working_dir=project)
    train("short_training:main", None, ScalingConfig(num_workers=2), run)
    assert downloads.read_text() == f"{tmp_path}/there/run/\n"


def test_a_training_on_an_sftp_server_resumes_from_it(sshd, tmp_path):
    block = RemoteFileSystem(basepath=f"sftp://127.0.0.1{tmp_path}/store", settings=sshd.options())
    run = RunConfig(name="run", storage=block)
    config = {"lr": 0.3, "epochs": 4, "killed_at": 2}
    result = train("sweep_trainings:climb", config, run=run, failure=FailureConfig(retry_delay_s=[0]))
    assert result.attempts == 2
    assert result.checkpoint.step == 3
    with result.checkpoint.as_directory() as directory:
        assert (Path(directory) / "state.json").read_text() == '{"epoch": 3}'
    assert Result.from_storage(tmp_path / "store", "run").metrics == result.metrics
