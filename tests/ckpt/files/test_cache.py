"""The node's download cache, with processes, threads, kills, another user's directory and changed files."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading

import pytest
import xxhash
from prefect_torch.ckpt.files.cache import downloaded
from prefect_torch.ckpt.runs.manifest import FileEntry
from prefect_torch.ckpt.storage.digest import digest_file
from prefect_torch.ckpt.storage.machine import scratch
from ranks import cached


def _write(path, target):
    target.write_text(path)


def entries(*paths):
    """Return what is committed of files that `_write` writes."""
    return {path: FileEntry(path, len(path), xxhash.xxh3_128_hexdigest(path.encode()), 0) for path in paths}


def _hold(started, name):
    with downloaded(name, entries("x"), _write):
        started.set()
        signal.pause()


def test_what_a_killed_reader_left_is_swept_by_the_next(node):
    started = multiprocessing.get_context("fork").Event()
    reader = multiprocessing.get_context("fork").Process(target=_hold, args=(started, "one"))
    reader.start()
    assert started.wait(20)
    with downloaded("other", entries("y"), _write):
        assert {path.name for path in cached(node)} == {"x", "y"}  # the living reader keeps its own
        os.kill(reader.pid, signal.SIGKILL)
        reader.join()
    with downloaded("third", entries("z"), _write):
        assert {path.name for path in cached(node)} == {"z"}


def test_what_its_last_reader_leaves_is_deleted_though_a_process_that_it_forked_lives_on(node):
    processes = multiprocessing.get_context("fork")
    may_end = processes.Event()
    forked = processes.Process(target=may_end.wait, daemon=True)
    with downloaded("one", entries("x"), _write):
        forked.start()
    left = cached(node)
    may_end.set()
    forked.join()
    assert left == []


def test_a_file_that_cannot_be_deleted_yet_is_no_readers_error_and_no_part_of_the_next_download(node, monkeypatch):
    """As on NFS, where a file that is mapped into memory stays, and so does its directory."""
    unlink, stays = os.unlink, []

    def keep(path, *args, **folder):
        if path == "x":
            stays.append(path)
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        unlink(path, *args, **folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", keep)
        for names in (("x", "y"), ("y",)):
            with downloaded("one", entries(*names), _write) as files:
                assert sorted(path.name for path in files.iterdir()) == list(names)
        assert len(stays) > 1
        assert [path.name for path in cached(node)] == ["x"]
    with downloaded("two", entries("z"), _write):
        assert [path.name for path in cached(node)] == ["z"]


def test_machines_that_share_a_temporary_directory_touch_nothing_of_each_other(node, monkeypatch):
    """Whose locks they do not know, as on BeeGFS or an NFS without them."""
    with downloaded("one", entries("x"), _write) as files:
        with monkeypatch.context() as there:
            there.setattr("prefect_torch.ckpt.files.cache.own_mark", lambda: "0" * 16)
            there.setattr(fcntl, "flock", lambda *_: None)
            with downloaded("one", entries("x"), _write) as theirs:
                assert theirs != files
        assert (files / "x").read_text() == "x"
    assert cached(node) == []


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_an_earlier_boot_left_is_deleted_unless_it_may_be_a_living_machines(node, monkeypatch, is_shared):
    monkeypatch.setattr(scratch, "is_local", lambda _: not is_shared)
    (left := _root(node) / ("0" * 16) / "entry/files/x").parent.mkdir(parents=True)
    left.write_text("x")
    os.utime(_root(node) / ("0" * 16), (1e9, 1e9))
    with downloaded("one", entries("y"), _write):
        assert left.exists() == is_shared


def test_a_reader_outlives_what_cleans_the_temporary_directory(node):
    with downloaded("one", entries("x"), _write) as files:
        cleaner = os.open(files.parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # what systemd-tmpfiles tries before it looks into a directory
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(cleaner)
        for lock in node.rglob("*.lock"):
            lock.unlink()
        with downloaded("two", entries("y"), _write):
            assert (files / "x").read_text() == "x"
        assert (files / "x").read_text() == "x"
    assert cached(node) == []


def _hang(started):
    def write_half(path, target):
        target.write_text("half")
        started.set()
        signal.pause()

    with downloaded("one", entries("x"), write_half):
        pass


def test_a_reader_that_is_killed_while_it_downloads_holds_up_nobody_for_long(node):
    started = multiprocessing.get_context("fork").Event()
    killed = multiprocessing.get_context("fork").Process(target=_hang, args=(started,))
    killed.start()
    assert started.wait(20)
    seen = []

    def read():
        with downloaded("one", entries("x", "y"), _write) as files:
            seen.append({path.name: path.read_text() for path in files.iterdir()})

    with downloaded("one", entries("y"), _write) as files:  # what nobody downloads just now need not wait
        assert [path.name for path in files.iterdir()] == ["y"]
        reader = threading.Thread(target=read)
        reader.start()
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
        reader.join(20)
    assert seen == [{"x": "x", "y": "y"}]
    assert cached(node) == []


def test_a_download_that_failed_is_the_error_of_its_reader_alone_and_done_again_by_the_next(node):
    def fail(path, target):
        if path == "y":
            target.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        raise AssertionError("x is there already")

    with downloaded("one", entries("x"), _write) as files:
        with pytest.raises(OSError, match="No space left"), downloaded("one", entries("x", "y"), fail):
            pass
        assert [path.name for path in cached(node)] == ["x"]  # the half is gone, since the disk is full
        with downloaded("one", entries("y"), _write):
            assert {path.name: path.read_text() for path in files.iterdir()} == {"x": "x", "y": "y"}
    assert cached(node) == []


def _root(node):
    return node / f"prefect-torch-{os.geteuid()}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_cache_of_another_user_is_refused_and_not_read(node):
    _root(node).mkdir(mode=0o700)
    os.chown(_root(node), 54321, 54321)
    with pytest.raises(PermissionError, match=r"belongs to user 54321, not to 0.*remove it, or set TMPDIR"):
        downloaded("one", entries("x"), _write).__enter__()
    assert list(_root(node).iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_cache_that_is_no_folder_is_refused(node, tmp_path, kind):
    if kind == "link":
        _root(node).symlink_to(tmp_path)
    else:
        _root(node).touch()
    with pytest.raises(PermissionError, match=r"prefect-torch-\d+, where .* (is a link|is no directory), so"):
        downloaded("one", entries("x"), _write).__enter__()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_cache_that_others_may_write_to_is_refused(node, mode):
    _root(node).mkdir()
    _root(node).chmod(mode)
    with pytest.raises(PermissionError, match=rf"written to by others \(mode {mode:04o}\)"):
        downloaded("one", entries("x"), _write).__enter__()
    _root(node).chmod(0o750)
    with downloaded("one", entries("x"), _write) as files:
        assert (files / "x").read_text() == "x"


def test_a_cache_is_its_users_alone_whatever_the_umask(node):
    before = os.umask(0)
    try:
        with downloaded("one", entries("x"), _write):
            assert _root(node).stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_file_that_is_found_is_verified_once_and_downloaded_again_if_it_is_another(node, caplog, monkeypatch):
    read = []
    monkeypatch.setattr("prefect_torch.ckpt.files.cache.digest_file", lambda path: read.append(path.name) or digest_file(path))
    with downloaded("one", entries("x", "y"), _write) as files:
        with downloaded("one", entries("x", "y"), _write):
            assert read == []  # verified on the way
        monkeypatch.setattr("prefect_torch.ckpt.files.cache._contents", {})  # as in another process
        for _ in range(2):
            with downloaded("one", entries("x", "y"), _write):
                assert sorted(read) == ["x", "y"]
        (files / "x").write_text("z")  # as long as before
        with downloaded("one", entries("x"), _write) as found:
            assert (found / "x").read_text() == "x"
    assert caplog.text.count("is not what was committed") == 1


def test_readers_who_want_one_file_at_once_do_not_share_an_error(node):
    first_downloads, second_waits = threading.Event(), threading.Event()
    outcomes = {}

    def fail(path, target):
        first_downloads.set()
        assert second_waits.wait(20)
        raise ConnectionError

    def read(name, download):
        try:
            with downloaded("one", entries("x"), download) as files:
                outcomes[name] = (files / "x").read_text()
        except ConnectionError:
            outcomes[name] = "failed"

    threads = [threading.Thread(target=read, args=it) for it in (("first", fail), ("second", _write))]
    threads[0].start()
    assert first_downloads.wait(20)
    threads[1].start()
    second_waits.set()
    for thread in threads:
        thread.join(20)
    assert outcomes == {"first": "failed", "second": "x"}
