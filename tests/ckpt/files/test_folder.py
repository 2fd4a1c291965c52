import os

import pytest
from prefect_torch.ckpt.files.folder import group_files, read_metadata, scan_files
from prefect_torch.ckpt.storage.local_files.storage import MOST_RECORD_BYTES, LocalStorage


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


@pytest.mark.parametrize("end", ["nowhere", "file/below", "x", "y"])
def test_a_link_to_nothing_is_refused(tmp_path, end):
    """It may miss its end, lead through a file, or lead to itself, at once or by another link."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "x").symlink_to(end)
    if end == "y":
        (tmp_path / "y").symlink_to("x")
    with pytest.raises(ValueError, match="x is a link to nothing"):
        scan_files(tmp_path)


@pytest.mark.parametrize("end", [".", "..", "../.."])
def test_a_link_to_a_folder_above_is_refused(tmp_path, end):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/up").symlink_to(end)
    with pytest.raises(ValueError, match="links back"):
        scan_files(tmp_path)


def test_folders_that_link_to_each_other_are_refused(tmp_path):
    for name, other in [("a", "b"), ("b", "a")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "other").symlink_to(f"../{other}")
    with pytest.raises(ValueError, match="links back"):
        scan_files(tmp_path)


def test_folders_so_deep_that_the_run_could_not_be_listed_are_refused(tmp_path):
    deepest = "a/" * 100
    (tmp_path / deepest).mkdir(parents=True)
    (tmp_path / deepest / "x").write_bytes(b"")
    assert scan_files(tmp_path) == [f"{deepest}x"]
    storage = LocalStorage(tmp_path)
    assert [info.key for info in storage.list("")] == [f"{deepest}x"]
    (tmp_path / deepest / "a").mkdir()
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        scan_files(tmp_path)


def test_one_folder_by_two_names_is_no_loop(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_bytes(b"")
    (tmp_path / "b").symlink_to("a")
    assert scan_files(tmp_path) == ["a/x", "b/x"]


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a directory"):
        scan_files(tmp_path)


@pytest.mark.timeout(30)
def test_metadata_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / ".metadata.json")
    with pytest.raises(ValueError, match=r"\.metadata\.json is no file; remove it"):
        read_metadata(tmp_path)


def test_metadata_that_is_too_large_is_refused(tmp_path):
    (tmp_path / ".metadata.json").touch()
    os.truncate(tmp_path / ".metadata.json", MOST_RECORD_BYTES + 1)
    with pytest.raises(ValueError, match=r"\.metadata\.json has 1073741825 bytes, and metadata 1073741824 at most"):
        read_metadata(tmp_path)


def test_a_link_to_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "mine/link").symlink_to("../pipe")
    with pytest.raises(ValueError, match="link is neither a file nor a directory"):
        scan_files(tmp_path / "mine")


@pytest.mark.parametrize("name", ["a\\b", "line\nbreak"])
def test_a_name_that_no_storage_holds_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be stored"):
        scan_files(tmp_path)


def test_a_name_that_is_no_text_is_refused(tmp_path):
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff", os.O_CREAT))
    with pytest.raises(ValueError, match="not valid text"):
        scan_files(tmp_path)


def test_a_name_that_storages_use_for_unfinished_files_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/.tmp-0123456789abcdef").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a/\.tmp-0123456789abcdef.*rename it"):
        scan_files(tmp_path)


def test_a_deleted_file_that_a_process_still_has_open_is_no_file_of_a_report(tmp_path):
    """As on NFS, where a new file replaced one that is mapped into memory."""
    for name in ("model", ".nfs0000000004b40e9f00093dd8", ".nfs-notes"):
        (tmp_path / name).write_bytes(b"")
    assert scan_files(tmp_path) == [".nfs-notes", "model"]


def test_small_files_are_stored_together_up_to_a_number_and_a_size_and_large_ones_alone(tmp_path):
    sizes = {"large": 2**20, **{f"a{number}": 10 for number in range(5)}, **{f"b{number}": 2**20 - 1 for number in range(40)}}
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    any_number = group_files(tmp_path, sizes, owned=False, most=None)
    few = group_files(tmp_path, sizes, owned=False, most=3)
    assert [len(group.paths) for group in any_number] == [1, 5 + 32, 8]
    assert {len(group.paths) for group in few} == {1, 3}
    for groups in (any_number, few):
        assert sorted(path for group in groups for path in group.paths) == sorted(sizes)
        assert groups[0].paths == ("large",)
