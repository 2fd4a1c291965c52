import os

import pytest
from prefect_torch.ckpt.staging import scan_files, take_over


def test_files_are_found_at_any_depth_and_metadata_is_not_one(tmp_path):
    for name in ["b.pt", "a/x/deep.pt", "a/y", ".metadata.json", "a/.metadata.json", ".hidden"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty").mkdir()
    assert scan_files(tmp_path) == [".hidden", "a/.metadata.json", "a/x/deep.pt", "a/y", "b.pt"]


def test_links_are_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/data").write_bytes(b"")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "file").symlink_to(tmp_path / "outside/data")
    (inside / "folder").symlink_to(tmp_path / "outside")
    assert scan_files(inside) == ["file", "folder/data"]


def test_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "x").symlink_to("nowhere")
    with pytest.raises(ValueError, match="is a link to nothing"):
        scan_files(tmp_path)


def test_a_link_to_a_folder_above_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/up").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="links back"):
        scan_files(tmp_path)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        scan_files(tmp_path)


@pytest.mark.parametrize("name", ["a\\b", "line\nbreak"])
def test_a_name_that_no_storage_holds_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be stored"):
        scan_files(tmp_path)


def test_a_name_that_is_no_text_is_refused(tmp_path):
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff", os.O_CREAT))
    with pytest.raises(ValueError, match="not valid text"):
        scan_files(tmp_path)


def test_what_is_taken_over_is_moved(tmp_path):
    (tmp_path / "mine/a").mkdir(parents=True)
    (tmp_path / "mine/a/x").write_bytes(b"1")
    inode = (tmp_path / "mine/a/x").stat().st_ino
    taken = take_over(tmp_path / "mine", ["a/x"])
    assert (taken / "a/x").stat().st_ino == inode
    assert not (tmp_path / "mine/a/x").exists()


def test_what_a_link_names_stays_where_it_is(tmp_path):
    (tmp_path / "data").write_bytes(b"1")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x").symlink_to(tmp_path / "data")
    taken = take_over(tmp_path / "mine", ["x"])
    assert (taken / "x").read_bytes() == b"1"
    assert (tmp_path / "data").read_bytes() == b"1"
