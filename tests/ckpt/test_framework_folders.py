"""Who brings which file of a folder that ranks wrote together."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from crash_points import open_run
from memory_storage import MemoryStorage
from prefect_torch.ckpt import FencedError, TrainContext
from prefect_torch.ckpt import framework_folders as module
from prefect_torch.ckpt.files.folder import scan_files
from prefect_torch.ckpt.framework_folders import files_in, folder_of_all_ranks, moved_part, part_of_rank
from ranks import Attempt, as_rank, in_training, read_files

SHARED = {"model.safetensors", "trainer_state.json", "model-00001-of-00002.safetensors", "optimizer_0/.metadata"}
OF_RANK = {
    0: {"rng_state_0.pth", "random_states_0.pkl", "optimizer_0/__0_0.distcp", "global_step3/zero_pp_rank_0_mp_rank_00.pt"},
    1: {"rng_state_1.pth", "random_states_1.pkl", "optimizer_0/__1_0.distcp", "global_step3/zero_pp_rank_1_mp_rank_00.pt"},
    2: {"rng_state_2.pth", "pytorch_model_fsdp_rank2.bin", "optimizer_0_rank2.bin"},
    3: {"rng_state_3.pth"},
}


@pytest.fixture
def written(tmp_path):
    """Return what four ranks wrote, and an attempt of more before them left."""
    for path in SHARED.union(*OF_RANK.values(), {"rng_state_4.pth"}):
        (tmp_path / "written" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "written" / path).write_text(path)
    return tmp_path / "written"


@pytest.fixture
def session(store):
    with as_rank(Attempt(store).session()) as session:
        yield session


def brought_by(folder, rank, local_world_size):
    context = TrainContext(rank, rank % local_world_size, rank // local_world_size, 4, local_world_size, "run", 1)
    with part_of_rank(folder, context, "sync") as part:
        return {path.removeprefix("checkpoint/") for path in scan_files(part.directory)}


@pytest.mark.usefixtures("session")
def test_each_rank_of_a_machine_brings_its_own_and_the_first_the_rest(written):
    assert [brought_by(written, rank, 4) for rank in range(4)] == [SHARED | OF_RANK[0], OF_RANK[1], OF_RANK[2], OF_RANK[3]]


@pytest.mark.usefixtures("session")
def test_on_two_machines_everything_that_lies_on_one_is_brought_by_one_of_its_ranks(written):
    everything = SHARED.union(*OF_RANK.values())
    assert [brought_by(written, rank, 2) for rank in range(4)] == [
        everything - OF_RANK[1],
        OF_RANK[1],
        everything - OF_RANK[3],
        OF_RANK[3],
    ]


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_the_folder_stays_as_it_is_and_an_async_report_copies_it_to_the_filesystem_of_the_storage(
    written, store, session, monkeypatch, upload
):
    monkeypatch.setattr(module, "is_local", lambda _: True)
    before = scan_files(written)
    with part_of_rank(written, session.context, upload) as part:
        assert part.directory.is_relative_to(Path(store.storage.url, "run/unreported")) == (upload == "async")
        assert (part.directory / "checkpoint/model.safetensors").read_text() == "model.safetensors"
        session.report({}, part, upload=upload)
    session.finish()
    assert not part.path.startswith(str(written))
    assert scan_files(written) == before


def refuse(*_, **__):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def reported(session, upload):
    """Report a file that a framework writes to a folder of all ranks; return the folder, and the file's inode."""
    with folder_of_all_ranks(session.context, upload, str) as folder:
        (folder / "model").mkdir()
        (folder / "model/weights").write_bytes(b"x" * 2**20)
        inode = (folder / "model/weights").stat().st_ino
        with moved_part(folder, session.context, files_in(folder), lambda: None) as part:
            assert (part.directory / "model/weights").stat().st_ino == inode
            session.report({}, part, upload=upload)
    return folder, inode


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_what_a_framework_writes_for_a_report_is_moved_into_the_checkpoint(store, tmp_path, monkeypatch, upload):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(module, "is_local", lambda _: True)
    with in_training(Attempt(store).session()) as session:
        folder, inode = reported(session, upload)
    assert folder.is_relative_to(Path(store.storage.url, "run/unreported"))
    (manifest,) = store.list()
    assert Path(store.storage.url, "run/checkpoints", manifest.id, "model/weights").stat().st_ino == inode
    assert list(Path(store.storage.url).glob("run/unreported/*")) == []


@pytest.mark.parametrize(
    ("has_links", "upload", "is_below_run"),
    [(True, "sync", True), (True, "async", False), (False, "sync", False), (False, "async", False)],
)
def test_a_report_that_the_training_waits_for_is_written_to_a_file_server_that_has_links(
    store, tmp_path, monkeypatch, has_links, upload, is_below_run
):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(module, "is_local", lambda _: False)
    if not has_links:
        monkeypatch.setattr("os.link", refuse)
    with in_training(Attempt(store).session()) as session:
        folder, _ = reported(session, upload)
    assert folder.is_relative_to(Path(store.storage.url)) == is_below_run
    assert folder.is_relative_to(tmp_path / "temporary") != is_below_run
    assert list((tmp_path / "temporary").iterdir()) == []
    assert read_files(store.checkpoint(store.latest())) == {"model/weights": b"x" * 2**20}


def test_of_a_run_that_is_gone_the_report_says_so(store, session):
    shutil.rmtree(Path(store.storage.url, "run"))
    with pytest.raises(FencedError):
        reported(session, "sync")


@pytest.mark.usefixtures("session")
def test_machines_that_have_no_temporary_directory_in_common_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def gather(values, value):
        values[:] = [value, ("/mnt/b", "b") if isinstance(value, tuple) else []]

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    expected = rf"in common: {tmp_path} on .*, /mnt/b on b; set TMPDIR"
    with (
        pytest.raises(FileNotFoundError, match=expected),
        folder_of_all_ranks(TrainContext(0, 0, 0, 2, 1, "r", 1), "async", str),
    ):
        pass


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_for_a_bucket_it_is_a_temporary_directory(tmp_path, monkeypatch, upload):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = open_run(MemoryStorage())
    with in_training(Attempt(store).session()) as session:
        folder, _ = reported(session, upload)
    assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
    assert read_files(store.checkpoint(store.latest())) == {"model/weights": b"x" * 2**20}


def test_a_rank_without_files_brings_nothing(tmp_path):
    with part_of_rank(tmp_path / "missing", TrainContext(1, 1, 0, 2, 2, "run", 1), "sync") as part:
        assert part is None


@pytest.mark.parametrize(
    ("framework", "missing"),
    [
        ("lightning", "lightning"),
        ("transformers", "transformers"),
        ("transformers", "accelerate"),
        ("accelerate", "accelerate"),
    ],
)
def test_a_missing_framework_is_told_with_the_extra_that_installs_it(framework, missing, tmp_path):
    assert import_without(framework, missing, tmp_path) == (
        f"ModuleNotFoundError: No module named '{missing}': pip install 'prefect-torch[{framework}]'"
    )


def test_a_package_that_a_framework_lacks_is_told_as_it_is(tmp_path):
    (tmp_path / "lightning.py").write_text("import no_such_package")
    assert import_without("lightning", "", tmp_path) == "ModuleNotFoundError: No module named 'no_such_package'"


def import_without(framework, missing, folder):
    """Return the last line of an interpreter that imports the module for `framework` where `missing` is not installed."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class NotInstalled:\n"
        "    def find_spec(name, path, target=None):\n"
        f"        if name == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, NotInstalled)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", f"import prefect_torch.ckpt.{framework}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stderr.splitlines()[-1]
