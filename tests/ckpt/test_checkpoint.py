import multiprocessing
import os
import pickle
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import checkpoint_readers
import pytest
from faulty_storage import FaultyStorage
from prefect_torch.ckpt import (
    Checkpoint,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointStore,
    RankLocalStateError,
    RetentionPolicy,
    TrainContext,
    report,
)
from prefect_torch.ckpt.files.download import download, download_file
from prefect_torch.ckpt.files.folder import scan_files
from prefect_torch.ckpt.files.selection import choose_in_folder
from prefect_torch.ckpt.reporting.api import start_session
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prunes import prune_as_leader
from ranks import Attempt, cached, folder, read_files
from wrapped_storage import WrappedStorage


@pytest.fixture
def local(tmp_path):
    return CheckpointStore.open(tmp_path / "store", "run")


@pytest.fixture
def remote(tmp_path):
    return CheckpointStore.open(f"memory://{tmp_path}", "run")


def commit(store, tmp_path, **files):
    Attempt(store).session().report({"loss": 1}, folder(tmp_path / "c", **files))
    return store.checkpoint(store.list()[-1])


def test_a_local_checkpoint_is_read_in_place(local, tmp_path):
    checkpoint = commit(local, tmp_path, model="x")
    with checkpoint.as_directory() as directory:
        assert Path(directory) == tmp_path / "store/run/checkpoints" / checkpoint.id


def test_a_local_checkpoint_that_changed_is_never_handed_out(local, tmp_path):
    checkpoint = commit(local, tmp_path, model="x")
    (Path(checkpoint.path) / "model").write_bytes(b"y")
    with pytest.raises(CheckpointCorruptError, match="model differs"), checkpoint.as_directory():
        pass


def test_a_file_of_another_size_is_not_copied(local, tmp_path):
    checkpoint = commit(local, tmp_path, model="x")
    os.truncate(Path(checkpoint.path) / "model", 2**26)
    with pytest.raises(CheckpointCorruptError, match=r"model has 67108864 bytes instead of 1"):
        checkpoint.to_directory(tmp_path / "out")
    assert list((tmp_path / "out").rglob("*")) == []


def test_an_object_that_has_grown_is_not_downloaded(remote, tmp_path, node):
    """A checkpoint of a few bytes could fill the disk."""
    checkpoint = commit(remote, tmp_path, model="x")
    remote.storage.put_bytes(remote.layout.data(checkpoint.id, "model"), bytes(2**20))
    written = []

    class Watching(WrappedStorage):
        def get_file(self, key, path, *rest):
            got = self.inner.get_file(key, path, *rest)
            written.append(path.exists())
            return got

    store = CheckpointStore(Watching(remote.storage), Layout("run"), remote.spec)
    with pytest.raises(CheckpointCorruptError, match=r"model has 1048576 bytes instead of 1"):
        store.checkpoint(checkpoint.manifest).to_directory(tmp_path / "out")
    assert written == [False, False], "damage is confirmed by another look"


def test_a_remote_checkpoint_is_downloaded_and_deleted_after_the_reader(remote, tmp_path, node):
    checkpoint = commit(remote, tmp_path, model="x")
    with checkpoint.as_directory() as directory:
        assert (Path(directory) / "model").read_bytes() == b"x"
        assert node in Path(directory).parents
    assert cached(node) == []


def test_a_remote_checkpoint_that_changed_is_never_handed_out(remote, tmp_path, node):
    checkpoint = commit(remote, tmp_path, model="x")
    remote.storage.put_bytes(remote.layout.data(checkpoint.id, "model"), b"y")
    with pytest.raises(CheckpointCorruptError, match="model differs"), checkpoint.as_directory():
        pass
    assert cached(node) == []


def test_a_checkpoint_without_files_is_an_empty_folder(local, remote, tmp_path, node):
    for store in (local, remote):
        with commit(store, tmp_path / "none").as_directory() as directory:
            assert list(Path(directory).iterdir()) == []


