"""A file in place is read once on a machine to verify it, while nobody changes it and somebody there has its checkpoint."""

import errno
import os
from pathlib import Path

import pytest
from crash_points import open_run
from faulty_storage import FaultyStorage
from prefect_torch.ckpt import CheckpointCorruptError
from prefect_torch.ckpt.files.node_copy import NodeCopy
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from ranks import Attempt, cached, folder, read_files

CONTENT = {"a": b"1", "b": b"2"}
_AGE = "prefect_torch.ckpt.files.verified_in_place._SETTLED_NS"


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """All files count as changed long ago."""
    monkeypatch.setattr(_AGE, -(10**18))


@pytest.fixture
def storage(tmp_path, node):
    """A directory that counts what is read of it, with a checkpoint of two files."""
    storage = FaultyStorage(LocalStorage(tmp_path / "store"))
    Attempt(open_run(storage)).session().report({}, folder(tmp_path / "c", **CONTENT))
    return storage


def newest(storage):
    store = open_run(storage)
    return store.checkpoint(store.list()[-1])


def num_reads(storage, read):
    """Return how often a file is read to verify it while `read` runs."""
    storage.operations.clear()
    read()
    return storage.counts()["digest"]


def start_from(storage):
    """Verify the newest checkpoint as a leader does; return what it keeps."""
    copy = NodeCopy()
    assert choose_checkpoint(open_run(storage), lineage=1, verify="digest", prove=copy.verify) is not None
    return copy


def read_newest(storage):
    assert read_files(newest(storage)) == CONTENT


def test_the_ranks_of_a_machine_read_a_file_once(storage, node):
    attempt = Attempt(open_run(storage), world_size=4, nodes=(4,))

    def train(session, _):
        for _ in range(2):
            assert read_files(session.get_checkpoint()) == CONTENT
        session.report({})

    def run():
        assert attempt.run(train) == [None] * 4

    assert num_reads(storage, run) == len(CONTENT)
    assert list(node.rglob("verified")) == []


def test_ranks_do_not_read_what_their_leader_has_read_until_it_lets_go(storage, node):
    copy = start_from(storage)
    assert num_reads(storage, lambda: read_newest(storage)) == 0
    copy.release()
    assert list(node.rglob("verified")) == []
    assert num_reads(storage, lambda: read_newest(storage)) == len(CONTENT)  # what lies on a disk may change by itself


@pytest.mark.parametrize("is_replaced", [False, True], ids=["written", "replaced"])
def test_a_file_that_was_changed_since_is_never_handed_out(storage, is_replaced):
    copy = start_from(storage)
    path = Path(newest(storage).path) / "a"
    before = path.stat()
    other = path.with_name("other") if is_replaced else path
    other.write_bytes(b"?")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns + (not is_replaced)))
    other.replace(path)
    with pytest.raises(CheckpointCorruptError, match="a differs"):
        read_newest(storage)
    copy.release()


def test_a_file_that_has_just_been_changed_is_read_by_everybody(storage, monkeypatch):
    """Another change may leave its times as they are."""
    monkeypatch.setattr(_AGE, 10**18)
    copy = start_from(storage)
    assert num_reads(storage, lambda: read_newest(storage)) == len(CONTENT)
    copy.release()


def test_a_damaged_file_is_not_known_as_whole(storage):
    (Path(newest(storage).path) / "a").write_bytes(b"?")
    with newest(storage).as_directory(include="b"):
        for _ in range(2):
            with pytest.raises(CheckpointCorruptError, match="a differs"):
                read_newest(storage)


@pytest.mark.parametrize("lacks", ["prefect_torch.ckpt.files.cache._cache_root", "fcntl.flock"], ids=["directory", "locks"])
def test_without_a_directory_for_temporary_files_or_locks_it_is_read_by_everybody(storage, monkeypatch, lacks):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lacks, refuse)
    copy = start_from(storage)
    assert num_reads(storage, lambda: read_newest(storage)) == len(CONTENT)
    copy.release()


@pytest.mark.parametrize("level", ["size", "none"])
def test_a_handle_may_leave_the_content_unread(storage, level):
    checkpoint = newest(storage)
    checkpoint.verify_level = level
    (Path(checkpoint.path) / "a").write_bytes(b"?")
    assert num_reads(storage, lambda: read_files(checkpoint)) == 0
    (Path(checkpoint.path) / "a").write_bytes(b"longer")
    if level == "none":
        assert read_files(checkpoint)["a"] == b"longer"
    else:
        with pytest.raises(CheckpointCorruptError, match="a has 6 bytes instead of 1"):
            read_files(checkpoint)


def test_nothing_is_copied(storage, node):
    copy = start_from(storage)
    with newest(storage).as_directory() as directory:
        assert Path(directory) == Path(newest(storage).path)
        assert cached(node) == []
    copy.release()
