"""Accelerate's own save_state and load_state: one rank in this process, and two as processes."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from accelerate_loops import EPOCHS, make_accelerator, train
from crash_points import open_run
from exact_ends import same_ends
from forked_ranks import launch
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore
from prefect_torch.ckpt.accelerate import load_state, report_state
from ranks import Attempt, folder, in_training
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.usefixtures("one_thread")
OF_RANK_0 = {
    "checkpoint/custom_checkpoint_0.pkl",
    "checkpoint/model.safetensors",
    "checkpoint/optimizer.bin",
    "checkpoint/random_states_0.pkl",
    "checkpoint/scheduler.bin",
}


def called_in_training(attempt, function, *arguments, **options):
    """Call `function` as a rank's function, and return what it returns."""
    with in_training(attempt.session()):
        return function(*arguments, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a training that was not disturbed, and of one that was killed and resumed, of two ranks."""
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    assert launch("accelerate_loops", ("whole",), 2, whole) == [0, 0]
    assert launch("accelerate_loops", ("killed",), 2, killed) == [-9, -9]
    assert launch("accelerate_loops", ("resumed",), 2, killed) == [0, 0]
    return whole, killed


def test_two_killed_ranks_continue_to_the_very_weights_of_an_undisturbed_training(trained):
    whole, *resumed = (torch.load(path) for path in (trained[0] / "weights-0.pt", *trained[1].glob("weights-*.pt")))
    assert len(resumed) == 2
    assert all(torch.equal(of_rank, whole) for of_rank in resumed)
    assert same_ends(*trained, num_ranks=2)
    manifests = CheckpointStore.open(trained[1], "run").list()
    assert [(manifest.attempt, manifest.metrics["batches"]) for manifest in manifests] == [(1, 4), (1, 8), (2, 12), (2, 16)]


def test_each_rank_brings_what_it_owns_with_safetensors(trained):
    for root in trained:
        for manifest in CheckpointStore.open(root, "run").list():
            owners = {entry.path: entry.rank for entry in manifest.files}
            assert owners == {**dict.fromkeys(OF_RANK_0, 0), "checkpoint/random_states_1.pkl": 1}


def test_each_rank_brings_and_gets_its_own_position_of_stateful_loaders(tmp_path):
    for _ in range(2):
        assert launch("accelerate_loops", ("within an epoch",), 2, tmp_path) == [0, 0]
    (manifest,) = CheckpointStore.open(tmp_path, "run").list()
    owners = {entry.path: entry.rank for entry in manifest.files if "dl_state_dict" in entry.path}
    assert owners == {
        "checkpoint/dl_state_dict.bin": 0,
        "checkpoint/dl_state_dict_1.bin": 0,
        **{f"checkpoint/dl_state_dict{number}_rank{rank}.bin": rank for number in ("", "_1") for rank in range(2)},
    }
    drawn = [[own for own, _ in torch.load(tmp_path / f"drawn-{rank}.pt")] for rank in range(2)]
    assert drawn == [[1, 11], [2, 12]]


def may_mount():
    command = ["unshare", "--mount", "true"]
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="may not mount a directory for a rank alone")
def test_machines_write_to_a_temporary_directory_that_all_of_them_have(tmp_path):
    assert launch("accelerate_loops", ("on machines",), 2, tmp_path) == [0, 0]
    (manifest,) = (store := CheckpointStore.open(tmp_path, "run")).list()
    owners = {entry.path: entry.rank for entry in manifest.files}
    assert owners == {**dict.fromkeys(OF_RANK_0, 0), "checkpoint/random_states_1.pkl": 1}
    store.verify(manifest)
    for place in ("temporary", "machine-0/temporary"):
        assert list((tmp_path / place).glob(".prefect-torch-*")) == []


class Own:
    """Something that torch.load makes only if it is told that the file is trusted."""


class WithOwnState(TensorDataset):
    def state_dict(self):
        return {"own": Own()}

    def load_state_dict(self, state):
        assert isinstance(state["own"], Own)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
def test_positions_of_stateful_loaders_are_loaded_with_the_arguments_for_all_files(store):
    def load_or_report():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        loader = accelerator.prepare(DataLoader(WithOwnState(torch.arange(8.0)), batch_size=4))
        is_first = load_state(accelerator, load_kwargs={"weights_only": False}) is None
        batch = next(iter(loader))[0].tolist()
        if is_first:
            report_state(accelerator, {})
        return batch

    assert called_in_training(Attempt(store), load_or_report) == [0, 1, 2, 3]
    assert called_in_training(Attempt(store), load_or_report) == [4, 5, 6, 7]


def test_what_was_loaded_tells_where_to_go_on(store):
    _, loaded = called_in_training(Attempt(store), train, make_accelerator(), epochs=2)
    assert loaded is None
    _, loaded = called_in_training(Attempt(store), train, make_accelerator(), epochs=3)
    assert (loaded.step, loaded.metrics["batches"]) == (1, 16)
    assert [manifest.step for manifest in store.list()] == [0, 1, 2]


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_accelerates_own_folders_are_rotated_and_named_on_after_a_restart(store, tmp_path, upload):
    own = tmp_path / "project/checkpoints"
    for epochs, folders in [(3, {"checkpoint_1", "checkpoint_2"}), (EPOCHS, {"checkpoint_2", "checkpoint_3"})]:
        configuration = ProjectConfiguration(str(tmp_path / "project"), automatic_checkpoint_naming=True, total_limit=2)
        called_in_training(Attempt(store), train, make_accelerator(project_config=configuration), epochs=epochs, upload=upload)
        assert {path.name for path in own.iterdir()} == folders
    with store.checkpoint(store.latest()).as_directory() as directory:
        for path in (own / "checkpoint_3").iterdir():
            assert path.read_bytes() == (type(path)(directory) / "checkpoint" / path.name).read_bytes()


def test_models_are_stored_in_the_format_that_was_chosen(store):
    accelerator = make_accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    called_in_training(Attempt(store), report_state, accelerator, {}, safe_serialization=False)
    assert {entry.path for entry in store.latest().files} == {"checkpoint/pytorch_model.bin", "checkpoint/random_states_0.pkl"}


def test_nothing_is_left_of_temporary_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    attempt = Attempt(open_run(MemoryStorage()))
    called_in_training(attempt, train, make_accelerator(), epochs=2, upload="async")
    assert list(tmp_path.glob(".prefect-torch-*")) == []


def test_accelerate_writes_to_the_filesystem_of_a_storage_that_is_a_directory(store, monkeypatch):
    save_state, folders = Accelerator.save_state, []

    def save(self, folder, *options):
        folders.append(Path(folder))
        return save_state(self, folder, *options)

    monkeypatch.setattr(Accelerator, "save_state", save)
    called_in_training(Attempt(store), train, make_accelerator(), epochs=1)
    assert {entry.path for entry in store.latest().files} == OF_RANK_0
    assert folders[0].is_relative_to(Path(store.storage.url, "run/unreported"))


def test_outside_of_a_training_it_only_warns():
    with pytest.warns(UserWarning, match="report_state reports nothing"):
        report_state(make_accelerator(), {"loss": 1.0})
    assert load_state(make_accelerator()) is None


def test_a_checkpoint_of_another_kind_is_refused(store, tmp_path):
    attempt = Attempt(store)
    attempt.run(lambda session, rank: session.report({}, folder(tmp_path / "folder", model=b"x")))
    with pytest.raises(CheckpointNotFoundError, match="report_state did not report it"):
        called_in_training(Attempt(store), load_state, make_accelerator())


def test_an_accelerator_that_does_not_use_the_ranks_is_refused(store):
    for function, arguments in [(report_state, [{}]), (load_state, [])]:
        with pytest.raises(ValueError, match="counts 1 ranks but the training has 2"):
            called_in_training(Attempt(store, world_size=2), function, make_accelerator(), *arguments)
