import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from prefect_torch.ckpt.scratch import hold_scratch, make_scratch, remove_scratch, scratch_folder

MAKE = """
import sys
from pathlib import Path
from prefect_torch.ckpt.scratch import make_scratch
print(make_scratch(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@contextmanager
def scratch_of_another_process(parent):
    command = [sys.executable, "-c", MAKE, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            folder = Path(process.stdout.readline().strip())
            (folder / "a/b").mkdir(parents=True)
            yield folder
        finally:
            process.kill()


def test_the_next_process_removes_what_a_killed_one_left_and_nothing_else(tmp_path):
    with scratch_of_another_process(tmp_path) as alive:
        with scratch_of_another_process(tmp_path) as killed:
            pass
        assert killed.exists()
        (tmp_path / "own").mkdir()
        with scratch_of_another_process(tmp_path) as third:
            assert sorted(tmp_path.iterdir()) == sorted([alive, third, tmp_path / "own"])


def test_a_scratch_folder_goes_with_its_block(tmp_path):
    with scratch_folder(tmp_path) as folder:
        (folder / "x").touch()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_machines_name_is_held(tmp_path):
    (folder := tmp_path / ".prefect-torch-scratch-there").mkdir()
    hold_scratch(folder)
    hold_scratch(folder)
    with scratch_of_another_process(tmp_path):
        assert folder.exists()
    remove_scratch(folder)
    assert not folder.exists()


def test_a_folder_that_somebody_has_deleted_can_be_removed(tmp_path):
    (folder := make_scratch(tmp_path)).rmdir()
    remove_scratch(folder)
