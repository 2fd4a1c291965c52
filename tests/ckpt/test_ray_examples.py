"""The examples of Ray's documentation, ported: their training functions run on two real ranks, fail, and go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_ranks import launch
from prefect_torch.ckpt import CheckpointStore
from ray_example_ranks import CONFIGS, EXAMPLES

ON_PURPOSE = "Intentional error to showcase restoration!"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("examples")
    assert launch("ray_example_ranks", (), 2, root) == [0, 0]
    return root


@pytest.fixture
def run(root):
    """Return what an example's attempts told, and the manifests that they left."""
    told = json.loads((root / "told.json").read_text())

    def of_example(name):
        return told[name], CheckpointStore.open(root / name, "run").list()

    return of_example


def attempts_and_files(manifests):
    return [manifest.attempt for manifest in manifests], {entry.path for entry in manifests[-1].files}


def test_every_example_is_run():
    names = {path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in (EXAMPLES / "ray_train").glob("*.py")}
    assert names | {"ray_parity", "numpy_folders"} == set(CONFIGS)


def test_rank_0_saves_a_model_after_every_epoch(run):
    told, manifests = run("ray_train/pytorch_save")
    assert told == [None]
    assert attempts_and_files(manifests) == ([1, 1, 1], {"model.pt"})
    assert manifests[-1].metrics["loss"] < manifests[0].metrics["loss"]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("ray_train/pytorch_resume", {"model.pt", "optimizer.pt", "extra_state.pt"}),
        ("ray_train/sharded", {"model-rank=0.pt", "model-rank=1.pt"}),
        ("ray_parity", {"model-rank=0.pt", "model-rank=1.pt", "optimizer.pt", "extra_state.pt"}),
    ],
)
def test_a_failed_training_goes_on_after_its_last_epoch(run, name, files):
    told, manifests = run(name)
    assert told == [ON_PURPOSE, 2]
    assert attempts_and_files(manifests) == ([1, 1, 2, 2], files)
    losses = [manifest.metrics["loss"] for manifest in manifests]
    assert losses[3] < losses[1]


def test_a_dict_goes_on_with_all_that_is_in_it(run):
    told, manifests = run("ray_train/dict_state")
    assert told == [ON_PURPOSE, 2]
    assert attempts_and_files(manifests)[0] == [1, 1, 2, 2]


def test_a_helper_saves_on_rank_0_and_the_same_name_goes_on(run):
    told, manifests = run("ray_train/rank_zero")
    assert told == [0, 2]
    assert attempts_and_files(manifests) == ([1, 1, 2, 2], {"checkpoint.pt"})
    assert [manifest.metrics["epoch"] for manifest in manifests] == [0, 1, 2, 3]


def test_lightning_goes_on_from_its_own_file(run):
    told, manifests = run("ray_train/lightning_resume")
    assert told == [ON_PURPOSE, 4]
    assert attempts_and_files(manifests) == ([1, 1, 2, 2], {"checkpoint.ckpt", "rng_state_0.pth", "rng_state_1.pth"})
    assert [manifest.metrics["epoch"] for manifest in manifests] == [0, 1, 2, 3]


def test_transformers_reports_what_it_saves_with_the_evaluation_and_goes_on(run):
    told, manifests = run("ray_train/transformers_callback")
    assert told == [manifest.step for manifest in manifests] == [3, 6]
    attempts, files = attempts_and_files(manifests)
    assert attempts == [1, 2]
    assert {"checkpoint/model.safetensors", "checkpoint/trainer_state.json"} <= files
    assert all("eval_loss" in manifest.metrics for manifest in manifests)


def test_a_callback_of_ones_own_reports_what_transformers_saves(run):
    told, manifests = run("ray_train/transformers_custom")
    assert told == [8, 8]
    assert "model.safetensors" in attempts_and_files(manifests)[1]
    assert all("loss" in manifest.metrics for manifest in manifests)


def test_a_callback_of_ones_own_reports_no_files_of_an_earlier_training_in_its_directory(root, run):
    store = CheckpointStore.open(root / "ray_train/transformers_custom", "run")
    steps = []
    for manifest in run("ray_train/transformers_custom")[1]:
        with store.checkpoint(manifest).as_directory() as folder:
            steps.append(json.loads(Path(folder, "trainer_state.json").read_text())["global_step"])
    assert steps == [4, 8, 4, 8]


def test_a_training_of_numpy_and_folders_goes_on(run):
    told, manifests = run("numpy_folders")
    assert told[0] == "an error on purpose, after the second round"
    assert told[1]["start"] == 2
    assert attempts_and_files(manifests) == ([1, 1, 2, 2], {"centers-0.npy", "centers-1.npy", "progress.json"})
    distances = [manifest.metrics["distance"] for manifest in manifests]
    assert distances == sorted(distances, reverse=True)


def test_the_loop_of_numpy_and_folders_runs_where_there_is_no_torch(tmp_path):
    """A rank's process imports torch to meet the others; what the user writes does not."""
    program = f"""
import sys

class NoTorch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ModuleNotFoundError("there is no torch")

sys.meta_path.insert(0, NoTorch())
import numpy_folders
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.reporting.api import start_session
from ranks import Attempt
store = CheckpointStore.open({str(tmp_path)!r}, "run")
for rounds in (2, 4):
    session = Attempt(store).session()
    start_session(session)
    try:
        print(numpy_folders.train_func({{"rounds": rounds}})["start"])
        session.finish()
    except RuntimeError as exc:
        print(exc)
"""
    path = os.pathsep.join([str(EXAMPLES), str(Path(__file__).parents[1] / "support")])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["an error on purpose, after the second round", "2"], done.stderr
