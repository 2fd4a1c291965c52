"""A checkpoint that is read in place stays until its readers have finished, whoever prunes."""

import errno
import fcntl
import multiprocessing
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from prefect_torch.ckpt import CheckpointNotFoundError, RetentionPolicy
from prefect_torch.ckpt.files import download
from prefect_torch.ckpt.runs.deletion import pruning
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prunes import prune_as_leader
from ranks import Attempt, folder, read_files


@pytest.fixture
def old(store, tmp_path):
    """A checkpoint of two files that the next prune deletes."""
    session = Attempt(store).session()
    for score in (1, 2):
        session.report({"score": score}, folder(tmp_path / "c", model=str(score), other="same"))
    return store.checkpoint(store.list()[0])


def data_of(store, checkpoint):
    return sorted(info.key.rpartition("/")[2] for info in store.storage.list(store.layout.data(checkpoint.id)))


@pytest.mark.parametrize("include", [None, "other"])
def test_a_prune_leaves_the_files_of_a_reader_until_it_has_finished(store, old, include):
    with old.as_directory(include=include) as directory:
        assert [manifest.id for manifest in prune_as_leader(store, RetentionPolicy(1)).drop] == [old.id]
        assert collect_garbage(store) == []
        assert (Path(directory) / "other").read_text() == "same"
        assert old.id not in store.ids()
        with pytest.raises(CheckpointNotFoundError), old.as_directory():
            pass
    assert collect_garbage(store) == [old.id]
    assert data_of(store, old) == []


def test_once_a_prune_has_looked_for_readers_none_begins(store, old, monkeypatch):
    looks, is_read = [], pruning.is_read

    def begin_before(*args):
        with pytest.raises(CheckpointNotFoundError), old.as_directory():
            pass
        looks.append(args)
        return is_read(*args)

    monkeypatch.setattr(pruning, "is_read", begin_before)
    prune_as_leader(store, RetentionPolicy(1))
    assert len(looks) == 1
    assert data_of(store, old) == []


def test_a_reader_that_comes_after_a_prune_has_looked_for_readers_is_told(store, old, monkeypatch):
    reading = download.reading

    @contextmanager
    def reading_late(*args):
        store.storage.delete([store.layout.manifest(old.id)])  # as far as a prune is then: the data follow
        with reading(*args):
            yield

    monkeypatch.setattr(download, "reading", reading_late)
    with pytest.raises(CheckpointNotFoundError, match=old.id), old.as_directory():
        pass


def test_a_prune_deletes_where_a_file_that_was_opened_for_writing_is_refused_at_its_close(store, old, monkeypatch):
    """As a mount of rclone without --vfs-cache-mode does, whose files are written whole or not at all."""
    close, refused = os.close, []

    def refuse(descriptor):
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        close(descriptor)
        if mode == os.O_RDWR:
            refused.append(descriptor)
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "close", refuse)
    assert [manifest.id for manifest in prune_as_leader(store, RetentionPolicy(1)).drop] == [old.id]
    assert refused
    assert data_of(store, old) == []


def test_a_state_is_loaded_whole_though_it_is_pruned_meanwhile(store, monkeypatch):
    session = Attempt(store).session()
    for score in (1.0, 2.0):
        session.report({}, state={"w": torch.full((3, 3), score)}, upload="sync")
    old = store.checkpoint(store.list()[0])
    read, pruned = LocalStorage.get_range, []

    def prune_first(self, *args):
        if not pruned:
            pruned.extend(prune_as_leader(store, RetentionPolicy(1)).drop)
        return read(self, *args)

    monkeypatch.setattr(LocalStorage, "get_range", prune_first)
    state = {"w": torch.zeros(3, 3)}
    old.load_state(state)
    assert [manifest.id for manifest in pruned] == [old.id]
    assert torch.equal(state["w"], torch.ones(3, 3))
    assert collect_garbage(store) == [old.id]


def _read(path, started):
    from prefect_torch.ckpt import Checkpoint  # noqa: PLC0415 - another process

    with Checkpoint(path).as_directory():
        started.set()
        signal.pause()


def test_a_reader_that_was_killed_keeps_nothing(store, old):
    processes = multiprocessing.get_context("fork")
    started = processes.Event()
    reader = processes.Process(target=_read, args=(old.path, started))
    reader.start()
    assert started.wait(20)
    prune_as_leader(store, RetentionPolicy(1))
    assert collect_garbage(store) == []
    assert data_of(store, old) == ["model", "other"]
    reader.kill()
    reader.join(20)
    assert collect_garbage(store) == [old.id]


def test_files_that_nobody_may_write_are_protected_as_well(store, old):
    for path in Path(old.path).iterdir():
        path.chmod(0o444)
    with old.as_directory():
        prune_as_leader(store, RetentionPolicy(1))
        assert data_of(store, old) == ["model", "other"]


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def prune_and_read(store, checkpoint, path):
    with checkpoint.as_directory() as directory:
        prune_as_leader(store, RetentionPolicy(1))
        (Path(directory) / path).read_bytes()


@pytest.mark.usefixtures("no_locks")
def test_where_there_are_no_locks_the_error_says_that_it_was_pruned(store, old):
    with pytest.raises(CheckpointNotFoundError, match=rf"no checkpoint {old.id}: it was pruned"):
        prune_and_read(store, old, "model")


def test_what_a_reader_itself_does_not_find_stays_its_own_error(store, old, tmp_path):
    with pytest.raises(FileNotFoundError, match="typo") as caught, old.as_directory() as directory:
        (Path(directory) / "typo").read_bytes()
    assert not isinstance(caught.value, CheckpointNotFoundError)
    with pytest.raises(FileNotFoundError, match="elsewhere") as caught:
        prune_and_read(store, old, str(tmp_path / "elsewhere"))
    assert not isinstance(caught.value, CheckpointNotFoundError)


def test_a_reader_that_comes_while_it_is_pruned_is_told(store, old):
    store.storage.delete([store.layout.manifest(old.id)])
    with pytest.raises(CheckpointNotFoundError, match=old.id):
        read_files(old)
