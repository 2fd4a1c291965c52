"""A directory that is lent to the training function: what is reported is moved from it, and a crash leaves nothing behind."""

import errno
import os
from pathlib import Path

import pytest
from crash_points import crash_points, open_run
from deep_folders import deep
from memory_storage import MemoryStorage
from prefect_torch.ckpt import Checkpoint, CheckpointStore, StorageFullError, checkpoint_directory, report
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.machine.handover import LentDirectories
from ranks import Attempt, as_rank, read_files

UPLOADS = pytest.mark.parametrize("upload", ["sync", "async"])


def write_files(directory, score):
    """Write a large file and more small ones than are synced one by one."""
    (directory / "deep").mkdir(parents=True)
    (directory / "large").write_bytes(str(score).encode() * 2**20)
    for number in range(3):
        (directory / "deep" / str(number)).write_text(f"{score} {number}")


def expected(score):
    return {"large": str(score).encode() * 2**20, **{f"deep/{number}": f"{score} {number}".encode() for number in range(3)}}


def left_in(store):
    return [path for path in Path(store.storage.url).glob("run/unreported/**/*") if path.is_file()]


@UPLOADS
def test_what_is_reported_is_moved_and_the_rest_is_deleted(store, upload):
    session = Attempt(store).session()
    with as_rank(session):
        with checkpoint_directory() as directory:
            write_files(directory, 1)
            inode = (directory / "large").stat().st_ino
            report({}, Checkpoint.from_directory(directory), upload=upload)
            (directory / "left").write_text("x")
        assert not directory.exists()
        session.finish()
    (manifest,) = store.list()
    store.verify(manifest)
    assert read_files(store.checkpoint(manifest)) == expected(1)
    stored = Path(store.storage.url, "run/checkpoints", manifest.id, "large")
    assert stored.stat().st_ino == inode
    assert left_in(store) == []


@UPLOADS
def test_the_directory_may_be_filled_again_for_the_next_report(store, upload):
    session = Attempt(store).session()
    with as_rank(session), checkpoint_directory() as directory:
        for score in (1, 2):
            (directory / "m").write_text(str(score))
            checkpoint = Checkpoint.from_directory(directory)
            if score == 1:
                checkpoint.set_metadata({"author": "me"})
            report({"score": score}, checkpoint, upload=upload)
        session.finish()
    assert [read_files(store.checkpoint(it)) for it in store.list()] == [{"m": b"1"}, {"m": b"2"}]
    assert [it.metadata for it in store.list()] == [{"author": "me"}, {}]


@UPLOADS
def test_what_a_link_leads_to_stays(store, tmp_path, upload):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "tokens").write_text("mine")
    session = Attempt(store).session()
    with as_rank(session), checkpoint_directory() as directory:
        (directory / "folder").symlink_to(tmp_path / "dataset")
        (directory / "file").symlink_to(tmp_path / "dataset" / "tokens")
        os.link(tmp_path / "dataset" / "tokens", directory / "second")
        checkpoint = Checkpoint.from_directory(directory)
        checkpoint.set_metadata({"author": "me"})
        report({}, checkpoint, upload=upload)
        session.finish()
        left = {path.name for path in directory.iterdir()} - {".metadata.json"}
        assert checkpoint.get_metadata() == ({"author": "me"} if left else {})  # as long as there is something to report
    assert (tmp_path / "dataset" / "tokens").read_text() == "mine"
    with (tmp_path / "dataset" / "tokens").open("a") as file:
        file.write(" changed")
    (manifest,) = store.list()
    store.verify(manifest)
    assert set(read_files(store.checkpoint(manifest)).values()) == {b"mine"}


