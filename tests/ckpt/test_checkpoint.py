import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_storage import FaultyStorage
from prefect_torch.ckpt import Checkpoint, CheckpointCorruptError, CheckpointNotFoundError, CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.cache import downloaded
from prefect_torch.ckpt.layout import Layout
from ranks import Attempt, folder, read_files


@pytest.fixture
def local(tmp_path):
    return CheckpointStore.open(tmp_path / "store", "run")


@pytest.fixture
def remote(tmp_path):
    return CheckpointStore.open(f"memory://{tmp_path}", "run")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The node's cache, empty and our own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def commit(store, tmp_path, **files):
    Attempt(store).session().report({"loss": 1}, folder(tmp_path / "c", **files))
    return store.checkpoint(store.list()[-1])


def cached(cache):
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_local_checkpoint_is_read_in_place(local, tmp_path):
    checkpoint = commit(local, tmp_path, model="x")
    with checkpoint.as_directory() as directory:
        assert Path(directory) == tmp_path / "store/run/checkpoints" / checkpoint.id


def test_a_local_checkpoint_that_changed_is_never_handed_out(local, tmp_path):
    checkpoint = commit(local, tmp_path, model="x")
    (Path(checkpoint.path) / "model").write_bytes(b"y")
    with pytest.raises(CheckpointCorruptError, match="model differs"), checkpoint.as_directory():
        pass


def test_a_remote_checkpoint_is_downloaded_and_deleted_after_the_reader(remote, tmp_path, cache):
    checkpoint = commit(remote, tmp_path, model="x")
    with checkpoint.as_directory() as directory:
        assert (Path(directory) / "model").read_bytes() == b"x"
        assert cache in Path(directory).parents
    assert cached(cache) == []


def test_a_remote_checkpoint_that_changed_is_never_handed_out(remote, tmp_path, cache):
    checkpoint = commit(remote, tmp_path, model="x")
    remote.storage.put_bytes(remote.layout.data(checkpoint.id, "model"), b"y")
    with pytest.raises(CheckpointCorruptError, match="model differs"), checkpoint.as_directory():
        pass
    assert cached(cache) == []


def test_many_threads_cost_one_download(remote, tmp_path, cache):
    checkpoint = commit(remote, tmp_path, model="x" * 1000, other="y")
    counting = FaultyStorage(remote.storage)
    store = CheckpointStore(counting, Layout("run"), remote.spec)
    handle = store.checkpoint(checkpoint.manifest)
    all_read = threading.Barrier(8)
    seen = []

    def read():
        with handle.as_directory() as directory:
            seen.append((directory, (Path(directory) / "model").stat().st_size))
            all_read.wait(20)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert Counter(seen) == {seen[0]: 8}
    assert counting.counts()["get_file"] == 2
    assert cached(cache) == []


def _hold(started, name):
    with downloaded(name, lambda target: (target / "x").write_bytes(b"1")):
        started.set()
        signal.pause()


def test_what_a_killed_reader_left_is_swept_by_the_next(cache):
    started = multiprocessing.get_context("fork").Event()
    reader = multiprocessing.get_context("fork").Process(target=_hold, args=(started, "one"))
    reader.start()
    assert started.wait(20)
    with downloaded("other", lambda target: (target / "y").write_bytes(b"2")):
        assert {path.name for path in cached(cache)} == {"x", "y"}  # the living reader keeps its own
        os.kill(reader.pid, signal.SIGKILL)
        reader.join()
    with downloaded("third", lambda target: (target / "z").write_bytes(b"3")):
        assert {path.name for path in cached(cache)} == {"z"}


def test_a_download_that_failed_is_done_again(cache):
    def fail(target):
        (target / "half").write_bytes(b"")
        raise ConnectionError

    with pytest.raises(ConnectionError), downloaded("one", fail):
        pass
    with downloaded("one", lambda target: (target / "whole").write_bytes(b"")) as files:
        assert [path.name for path in files.iterdir()] == ["whole"]


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_to_directory_gives_the_caller_files_of_their_own(kind, tmp_path, request):
    checkpoint = commit(request.getfixturevalue(kind), tmp_path, model="x")
    checkpoint.set_metadata({"a": 1})
    directory = Path(checkpoint.to_directory(tmp_path / "mine"))
    (directory / "model").write_bytes(b"changed")
    assert read_files(checkpoint) == {"model": b"x"}
    assert Checkpoint.from_directory(directory).get_metadata() == {"a": 1}


def test_to_directory_makes_a_folder_of_its_own_if_none_is_given(local, tmp_path):
    directory = Path(commit(local, tmp_path, model="x").to_directory())
    assert (directory / "model").read_bytes() == b"x"


def test_a_pruned_checkpoint_is_not_found_by_run_and_id(remote, tmp_path):
    old = commit(remote, tmp_path, model="x")
    commit(remote, tmp_path, model="y")
    remote.prune(RetentionPolicy(1))
    with pytest.raises(CheckpointNotFoundError, match=rf"run 'run' .*{old.id}"), old.as_directory():
        pass


def test_a_path_or_url_of_a_committed_checkpoint_opens_it(local, remote, tmp_path):
    for store in (local, remote):
        checkpoint = commit(store, tmp_path, model="x")
        again = Checkpoint(checkpoint.path)
        assert (again.id, again.metrics, again.step) == (checkpoint.id, {"loss": 1}, 0)
        assert again == checkpoint
        assert read_files(again) == {"model": b"x"}


def test_a_handle_travels_to_another_process(local, tmp_path):
    checkpoint = commit(local, tmp_path, model="x")
    again = pickle.loads(pickle.dumps(checkpoint))
    assert (again, again.metrics) == (checkpoint, {"loss": 1})
    assert read_files(again) == {"model": b"x"}


def test_a_plain_folder_has_no_id_and_no_metrics(tmp_path):
    checkpoint = folder(tmp_path / "c", model="x")
    assert (checkpoint.id, checkpoint.metrics) == (None, {})
    with checkpoint.as_directory() as directory:
        assert directory == str(tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError, match="plain folder"):
        _ = checkpoint.manifest


def test_a_url_that_is_no_checkpoint_is_refused():
    with pytest.raises(ValueError, match="<storage>/<run>/checkpoints/<id>"):
        Checkpoint("s3://bucket/run")


@pytest.mark.parametrize("metadata", [{"x": object()}, {"x": float("nan")}, {"x": {1, 2}}])
def test_metadata_is_what_json_can_hold(tmp_path, metadata):
    with pytest.raises(ValueError, match="metadata"):
        folder(tmp_path / "c").set_metadata(metadata)


def test_a_manifest_that_leads_elsewhere_writes_nothing_there(remote, tmp_path):
    checkpoint = commit(remote, tmp_path, model="x")
    evil = replace(checkpoint.manifest, files=(replace(checkpoint.manifest.files[0], path="../../evil"),))
    remote.storage.put_bytes(remote.layout.manifest(checkpoint.id), evil.encode())
    with pytest.raises(ValueError, match="storage key"):
        remote.checkpoint(evil).to_directory(tmp_path / "a/b")
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("make", [Checkpoint, Checkpoint.from_directory])
def test_an_empty_path_is_not_the_working_folder(make):
    with pytest.raises(ValueError, match="the path of a checkpoint is empty"):
        make("")


def test_a_file_named_like_a_download_in_progress_is_downloaded_too(remote, tmp_path, cache):
    files = {"model.pt": b"m" * 1000, "model.pt.partial": b"p", ".partial": b"q"}
    assert read_files(commit(remote, tmp_path, **files)) == files
