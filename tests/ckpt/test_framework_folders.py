"""Who brings which file of a folder that ranks wrote together."""

import errno
import os
import shutil
import subprocess
import sys

import pytest
from crash_points import open_run
from memory_storage import MemoryStorage
from prefect_torch.ckpt import Checkpoint, TrainContext
from prefect_torch.ckpt.files.folder import scan_files
from prefect_torch.ckpt.framework_folders import part_of_rank
from ranks import Attempt

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


def brought_by(folder, rank, local_world_size):
    context = TrainContext(rank, rank % local_world_size, rank // local_world_size, 4, local_world_size, "run", 1)
    with part_of_rank(folder, context) as part:
        return {path.removeprefix("checkpoint/") for path in scan_files(part.directory)}


def test_each_rank_of_a_machine_brings_its_own_and_the_first_the_rest(written):
    assert [brought_by(written, rank, 4) for rank in range(4)] == [SHARED | OF_RANK[0], OF_RANK[1], OF_RANK[2], OF_RANK[3]]


def test_on_two_machines_everything_that_lies_on_one_is_brought_by_one_of_its_ranks(written):
    everything = SHARED.union(*OF_RANK.values())
    assert [brought_by(written, rank, 2) for rank in range(4)] == [
        everything - OF_RANK[1],
        OF_RANK[1],
        everything - OF_RANK[3],
        OF_RANK[3],
    ]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_the_folder_stays_as_it_is(written, link):
    before = scan_files(written)
    with part_of_rank(written, TrainContext(0, 0, 0, 1, 1, "run", 1), link) as part:
        assert (part.directory / "checkpoint/model.safetensors").read_text() == "model.safetensors"
    assert not part.path.startswith(str(written))
    assert scan_files(written) == before


def test_an_async_report_moves_the_links_of_the_part_alone(written):
    """Whoever reports the same directory as a checkpoint of his own may still write to the files by their other names."""
    session = Attempt(open_run(MemoryStorage())).session()
    with part_of_rank(written, TrainContext(0, 0, 0, 1, 1, "run", 1), os.link) as part:
        before = scan_files(part.directory)
        session.report({}, Checkpoint.from_directory(part.path), upload="async")
        assert scan_files(part.directory) == before
        session.report({}, part, upload="async")
        assert scan_files(part.directory) == []
    session.finish()


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EPERM, errno.EIO])
def test_where_a_file_gets_no_second_name_it_is_copied(written, reason):
    """As on BeeGFS, where both names must be in one directory; an async report may store it when the folder is gone."""

    def refuse(*_, **__):
        raise OSError(reason, os.strerror(reason))

    with part_of_rank(written, TrainContext(0, 0, 0, 1, 1, "run", 1), refuse, below="") as part:
        shutil.rmtree(written)
        assert (part.directory / "model.safetensors").read_text() == "model.safetensors"


def test_a_rank_without_files_brings_nothing(tmp_path):
    with part_of_rank(tmp_path / "missing", TrainContext(1, 1, 0, 2, 2, "run", 1)) as part:
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