def test_a_user_of_this_machine_needs_no_name(remote, tmp_path, node, monkeypatch):
    """As in a container that runs as a user whom nobody added."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # whose name would be asked for
    assert read_files(commit(remote, tmp_path, model="x")) == {"model": b"x"}


def test_many_threads_cost_one_download(remote, tmp_path, node):
    checkpoint = commit(remote, tmp_path, model="x" * 1000, other="y")
    counting = FaultyStorage(remote.storage, delay_s=0.02)
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
    assert cached(node) == []


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_download_to_a_full_disk_names_the_disk(kind, tmp_path, request):
    store = request.getfixturevalue(kind)
    manifest = commit(store, tmp_path, model="x").manifest
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        download_file(store, manifest, manifest.files[0], Path("/dev/full"))


def test_many_processes_and_threads_download_each_file_once_whatever_each_wants_of_it(moto, tmp_path, node, monkeypatch):
    for name, value in moto.options().items():
        monkeypatch.setenv(name.upper(), value)
    url = f"s3://{moto.new_bucket()}/folder"
    commit(CheckpointStore.open(url, "run"), tmp_path, **{name: name * 1000 for name in "abcd"})
    wanted = [[None, ["a", "b"], ["b", "c"]], [["c"], None, ["a"]], [["b"], ["c", "b"], None]]
    spawning = multiprocessing.get_context("spawn")  # obstore's threads do not live through a fork
    everybody_reads = spawning.Barrier(9)
    record = tmp_path / "downloads"
    place = (url, str(node), str(record))
    readers = [spawning.Process(target=checkpoint_readers.read, args=(place, of, everybody_reads)) for of in wanted]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(120)
    assert [reader.exitcode for reader in readers] == [0, 0, 0]
    assert sorted(line.rpartition("/")[2] for line in record.read_text().splitlines()) == ["a", "b", "c", "d"]
    assert cached(node) == []


@pytest.fixture(params=["local", "remote"])
def sharded(request, tmp_path, node):
    """A checkpoint of two ranks, each with a file of its own, and some of both."""
    store = request.getfixturevalue(request.param)

    def report(session, rank):
        files = folder(tmp_path / f"c{rank}", **{f"part-{rank}.pt": f"{rank}", "same.json": "{}"})
        if rank == 0:
            folder(tmp_path / "c0/optimizer", **{"a.pt": "a", "b.bin": "b"})
        session.report({}, files)

    assert Attempt(store, 2).run(report) == [None, None]
    return store.checkpoint(store.latest())


EVERYTHING = {"part-0.pt", "part-1.pt", "same.json", "optimizer/a.pt", "optimizer/b.bin"}


@pytest.mark.parametrize(
    ("include", "chosen"),
    [
        (None, EVERYTHING),
        ("*", EVERYTHING),
        ("*.pt", {"part-0.pt", "part-1.pt", "optimizer/a.pt"}),
        ("part-[0-9].pt", {"part-0.pt", "part-1.pt"}),
        ("optimizer", {"optimizer/a.pt", "optimizer/b.bin"}),
        ("opt*/", {"optimizer/a.pt", "optimizer/b.bin"}),
        (["same.json", "*/a.pt"], {"same.json", "optimizer/a.pt"}),
        ([], set()),
    ],
)
def test_a_part_of_a_checkpoint_is_chosen_by_patterns(sharded, tmp_path, include, chosen):
    copied = Path(sharded.to_directory(tmp_path / "copy", include=include))
    assert {path.relative_to(copied).as_posix() for path in copied.rglob("*") if path.is_file()} == chosen
    with sharded.as_directory(include=include) as directory:
        there = {path.relative_to(directory).as_posix() for path in Path(directory).rglob("*") if path.is_file()}
    assert there == (EVERYTHING if "memory" not in sharded.path else chosen)  # in place, all are there
    plain = Checkpoint(sharded.to_directory(tmp_path / "whole"))
    again = Path(plain.to_directory(tmp_path / "again", include=include))
    assert {path.relative_to(again).as_posix() for path in again.rglob("*") if path.is_file()} == chosen


def test_a_pattern_that_matches_nothing_is_an_error_that_names_what_is_there(sharded, tmp_path):
    some = r"no file of .* matches '\*.onnx'; it has optimizer/a.pt, optimizer/b.bin, part-0.pt, part-1.pt, same.json"
    plain = Checkpoint(sharded.to_directory(tmp_path / "whole"))
    for checkpoint in (sharded, plain):
        with pytest.raises(ValueError, match=some), checkpoint.as_directory(include=["*.pt", "*.onnx"]):
            pass
        with pytest.raises(ValueError, match=some):
            checkpoint.to_directory(tmp_path / "none", include="*.onnx")
    assert not (tmp_path / "none").exists()


def test_a_path_that_reads_like_a_pattern_is_that_path(tmp_path):
    plain = folder(tmp_path, **{"epoch[1].pt": "x", "epoch1.pt": "y"})
    assert choose_in_folder(tmp_path, "epoch[1].pt", own_files=False) == ["epoch1.pt", "epoch[1].pt"]
    (tmp_path / "epoch1.pt").unlink()
    with plain.as_directory(include="epoch[1].pt") as directory:
        assert directory == str(tmp_path)


def test_only_the_chosen_files_are_verified(sharded):
    assert sharded.store is not None
    sharded.store.storage.put_bytes(sharded.store.layout.data(sharded.id, "part-1.pt"), b"2")
    with sharded.as_directory(include="part-0.pt") as directory:
        assert (Path(directory) / "part-0.pt").read_text() == "0"
    with pytest.raises(CheckpointCorruptError, match=r"part-1.pt differs"), sharded.as_directory(include="part-*"):
        pass


@pytest.fixture
def as_rank(sharded):
    """Be a rank of a training that continues the checkpoint."""
    yield lambda rank, world_size=2: start_session(Attempt(sharded.store, world_size).session(rank))
    start_session(None)


def test_a_rank_has_what_it_stored_and_what_it_includes(sharded, tmp_path, as_rank):
    zero = {"part-0.pt", "same.json", "optimizer/a.pt", "optimizer/b.bin"}  # of what both brought, the lowest stored
    for rank, own in enumerate([zero, {"part-1.pt"}]):
        as_rank(rank)
        for more in (set(), {"same.json"}):
            target = tmp_path / f"{rank}{len(more)}"
            sharded.to_directory(target, own_files=True, include=sorted(more))
            assert {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} == own | more
        with sharded.as_directory(own_files=True) as directory:
            assert all((Path(directory) / path).exists() for path in own)


def test_no_file_is_a_ranks_own_when_there_were_more_or_fewer_ranks_or_no_rank_stored_it(sharded, tmp_path, as_rank):
    as_rank(0, world_size=3)
    with pytest.raises(RankLocalStateError, match=r"2 ranks stored .*, and now there are 3"):
        sharded.to_directory(own_files=True)
    plain = Checkpoint(sharded.to_directory(tmp_path / "whole"))
    with pytest.raises(ValueError, match="plain directory"), plain.as_directory(own_files=True):
        pass


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_to_directory_gives_the_caller_files_of_their_own(kind, tmp_path, request):
    checkpoint = commit(request.getfixturevalue(kind), tmp_path, model="x")
    checkpoint.set_metadata({"a": 1})
    directory = Path(checkpoint.to_directory(tmp_path / "mine"))
    (directory / "model").write_bytes(b"changed")
    assert read_files(checkpoint) == {"model": b"x"}
    assert Checkpoint.from_directory(directory).get_metadata() == {"a": 1}


@pytest.mark.parametrize("taken", ["model", "sub", ".metadata.json"])
@pytest.mark.parametrize("kind", ["local", "remote"])
def test_to_directory_that_has_no_place_for_a_file_replaces_none(kind, taken, tmp_path, request):
    (tmp_path / "c/sub").mkdir(parents=True)
    (tmp_path / "c/sub/x").write_text("x")
    checkpoint = commit(request.getfixturevalue(kind), tmp_path, a="new", model="x")
    checkpoint.set_metadata({"a": 1})
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").write_text("mine")
    (target / taken).write_text("mine") if taken == "sub" else (target / taken).mkdir()
    with pytest.raises(FileExistsError, match=f"{taken} is a (file|directory), and the checkpoint has a"):
        checkpoint.to_directory(target)
    assert sorted(path.name for path in target.iterdir()) == sorted(["a", taken])
    assert (target / "a").read_text() == "mine"


def test_files_that_a_filesystem_keeps_as_one_are_not_copied_there(remote, tmp_path, monkeypatch):
    """As to CIFS, exFAT or APFS, where the second name finds the first file."""
    checkpoint = commit(remote, tmp_path, Model="x", model="y")
    assert len(list(Path(checkpoint.to_directory(tmp_path / "kept")).iterdir())) == 2
    monkeypatch.setattr(Path, "samefile", lambda *_: True)
    with pytest.raises(FileExistsError, match=r"the filesystem of .*one takes 'Model' and 'model' for the name of one file"):
        checkpoint.to_directory(tmp_path / "one")
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "committed"])
def test_a_directory_has_the_metadata_of_the_checkpoint_that_was_copied_into_it_last(local, tmp_path, is_plain):
    first, second = commit(local, tmp_path, model="x"), commit(local, tmp_path, model="y")
    first.set_metadata({"epoch": 1})
    if is_plain:
        first, second = (Checkpoint(it.to_directory(tmp_path / it.id)) for it in (first, second))
    first.to_directory(tmp_path / "mine")
    assert Checkpoint(tmp_path / "mine").get_metadata() == {"epoch": 1}
    second.to_directory(tmp_path / "mine")
    assert Checkpoint(tmp_path / "mine").get_metadata() == {}


def _copy_for_ever(store, target, begun):
    manifest = store.list()[-1]

    def wait(_, key, path, *__):
        path.write_bytes(b"part")
        begun.set()
        threading.Event().wait()

    LocalStorage.get_file = wait  # of this process
    store.checkpoint(manifest).to_directory(target)


def test_what_a_killed_process_has_left_in_a_directory_is_no_part_of_a_checkpoint_and_goes(local, tmp_path):
    checkpoint = commit(local, tmp_path, model="x", rank="y")
    target = tmp_path / "work"
    begun = multiprocessing.get_context("fork").Event()
    copying = multiprocessing.get_context("fork").Process(target=_copy_for_ever, args=(local, target, begun))
    copying.start()
    assert begun.wait(60)
    copying.kill()
    copying.join(60)
    assert list(target.iterdir()) != []
    assert scan_files(target) == []
    checkpoint.to_directory(target)
    assert sorted(path.name for path in target.iterdir()) == ["model", "rank"]


def test_to_directory_makes_a_folder_of_its_own_if_none_is_given(local, tmp_path, monkeypatch):
    checkpoint = commit(local, tmp_path, model="x")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    directory = Path(checkpoint.to_directory())
    assert directory.parent == tmp_path
    assert (directory / "model").read_bytes() == b"x"


@pytest.mark.parametrize("below", ["", "copy"])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "committed"])
def test_a_checkpoint_is_not_copied_into_itself(local, tmp_path, is_plain, below):
    checkpoint = folder(tmp_path / "c", model="x") if is_plain else commit(local, tmp_path, model="x")
    checkpoint.set_metadata({"a": 1})
    before = sorted(Path(checkpoint.path).rglob("*"))
    with pytest.raises(ValueError, match=f"lies in the checkpoint {checkpoint.path} itself: give another directory"):
        checkpoint.to_directory(Path(checkpoint.path) / below)
    assert sorted(Path(checkpoint.path).rglob("*")) == before


def test_a_pruned_checkpoint_is_not_found_by_run_and_id(remote, tmp_path):
    old = commit(remote, tmp_path, model="x")
    commit(remote, tmp_path, model="y")
    prune_as_leader(remote, RetentionPolicy(1))
    with pytest.raises(CheckpointNotFoundError):
        old.set_metadata({"a": 1})
    assert remote.records.get_json(remote.layout.metadata(old.id)) is None
    with pytest.raises(CheckpointNotFoundError, match=rf"run 'run' .*{old.id}"), old.as_directory():
        pass


def test_metadata_of_a_checkpoint_that_is_pruned_at_that_moment_is_an_error_and_not_left(tmp_path):
    class Pruning(WrappedStorage):
        def put_bytes(self, key, data):
            if key.startswith("run/metadata/"):
                prune_as_leader(local, RetentionPolicy(1))
            super()._do("put_bytes", key, data)

    local = CheckpointStore.open(tmp_path / "store", "run")
    old, _ = commit(local, tmp_path, model="x"), commit(local, tmp_path, model="y")
    pruned = CheckpointStore.open(Pruning(local.storage), "run")
    with pytest.raises(CheckpointNotFoundError, match=f"no checkpoint {old.id}: it was pruned"):
        pruned.checkpoint(old.manifest).set_metadata({"a": 1})
    assert local.keys("run/metadata/") == []


@pytest.mark.parametrize(("location", "storage"), [("memory://", "memory://"), ("/", "/"), ("file:///", "/")])
def test_a_checkpoint_may_be_in_the_root_of_a_storage(location, storage):
    checkpoint_id = "000001-00000000-00000000"
    checkpoint = Checkpoint(f"{location}run/checkpoints/{checkpoint_id}")
    assert checkpoint.path == f"{storage}run/checkpoints/{checkpoint_id}"
    assert checkpoint.store.storage.url == storage
    assert checkpoint.store.path == f"{storage}run"


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
    with pytest.raises(CheckpointNotFoundError, match="plain directory"):
        _ = checkpoint.manifest


def test_a_directory_stays_the_same_where_the_working_directory_changes(tmp_path, monkeypatch):
    folder(tmp_path / "c", model="x")
    monkeypatch.chdir(tmp_path)
    checkpoints = [Checkpoint.from_directory("c"), Checkpoint("c/")]
    monkeypatch.chdir("/")
    assert [checkpoint.path for checkpoint in checkpoints] == [str(tmp_path / "c")] * 2
    assert checkpoints[0].directory == tmp_path / "c"


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
    (tmp_path / "a/b").mkdir(parents=True)
    with pytest.raises(ValueError, match="storage key"):
        download(remote, evil, evil.files, {}, tmp_path / "a/b")
    with pytest.raises(CheckpointCorruptError, match=r"files/0/path: .*storage key"):
        Checkpoint(checkpoint.path).to_directory(tmp_path / "a/b")
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("make", [Checkpoint, Checkpoint.from_directory])
def test_an_empty_path_is_not_the_working_folder(make):
    with pytest.raises(ValueError, match="the path of a checkpoint is empty"):
        make("")


def test_a_file_named_like_a_download_in_progress_is_downloaded_too(remote, tmp_path, node):
    files = {"model.pt": b"m" * 1000, "model.pt.partial": b"p", ".partial": b"q"}
    assert read_files(commit(remote, tmp_path, **files)) == files


def test_what_is_rays_alone_is_refused_by_what_to_write(tmp_path):
    checkpoint, context = Checkpoint.from_directory(tmp_path), TrainContext(0, 0, 0, 1, 1, "run", 1)
    assert not hasattr(checkpoint, "filesystem")
    assert pickle.loads(pickle.dumps(context)) == context
    for ask, written in (
        (lambda: checkpoint.filesystem, r"write checkpoint\.store\.storage"),
        (lambda: context.get_storage, "storage's path or URL in the config"),
        (lambda: context.get_trial_name, r"write get_context\(\)\.run_name"),
        (lambda: context.no_such, "has no attribute 'no_such'$"),
    ):
        with pytest.raises(AttributeError, match=written):
            ask()
    of_python = r"(\. Did you mean 'upload'\?)?$"  # Python 3.13 asks
    for name, written in (("checkpoint_dir_name", ", which is Ray's: .* write step="), ("uplaod", of_python)):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'{written}"):
            report({}, **{name: "x"})
