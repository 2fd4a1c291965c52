import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect_torch.ckpt.storage.local_files.reserve import keep_reserve
from prefect_torch.ckpt.storage.machine import mounts, scratch
from prefect_torch.ckpt.storage.machine.scratch import hold_scratch, make_scratch, remove_scratch, scratch_folder

MAKE = """
import sys
from pathlib import Path
from prefect_torch.ckpt.storage.machine.scratch import make_scratch
print(make_scratch(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""
HOLD = """
import sys
from pathlib import Path
from prefect_torch.ckpt.storage.machine import scratch
scratch.is_local = lambda _: sys.argv[2] == "True"
scratch.hold_scratch(Path(sys.argv[1]))
print(sys.argv[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def scratch_of_another_process(*arguments, program=MAKE):
    command = [sys.executable, "-c", program, *map(str, arguments)]
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


@pytest.mark.parametrize("is_local", [True, False])
def test_another_machines_folder_is_removed_only_where_it_can_be_none_but_an_earlier_boots(tmp_path, monkeypatch, is_local):
    """It has another kernel's mark, and a lock that is not seen here, also where this machine exports what is local to it."""
    monkeypatch.setattr(scratch, "is_local", lambda _: is_local)
    with scratch_of_another_process(tmp_path) as killed:
        pass
    (there := tmp_path / f".prefect-torch-scratch-{'0' * 16}-there").mkdir()
    (old := tmp_path / f".prefect-torch-scratch-{'0' * 16}-old").mkdir()
    os.utime(old, (1e9, 1e9))
    here = make_scratch(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([here, there, *([] if is_local else [old])])
    assert not killed.exists()


def test_an_earlier_boots_folder_is_a_day_old_and_older_than_this_boot(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "is_local", lambda _: True)
    day_s = 24 * 3600
    for age_s, up_s, is_earlier in ((2 * day_s, day_s, True), (2 * day_s, 3 * day_s, False), (3600, 60, False)):
        monkeypatch.setattr(time, "clock_gettime", lambda _, up_s=up_s: up_s)
        os.utime(tmp_path, (time.time() - age_s,) * 2)
        assert scratch.is_of_earlier_boot(tmp_path) is is_earlier


def test_what_one_kernel_serves_alone_is_known_and_what_is_unknown_is_taken_as_shared(monkeypatch, tmp_path):
    assert scratch.is_local(Path("/dev/shm"))
    assert not scratch.is_local(Path("/proc"))
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "none")  # as on macOS
    assert not scratch.is_local(Path("/dev/shm"))
    assert mounts.shared_mount_of(Path("/proc")) is None


def test_a_mount_that_others_may_change_is_named(tmp_path):
    assert mounts.shared_mount_of(Path("/proc")) == "proc on /proc"
    assert mounts.shared_mount_of(Path("/dev/shm")) is None
    assert mounts.shared_mount_of(tmp_path / "gone") is None


@pytest.mark.skipif(not mounts._MOUNTS.exists(), reason="this system does not tell its mounts")
@pytest.mark.parametrize(("filesystem", "is_fuse"), [("fuse", True), ("fuse.s3fs", True), (None, True), ("nfs4", False)])
def test_a_file_that_is_on_no_disk_and_of_no_known_filesystem_may_be_on_fuse(monkeypatch, filesystem, is_fuse):
    with Path("/proc/self/status").open() as file:
        assert not mounts.may_be_fuse(file.fileno())
        monkeypatch.setattr(mounts, "filesystem_of", lambda _: filesystem)
        assert mounts.may_be_fuse(file.fileno()) == is_fuse
        monkeypatch.setattr(os, "major", lambda _: 8)
        assert not mounts.may_be_fuse(file.fileno())


@pytest.mark.skipif(not mounts._MOUNTS.exists(), reason="this system does not tell its mounts")
def test_btrfs_whose_directories_have_other_numbers_than_its_mount_is_known(tmp_path, monkeypatch):
    """Each subvolume has a number of its own."""
    folder = os.open(tmp_path, os.O_RDONLY)
    mount = mounts._numbers_of(folder)[0]
    (table := tmp_path / "mountinfo").write_text(
        f"{mount}0 1 0:41 / /other rw - nfs host:/x rw\n{mount} 1 0:999999 / {tmp_path} rw shared:1 - btrfs /dev/x rw\n"
    )
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    assert scratch.is_local(tmp_path)
    assert mounts.filesystem_of(folder) == mounts.filesystem_of(tmp_path) == "btrfs"
    keep_reserve(tmp_path)
    assert len(list(tmp_path.glob(".tmp-*"))) == 8
    os.close(folder)


@pytest.mark.skipif(not mounts._MOUNTS.exists(), reason="this system does not tell its mounts")
def test_a_kernel_that_does_not_tell_the_number_of_a_mount_tells_that_of_its_filesystem(monkeypatch):
    monkeypatch.setattr(mounts, "_MOUNT_ID", re.compile("never"))
    assert scratch.is_local(Path("/dev/shm"))


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


@pytest.mark.parametrize("is_local", [True, False])
def test_a_killed_process_leaves_no_folder_that_this_machine_has_made_by_another_ones_name(tmp_path, is_local):
    """Where it may be the other machine's own, that one removes it."""
    (folder := tmp_path / f".prefect-torch-scratch-{'0' * 16}-there").mkdir()
    with scratch_of_another_process(folder, is_local, program=HOLD), scratch_of_another_process(tmp_path):
        assert folder.exists()
    with scratch_of_another_process(tmp_path) as third:
        assert sorted(tmp_path.iterdir()) == sorted([third, *([] if is_local else [folder])])


def test_a_folder_of_another_machines_name_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "is_local", lambda _: True)
    (folder := tmp_path / f".prefect-torch-scratch-{'0' * 16}-there").mkdir()
    hold_scratch(folder)
    assert len(list(tmp_path.iterdir())) == 2
    remove_scratch(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_has_deleted_can_be_removed(tmp_path):
    (folder := make_scratch(tmp_path)).rmdir()
    remove_scratch(folder)


def test_what_others_name_like_a_scratch_directory_of_this_machine_is_neither_deleted_nor_waited_for(tmp_path, monkeypatch):
    """The temporary directory of a machine is everybody's, and the mark in the name is no secret."""
    (place := tmp_path / "of all/users").mkdir(parents=True)
    for name in ("own", "others"):
        (place / name / "data").mkdir(parents=True)
    prefix = f".prefect-torch-scratch-{scratch.own_mark()}-"
    for name in ("of-own", "of-", "of-..", "of-of-own"):
        (place / f"{prefix}{name}").mkdir()
    (place / f"{prefix}link").symlink_to(place / "others")
    os.mkfifo(place / f"{prefix}fifo")
    here = make_scratch(place)
    assert (place / "own/data").exists()
    left = {"own", "others", f"{prefix}link", f"{prefix}fifo"}
    assert {it.name for it in place.iterdir()} == {here.name, *left}
    (theirs := place / f"{prefix}theirs").mkdir()
    scratch.sweep_scratch.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1 << 30)
    make_scratch(place)
    assert theirs.exists()
