"""`prefect-torch pull` of a part of a checkpoint, and of a model in one file."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.deployments.command_line.program import run
from prefect_torch.deployments.command_line.runs import pull_command
from ranks import Attempt, folder
from safetensors.torch import load_file
from states import check_equal, make_training

FILES = {"a.pt": "a" * 2000, "b.pt": "b", "c.json": "{}"}


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path, monkeypatch):
    """A run whose first checkpoint is a folder, and whose second is the state of two ranks."""
    if request.param == "s3":
        server = request.getfixturevalue("moto")
        for name, value in server.options().items():
            monkeypatch.setenv(name.upper(), value)
    url = str(tmp_path / "storage") if request.param == "local" else f"s3://{server.new_bucket()}/folder"
    store = CheckpointStore.open(url, "run")
    model, optimizer, _ = make_training(seed=1)

    def report(session, rank):
        session.report({}, folder(tmp_path / "c", **FILES) if rank == 0 else None)
        session.report({}, state={"student": model, "optimizer": optimizer}, upload="sync")

    assert Attempt(store, 2).run(report) == [None, None]
    return store


@pytest.fixture
def pull(store, capsys):
    def pull(*arguments):
        code = run(["pull", store.storage.url, "run", *map(str, arguments)])
        return code, *capsys.readouterr()

    return pull


def test_only_what_is_included_is_pulled(store, pull, tmp_path):
    first, _ = store.ids()
    code, out, _ = pull("--include", "*.json", first, tmp_path / "new", "--include", "a*")
    assert (code, out) == (0, f"{first}, step 0: 2 files, 2.0 KiB, in {tmp_path / 'new'}\n")
    assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == {"a.pt": FILES["a.pt"], "c.json": "{}"}


def test_a_pattern_that_matches_nothing_leaves_nothing(store, pull, tmp_path):
    code, out, err = pull("--include", "*.onnx", next(store.ids()), tmp_path / "new")
    assert (code, out) == (1, "")
    assert "matches '*.onnx'; it has a.pt, b.pt, c.json" in err
    assert not (tmp_path / "new").exists()


def test_a_model_is_pulled_as_one_file(store, pull, tmp_path):
    model, optimizer, _ = make_training(seed=1)
    newest = store.latest().id
    code, out, _ = pull("--consolidate", "--key", "student", tmp_path / "new")
    file = tmp_path / "new/model.safetensors"
    assert (code, out) == (0, f"{newest}, step 1: 'student', {file.stat().st_size / 1024:.1f} KiB, in {file}\n")
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    check_equal(load_file(file), dict(model.state_dict()))
    assert pull("--consolidate", "--key", "student", "latest", tmp_path / "new/other.safetensors")[0] == 0
    check_equal(load_file(tmp_path / "new/other.safetensors"), dict(model.state_dict()))
    code, _, err = pull("--consolidate", "--key", "optimizer.state", tmp_path / "new")
    assert (code, err) == (1, f"prefect-torch: {file} exists: give another name, or --force to replace it\n")
    assert pull("--consolidate", "--key", "optimizer.state", "--force", tmp_path / "new")[0] == 0
    assert torch.equal(load_file(file)["0.weight.exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_what_cannot_be_consolidated_leaves_nothing(store, pull, tmp_path):
    for chosen, said in (
        ("latest", "has no tensor below 'model': choose another key, of 'optimizer', 'student'"),
        (next(store.ids()), "holds no state: it was reported as a directory"),
    ):
        code, out, err = pull("--consolidate", chosen, tmp_path / "new")
        assert (code, out) == (1, "")
        assert said in err
        assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--consolidate", "--include", "*"), "--consolidate selects its files itself: give it without --include"),
        (("--key", "model"), "--key is an option of --consolidate: give both"),
    ],
)
def test_options_that_contradict_each_other_are_refused(capsys, tmp_path, options, said):
    assert run(["pull", str(tmp_path), "run", *options, str(tmp_path / "new")]) == 2
    assert said in capsys.readouterr().err


def test_a_pull_of_files_does_without_torch(tmp_path):
    store = CheckpointStore.open(tmp_path / "storage", "run")
    Attempt(store).session().report({}, folder(tmp_path / "c", **FILES))
    arguments = ["pull", str(tmp_path / "storage"), "run", "--include", "*.json", str(tmp_path / "new")]
    program = f"""
import sys
from prefect_torch.deployments.command_line.program import run
assert run({arguments!r}) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert Path(tmp_path, "new/c.json").exists()


@pytest.mark.parametrize(
    ("taken", "said"),
    [("b", "b is a directory, and the checkpoint has a file"), ("c", "c is a file, and the checkpoint has a directory")],
)
def test_a_pull_that_has_no_place_for_a_file_moves_none(tmp_path, capsys, taken, said):
    store = CheckpointStore.open(tmp_path / "storage", "run")
    (tmp_path / "files/c").mkdir(parents=True)
    (tmp_path / "files/c/d").write_text("d")
    Attempt(store).session().report({}, folder(tmp_path / "files", a="a", b="b"))
    target = tmp_path / "target"
    target.mkdir()
    (target / taken).mkdir() if taken == "b" else (target / taken).write_text("mine")
    assert run(["pull", str(tmp_path / "storage"), "run", str(target), "--force"]) == 1
    assert said in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == [taken]


def test_a_pull_that_is_interrupted_while_it_moves_says_so(tmp_path, capsys, monkeypatch):
    def interrupt(moves):
        raise KeyboardInterrupt

    monkeypatch.setattr(pull_command, "move_all", interrupt)
    store = CheckpointStore.open(tmp_path / "storage", "run")
    Attempt(store).session().report({}, folder(tmp_path / "c", **FILES))
    assert run(["pull", str(tmp_path / "storage"), "run", str(tmp_path / "new")]) == 130
    assert capsys.readouterr().err == (
        f"prefect-torch: interrupted; some of the files may be in {tmp_path / 'new'}: pull again with --force\n"
    )