@UPLOADS
def test_two_ranks_may_report_the_same_file_from_directories_of_their_own(store, upload):
    def train(session, rank):
        with session.lent.lend() as directory:
            for step in range(2):
                (directory / f"same{step}").write_text("x")
                (directory / f"m{rank}").write_text("y")
                checkpoint = Checkpoint.from_directory(directory)
                if step == 0:
                    checkpoint.set_metadata({"author": "me"})
                session.report({}, checkpoint, upload=upload)
                assert list(directory.iterdir()) == []

    assert Attempt(store, 2).run(train) == [None, None]
    first, second = store.list()
    assert read_files(store.checkpoint(first)) == {"same0": b"x", "m0": b"y", "m1": b"y"}
    assert read_files(store.checkpoint(second)) == {"same1": b"x", "m0": b"y", "m1": b"y"}
    assert [first.metadata, second.metadata] == [{"author": "me"}, {}]


def test_a_report_that_is_stored_at_the_second_try_moves_the_metadata_with_the_files(store, monkeypatch):
    put_files, left = type(store.storage).put_files, [1]

    def full(self, files, **options):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put_files(self, files, **options)

    monkeypatch.setattr(type(store.storage), "put_files", full)
    with as_rank(Attempt(store).session()), checkpoint_directory() as directory:
        (directory / "m").write_text("x")
        checkpoint = Checkpoint.from_directory(directory)
        checkpoint.set_metadata({"author": "me"})
        report({}, checkpoint)
        assert left == [0]
        assert list(directory.iterdir()) == []


def test_for_another_storage_it_is_a_temporary_directory():
    store = open_run(MemoryStorage())
    session = Attempt(store).session()
    with as_rank(session):
        with checkpoint_directory() as directory:
            write_files(directory, 1)
            report({}, Checkpoint.from_directory(directory))
        assert not directory.exists()
        session.finish()
    assert read_files(store.checkpoint(store.latest())) == expected(1)


def test_outside_of_a_training_it_says_so():
    with pytest.raises(RuntimeError, match=r"checkpoint_directory\(\) may be called only inside the function"):
        checkpoint_directory()


def test_what_a_killed_rank_left_is_removed_by_a_later_attempt(store):
    killed, live = Attempt(store).session(), Attempt(store).session()
    left, kept = killed.lent.make(), live.lent.make()
    write_files(left, 1)
    write_files(kept, 2)
    collect_garbage(store)
    assert len(left_in(store)) == 8  # an hour has not passed: a fenced rank may still write
    collect_garbage(store, grace_s=-1)
    assert len(left_in(store)) == 4
    assert all(path.is_relative_to(kept) for path in left_in(store))


def test_an_empty_directory_of_a_killed_rank_is_removed_too(store):
    """As it is between two reports."""
    killed, live = Attempt(store).session(), Attempt(store).session()
    left, kept = killed.lent.make(), live.lent.make()
    collect_garbage(store)
    assert left.is_dir()
    collect_garbage(store, grace_s=-1)
    assert (left.exists(), kept.is_dir()) == (False, True)


@pytest.mark.parametrize("during", ["mkdir", "is_dir"])
def test_a_garbage_collection_meanwhile_takes_no_directory_away(store, monkeypatch, during):
    """It removes the parent, if that is empty, after it was made or before it is found to be there."""
    session = Attempt(store).session()
    parent = Path(store.storage.url, "run/unreported")
    if during == "is_dir":
        parent.mkdir()
    call, collected = getattr(Path, during), []

    def collecting(self, *args, **kwargs):
        if during == "mkdir":
            call(self, *args, **kwargs)
        if self == parent and not collected:
            collected.append(collect_garbage(store))
        return call(self, *args, **kwargs) if during == "is_dir" else None

    monkeypatch.setattr(Path, during, collecting)
    with session.lent.lend() as directory:
        write_files(directory, 1)
        session.report({}, Checkpoint.from_directory(directory))
    assert collected
    (manifest,) = store.list()
    assert read_files(store.checkpoint(manifest)) == expected(1)


