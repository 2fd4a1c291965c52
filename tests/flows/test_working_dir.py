"""A training whose code comes along to its machines."""

import sys
from contextlib import contextmanager

from agents import WITHOUT_COMPILER
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.deployments.command_line.program import run as run_command
from prefect_torch.flows import Hosts, RunConfig, ScalingConfig, evaluate, train
from prefect_torch.tasks.gang.machine.lending import Machines
from ranks import Attempt, folder

TRAIN = """
import os
import torch.distributed as dist
from pathlib import Path
from beside import VALUE
from prefect_torch.ckpt import CheckpointStore

def open_again(*_, **__):
    raise AssertionError("the rank has opened the run before, to read this module")

CheckpointStore.open = open_again

def main():
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, [VALUE, Path("settings.txt").read_text(), __file__, os.getcwd()])
    return told
"""

EVALUATE = """
import os
import torch
import torch.distributed as dist
from pathlib import Path
from beside import VALUE

def measure():
    here = os.getcwd()
    assert __file__ == f"{here}/evaluation_of_project.py"
    assert not here.startswith(Path("settings.txt").read_text())
    print(f"rank {dist.get_rank()} begins")
    print(f"ERROR:me:rank {dist.get_rank()} measures")
    total = torch.tensor(VALUE)
    dist.all_reduce(total)
    return {"total": total.item(), "place": os.getcwd()}
"""


def test_ranks_run_in_a_copy_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    project = tmp_path / "project"
    project.mkdir()
    for name, text in {"training_of_project.py": TRAIN, "beside.py": "VALUE = 7", "settings.txt": "slow"}.items():
        (project / name).write_text(text)
    run = RunConfig(name="run", storage=str(tmp_path / "store"), working_dir=project)
    result = train("training_of_project:main", None, ScalingConfig(num_workers=2), run)
    assert len(result.return_value) == 2
    for value, settings, file, cwd in result.return_value:
        assert (value, settings, file) == (7, "slow", f"{cwd}/training_of_project.py")
        assert not cwd.startswith(str(project))
    assert len(CheckpointStore.open(run.storage, "run").keys("run/code/")) == 1


def test_an_evaluation_on_machines_brings_its_own_directory_and_shows_the_lines_of_few_ranks(
    tmp_path, monkeypatch, caplog, capsys
):
    """Each rank has all of it; the directory of a training that may run at the same time stays where it is."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    project = tmp_path / "project"
    project.mkdir()
    for name, text in {"evaluation_of_project.py": EVALUATE, "beside.py": "VALUE = 7", "settings.txt": str(project)}.items():
        (project / name).write_text(text)
    store = CheckpointStore.open(str(tmp_path / "store"), "run")
    Attempt(store).session().report({}, folder(tmp_path / "c", a="1"))
    store.storage.put_bytes(store.layout.code("of-the-training"), b"")
    (former := tmp_path / "store/run/evaluation-logs/eval" / next(store.ids()) / "rank-9.000000.log").parent.mkdir(parents=True)
    former.write_text("an earlier evaluation with ten ranks")
    stored_before, lend_machines = [], Machines.lend

    @contextmanager
    def lend(machines, *args):
        with lend_machines(machines, *args) as lease:
            stored_before.extend(store.keys("run/evaluation-code/"))
            yield lease

    monkeypatch.setattr(Machines, "lend", lend)
    here = {"command": "exec", "leader_address": "127.0.0.1", "wait_s": 0, "environment": WITHOUT_COMPILER}
    (evaluated,) = evaluate(
        "evaluation_of_project:measure",
        store.spec.url,
        "run",
        scaling=ScalingConfig(num_workers=2, cluster=Hosts(["a", "b"], **here)),
        working_dir=project,
        log_ranks="rank0",
        log_level="WARNING",
    ).values()
    assert evaluated["total"] == 14
    assert stored_before == []  # another evaluation may have deleted the code while this one waited for hours
    assert not evaluated["place"].startswith(str(project))
    assert [it.getMessage() for it in caplog.records if it.getMessage().endswith((" begins", " measures"))] == [
        "ERROR:me:rank 0 measures"
    ]
    assert store.keys("run/code/") == ["run/code/of-the-training.zip"]
    assert len(store.keys("run/evaluation-code/eval/")) == 1
    capsys.readouterr()
    assert run_command(["logs", store.spec.url, "run", "--evaluation", "eval"]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.endswith((" measures", " begins"))]
    ends = [line.partition(": ")[0] + line.split(" ", 2)[2] for line in printed]
    assert ends == [
        f"rank-{rank}{line}" for rank in range(2) for line in (f"rank {rank} begins", f"ERROR:me:rank {rank} measures")
    ]
    assert not former.exists()
    assert run_command(["logs", store.spec.url, "run", "--evaluation", "other"]) == 1
    assert "no log of evaluation 'other' lies beside run 'run'" in capsys.readouterr().err
