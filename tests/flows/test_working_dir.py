"""A training whose code comes along to its machines."""

import sys

import pytest
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows import Hosts, RunConfig, ScalingConfig, train

pytestmark = pytest.mark.timeout(120)

TRAIN = """
import os
import torch.distributed as dist
from pathlib import Path
from beside import VALUE

def main():
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, [VALUE, Path("settings.txt").read_text(), __file__, os.getcwd()])
    return told
"""


@pytest.mark.parametrize("cluster", [None, Hosts(["a", "b"], command="exec", leader_address="127.0.0.1", wait_s=0)])
def test_ranks_run_in_a_copy_of_the_working_directory(tmp_path, monkeypatch, cluster):
    monkeypatch.setattr(sys, "path", list(sys.path))
    project = tmp_path / "project"
    project.mkdir()
    for name, text in {"training_of_project.py": TRAIN, "beside.py": "VALUE = 7", "settings.txt": "slow"}.items():
        (project / name).write_text(text)
    run = RunConfig(name="run", storage=str(tmp_path / "store"), working_dir=str(project))
    scaling = ScalingConfig(num_workers=2, cluster=cluster)
    result = train("training_of_project:main", None, scaling, run)
    assert len(result.return_value) == 2
    for value, settings, file, cwd in result.return_value:
        assert (value, settings, file) == (7, "slow", f"{cwd}/training_of_project.py")
        assert not cwd.startswith(str(project))
    assert len(CheckpointStore.open(run.storage, "run").keys("run/code/")) == 1