@UPLOADS
def test_a_crash_at_any_operation_of_a_report_leaves_the_old_or_the_new_checkpoint(tmp_path, upload):
    def lend_and_report(session, score):
        with session.lent.lend() as directory:
            write_files(directory, score)
            session.report({"score": score}, Checkpoint.from_directory(directory), upload=upload)
            session.wait_for_commits()
        session.finish()

    def prepare(number, after):
        storage = LocalStorage(tmp_path / f"store-{number}-{after}")
        lend_and_report(Attempt(open_run(storage)).session(), 1)
        return storage

    fired = 0
    for faulty in crash_points(prepare, lambda faulty: lend_and_report(Attempt(open_run(faulty)).session(), 2)):
        fired += faulty.fired
        store = open_run(faulty.inner)
        scores = []
        for manifest in store.list():
            store.verify(manifest)
            scores.append(manifest.metrics["score"])
            assert read_files(store.checkpoint(manifest)) == expected(scores[-1])
        assert scores in ([1], [1, 2])
        lend_and_report(Attempt(store).session(), 3)
        assert [manifest.metrics["score"] for manifest in store.list()] == [*scores, 3]
        collect_garbage(store, grace_s=0, keep_quarantined_days=0)  # a torn manifest is set aside
        data = {info.key.split("/")[2] for info in faulty.inner.list("run/checkpoints/")}
        assert data == {manifest.id for manifest in store.list()}
    assert fired > 10


def test_what_a_failed_report_did_not_store_is_still_there_for_the_next_one(store, monkeypatch):
    """Another rank finds the storage full, so no rank's files are part of a checkpoint."""
    put_files, left = type(store.storage).put_files, [2]

    def full(self, files, **options):
        if left[0] and any(key.endswith("model-1") for key in files):
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put_files(self, files, **options)

    monkeypatch.setattr(type(store.storage), "put_files", full)

    def train(session, rank):
        with session.lent.lend() as directory:
            (directory / f"model-{rank}").write_text(f"of {rank}")
            with pytest.raises(StorageFullError):
                session.report({}, Checkpoint.from_directory(directory), step=1)
            session.report({}, Checkpoint.from_directory(directory), step=1)
            assert list(directory.iterdir()) == []

    assert Attempt(store, 2).run(train) == [None, None]
    (manifest,) = store.list()
    assert read_files(store.checkpoint(manifest)) == {"model-0": b"of 0", "model-1": b"of 1"}


def test_a_directory_that_a_commit_removes_meanwhile_is_no_matter(store, monkeypatch):
    Attempt(store)
    lent = LentDirectories(store.storage, lambda token: store.layout.unreported(1, token))
    other, directory = lent.make(), lent.make()
    resolve = Path.resolve

    def resolve_and_remove(self):
        if other in lent._lent:
            lent.remove(other)
        return resolve(self)

    monkeypatch.setattr(Path, "resolve", resolve_and_remove)
    assert lent.holds(directory)


@pytest.mark.parametrize("is_local", [True, False])
def test_a_directory_of_any_depth_is_deleted_in_the_end(store, is_local):
    Attempt(store)
    lent = LentDirectories(store.storage if is_local else MemoryStorage(), lambda token: store.layout.unreported(1, token))
    directory = lent.make()
    with deep(directory):
        lent.remove(directory)
        assert not directory.exists()


@pytest.mark.parametrize(("run", "warnings"), [("sweep/trial-0000-0123abcd", 1), ("run", 0)])
def test_a_trial_warns_once_of_a_directory_that_others_may_write_to(tmp_path, monkeypatch, caplog, run, warnings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    session = Attempt(CheckpointStore.open(str(tmp_path / "store"), run)).session()
    with as_rank(session):
        for directory in (Path("temporary/own"), Path("output", run), Path("model"), Path("model")):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "weights").write_text("1")
            report({}, Checkpoint.from_directory(directory))
        session.finish()
    told = [record.getMessage() for record in caplog.records if "run in one directory" in record.getMessage()]
    assert len(told) == warnings
    assert all(f"others may write to {tmp_path / 'model'}, too" in message for message in told)
