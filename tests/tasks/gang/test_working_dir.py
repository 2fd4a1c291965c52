"""The user's working directory: packed by the leader, unpacked by the ranks of a machine."""

import errno
import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from prefect_torch.ckpt import CheckpointCorruptError, StorageSpec
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.tasks.gang.machine import working_dir as packing
from prefect_torch.tasks.gang.machine.working_dir import pack_directory
from prefect_torch.tasks.rank.user_code.function import PackedFunction
from prefect_torch.tasks.rank.user_code.working_dir import unpacked, within
from prefect_version import IS_3_9


@pytest.fixture(autouse=True)
def own_cache_and_path(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    files = [
        "train.py",
        "pkg/model.py",
        "data/big.bin",
        ".git/HEAD",
        "env/pyvenv.cfg",
        "env/lib/x.py",
        "checkpoints/run/y.json",
    ]
    for name in [*files, "pkg/__pycache__/model.pyc"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture
def spec(tmp_path):
    return StorageSpec(str(tmp_path / "store"))


def names_in(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def test_the_copy_has_what_belongs_to_the_project(project, spec):
    packed = pack_directory(str(project), str(project / "checkpoints"))
    packed.store(Run.open(spec, "run"))
    with unpacked(packed.stored, Run.open(spec, "run")) as copy:
        assert names_in(copy) == ["data/big.bin", "pkg/model.py", "run.sh", "train.py"]
        assert (copy / "pkg/model.py").read_text() == "pkg/model.py"
        assert os.access(copy / "run.sh", os.X_OK)
        assert not os.access(copy / "train.py", os.X_OK)
    (project / ".prefectignore").write_text("data/\n*.sh\n")
    packed = pack_directory(str(project), str(project / "checkpoints"))
    packed.store(Run.open(spec, "run"))
    with unpacked(packed.stored, Run.open(spec, "run")) as copy:
        assert names_in(copy) == [".prefectignore", "pkg/model.py", "train.py"]


def test_an_equal_directory_has_the_same_name_and_the_former_version_is_deleted(project, spec, monkeypatch):
    run = Run.open(spec, "run")
    put, put_bytes = [], LocalStorage.put_bytes
    monkeypatch.setattr(LocalStorage, "put_bytes", lambda self, key, data: (put.append(key), put_bytes(self, key, data)))
    first = pack_directory(str(project), spec.url)
    first.store(run)
    os.utime(project / "train.py", (1, 1))
    again = pack_directory(str(project), spec.url)
    again.store(run)
    assert again.stored == first.stored
    (project / "train.py").write_text("changed")
    changed = pack_directory(str(project), spec.url)
    changed.store(run)
    assert put == [f"run/code/{version.stored.sha256}.zip" for version in (first, again, changed)]
    assert run.keys("run/code/") == [put[2]]


def test_where_nothing_may_be_deleted_the_former_version_stays(project, spec, monkeypatch):
    def delete(self, keys):
        raise PermissionError("s3:DeleteObject is not allowed")

    monkeypatch.setattr(LocalStorage, "delete", delete)
    run = Run.open(spec, "run")
    versions = []
    for text in ("first", "changed"):
        (project / "train.py").write_text(text)
        versions.append(pack_directory(str(project), spec.url))
        versions[-1].store(run)
    assert sorted(run.keys("run/code/")) == sorted(version.stored.key_for(run) for version in versions)


def test_storing_it_changes_nothing_of_another_run_to_which_a_link_leads(project, tmp_path):
    run, other = (Run.open(StorageSpec(str(tmp_path / "store")), name) for name in ("run", "other"))
    other.storage.put_bytes(other.layout.run_info, b"{}")
    run.storage.put_bytes(run.layout.run_info, b"{}")
    (tmp_path / "store/run/code").symlink_to("../other")
    with pytest.raises(PermissionError, match=r"store/run/code is a link to .*/store/other, and nothing is written"):
        pack_directory(str(project), str(tmp_path / "store")).store(run)
    assert other.keys("other/") == [other.layout.run_info]


def test_an_evaluation_leaves_the_code_to_another_of_its_name_that_is_about_to_begin(project, spec):
    run = Run.open(spec, "run")
    first = pack_directory(str(project), spec.url, "eval")
    first.store(run)
    (project / "train.py").write_text("changed")
    second = pack_directory(str(project), spec.url, "eval")
    second.store(run)
    with unpacked(first.stored, Run.open(spec, "run")) as copy:
        assert (copy / "train.py").read_text() == "train.py"
    key = run.layout.code(first.stored.sha256, "eval")
    two_hours_ago = time.time() - 7200
    os.utime(run.storage.local_path(key), (two_hours_ago, two_hours_ago))
    second.store(run)
    assert run.keys("run/evaluation-code/") == [run.layout.code(second.stored.sha256, "eval")]


def test_what_a_kill_left_of_a_put_is_replaced(project, spec):
    run = Run.open(spec, "run")
    packed = pack_directory(str(project), spec.url)
    packed.store(run)
    (key,) = run.keys("run/code/")
    run.storage.put_bytes(key, packed.archive[:100])
    packed.store(run)
    with unpacked(packed.stored, Run.open(spec, "run")) as copy:
        assert (copy / "train.py").read_text() == "train.py"


def test_an_archive_that_somebody_exchanged_is_not_unpacked(project, spec):
    """Not even one with the same size and xxh3."""
    run = Run.open(spec, "run")
    packed = pack_directory(str(project), spec.url)
    packed.store(run)
    (key,) = run.keys("run/code/")
    (project / "train.py").write_text("exchange")
    other = pack_directory(str(project), spec.url)
    assert len(other.archive) == len(packed.archive)
    run.storage.put_bytes(key, other.archive)
    for stored in (packed.stored, replace(packed.stored, digest=other.stored.digest)):
        with (
            pytest.raises(CheckpointCorruptError, match=f"{key} is not what was stored: "),
            unpacked(stored, Run.open(spec, "run")),
        ):
            pass


def test_linked_directories_are_left_out_with_a_warning_and_linked_files_are_copied(
    project, spec, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(packing, "get_run_logger", lambda: logging.getLogger("packing"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/lib.py").write_text("lib")
    (project / "shared").symlink_to(tmp_path / "shared")
    (project / "lib.py").symlink_to(tmp_path / "shared/lib.py")
    packed = pack_directory(str(project), spec.url)
    packed.store(Run.open(spec, "run"))
    with unpacked(packed.stored, Run.open(spec, "run")) as copy:
        assert (copy / "lib.py").read_text() == "lib"
        assert not (copy / "shared").exists()
    assert "has no linked directories: shared is left out" in caplog.text


def test_a_link_that_leads_above_it_and_a_name_in_another_encoding_are_told(project, monkeypatch, caplog):
    monkeypatch.setattr(packing, "get_run_logger", lambda: logging.getLogger("packing"))
    (project / ".prefectignore").write_text("*.bin\n")
    (project / "loop").symlink_to(project)
    if IS_3_9:  # it follows no link there
        pack_directory(str(project), "/nowhere")
        assert "has no linked directories: loop is left out" in caplog.text
    else:
        with pytest.raises(ValueError, match=r"has a link to a directory above it, so \.prefectignore cannot be applied"):
            pack_directory(str(project), "/nowhere")
    (project / "loop").unlink()
    (project / os.fsdecode(b"r\xe9sum\xe9.txt")).write_text("")
    with pytest.raises(ValueError, match=r"whose name is not UTF-8, rename it: r\\udce9sum"):
        pack_directory(str(project), "/nowhere")


@pytest.mark.parametrize("spell", [lambda link: link / "checkpoints", lambda link: link / "pkg/../checkpoints"])
def test_checkpoints_are_left_out_however_their_directory_is_spelled(project, spec, tmp_path, spell):
    link = tmp_path / "link"
    link.symlink_to(project)
    packed = pack_directory(str(link), str(spell(link)))
    packed.store(Run.open(spec, "run"))
    with unpacked(packed.stored, Run.open(spec, "run")) as copy:
        assert not (copy / "checkpoints").exists()
    with pytest.raises(ValueError, match="is the storage, whose checkpoints are not code"):
        pack_directory(str(project), str(link))


def test_a_machine_unpacks_once_as_long_as_a_rank_is_there(project, spec, monkeypatch):
    packed = pack_directory(str(project), spec.url)
    packed.store(Run.open(spec, "run"))
    got, get_file = [], LocalStorage.get_file
    monkeypatch.setattr(LocalStorage, "get_file", lambda self, key, *rest: (got.append(key), get_file(self, key, *rest))[1])
    with unpacked(packed.stored, Run.open(spec, "run")) as copy:
        with unpacked(packed.stored, Run.open(spec, "run")) as other:
            assert other == copy
        assert (copy / "train.py").exists()
    assert len(got) == 1
    assert not copy.exists()


@pytest.mark.parametrize(
    "write", ["shutil.copyfileobj", "prefect_torch.ckpt.storage.local_files.storage.LocalStorage.get_file"]
)
def test_a_full_disk_of_the_machine_is_told_with_its_place(project, spec, monkeypatch, write):
    packed = pack_directory(str(project), spec.url)
    packed.store(Run.open(spec, "run"))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write says it
    monkeypatch.setattr(write, Mock(side_effect=full))
    with (
        pytest.raises(OSError, match=r"copy of working_dir: free some, or set TMPDIR .*/cache/") as caught,
        unpacked(packed.stored, Run.open(spec, "run")),
    ):
        pass
    assert caught.value.errno == errno.ENOSPC


def test_a_directory_that_is_too_large_is_refused_with_its_largest_entries(project, monkeypatch):
    monkeypatch.setattr(packing, "_MOST_BYTES", 2000)
    (project / "data/big.bin").write_bytes(bytes(5000))
    with pytest.raises(ValueError, match=r"more than 2\.0 KiB: .*\.prefectignore; the largest are data/ \(4\.9 KiB\), "):
        pack_directory(str(project), "/nowhere")
    with pytest.raises(ValueError, match="there is no directory"):
        pack_directory(str(project / "none"), "/nowhere")


def test_paths_of_the_project_are_those_of_the_copy(project, tmp_path):
    copy = tmp_path / "copy"
    (copy / "pkg").mkdir(parents=True)
    (copy / "train.py").touch()
    path = (str(project), str(project / "pkg"), str(project / "env/lib"), "/usr/lib")
    function = PackedFunction(f"{project}/train.py:main", b"", path, str(project / "pkg"), "main")
    moved = within(function, str(project), copy)
    assert moved.reference == f"{copy}/train.py:main"
    assert moved.sys_path == (str(copy), str(copy / "pkg"), str(project / "env/lib"), "/usr/lib")
    assert moved.cwd == str(copy / "pkg")
    assert within(PackedFunction("train:main", b"", (), "/elsewhere", "main"), str(project), copy).cwd == str(copy)
