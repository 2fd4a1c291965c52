import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from prefect_torch.ckpt.files.folder import scan_files
from prefect_torch.ckpt.storage.machine.handover import adopt_files


def test_what_is_taken_over_is_moved(tmp_path):
    (tmp_path / "mine/a").mkdir(parents=True)
    (tmp_path / "mine/a/x").write_bytes(b"1")
    inode = (tmp_path / "mine/a/x").stat().st_ino
    taken = adopt_files(tmp_path / "mine", ["a/x"])
    assert (taken / "a/x").stat().st_ino == inode
    assert not (tmp_path / "mine/a/x").exists()


def test_what_a_link_names_stays_where_it_is(tmp_path):
    (tmp_path / "data").write_bytes(b"1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x").symlink_to(tmp_path / "data")
    taken = adopt_files(tmp_path / "mine", ["x"])
    assert (taken / "x").read_bytes() == b"1"
    assert (tmp_path / "data").read_bytes() == b"1"


def test_what_a_link_to_a_folder_names_outside_is_copied(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/x").write_bytes(b"1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/folder").symlink_to(tmp_path / "outside")
    taken = adopt_files(tmp_path / "mine", scan_files(tmp_path / "mine"))
    assert not (taken / "folder").is_symlink()
    assert (taken / "folder/x").read_bytes() == b"1"
    assert (tmp_path / "outside/x").read_bytes() == b"1"


def test_what_a_link_names_inside_is_there_under_both_names(tmp_path):
    """Such as last.pt -> step-7.pt, which comes after the file that moves, and best.pt, which comes before."""
    mine = tmp_path / "mine"
    (mine / "steps").mkdir(parents=True)
    (mine / "steps/7.pt").write_bytes(b"7")
    (mine / "best.pt").symlink_to("steps/7.pt")
    (mine / "zzz.pt").symlink_to("steps/7.pt")
    (mine / "window").symlink_to("steps")
    paths = scan_files(mine)
    taken = adopt_files(mine, paths)
    shutil.rmtree(mine)
    assert paths == ["best.pt", "steps/7.pt", "window/7.pt", "zzz.pt"]
    assert [(taken / path).read_bytes() for path in paths] == [b"7"] * 4


def test_a_directory_that_is_itself_a_link_hands_its_files_over(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/x").write_bytes(b"1")
    (tmp_path / "name").symlink_to("real")
    taken = adopt_files(tmp_path / "name", ["x"])
    assert (taken / "x").read_bytes() == b"1"
    assert not (tmp_path / "real/x").exists()


def test_taken_files_lie_beside_the_directory_they_came_from(tmp_path):
    (tmp_path / "mine").mkdir()
    assert adopt_files(tmp_path / "mine", []).parent == tmp_path


def test_where_nothing_can_be_made_beside_the_directory_taken_files_lie_in_the_temporary_one(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x").write_bytes(b"1")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root, who may run this, can write everywhere
    taken = adopt_files(tmp_path / "mine", ["x"])
    assert taken.parent == tmp_path / "temporary"
    assert (taken / "x").read_bytes() == b"1"


def test_across_filesystems_what_is_taken_over_is_copied_and_removed(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x").write_bytes(b"1")
    refused = []

    def refuse(source, target):
        refused.append(source)
        raise OSError(errno.EXDEV, "another filesystem")

    monkeypatch.setattr(os, "rename", refuse)
    taken = adopt_files(tmp_path / "mine", ["x"])
    assert len(refused) == 1
    assert (taken / "x").read_bytes() == b"1"
    assert not (tmp_path / "mine/x").exists()


def test_files_that_cannot_all_be_taken_stay_where_they_were(tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("a", "b", "c"):
        (mine / name).write_text(name)
    move = shutil.move

    def fail_at_the_last(source, target):
        if Path(source) == mine / "c":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return move(source, target)

    monkeypatch.setattr(shutil, "move", fail_at_the_last)
    with pytest.raises(OSError, match="No space left"):
        adopt_files(mine, ["a", "b", "c"])
    assert {path.name: path.read_text() for path in mine.iterdir()} == {"a": "a", "b": "b", "c": "c"}
    assert list(tmp_path.iterdir()) == [mine]
