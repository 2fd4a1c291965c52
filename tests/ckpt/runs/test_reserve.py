"""The space that a run keeps for the records without which a full disk cannot be freed."""

import errno
import os

import pytest
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy, StorageError
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts, record_resumed_from
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.deletion.reserve import give_up_space, keep_space
from prefect_torch.ckpt.storage.local_files import reserve
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prunes import prune_as_leader
from ranks import Attempt, folder
from small_disk import mounted
from stored_runs import begun_long_ago

NUM_PARTS = len(reserve._NAMES)


def parts(store):
    return sorted(path.name for path in store.storage.local_path(store.run.partition("/")[0]).glob(".tmp-*"))


def fill(disk, *, inodes):
    """Leave no byte, or no inode, of a filesystem."""
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012 - the filesystem decides which one fails
        if inodes:
            for number in range(10_000):
                (disk / f"filler-{number}").touch()
        with (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


@pytest.fixture(params=["bytes", "inodes"])
def full_run(request, tmp_path):
    """A run of four checkpoints on a filesystem that another program has filled."""
    with mounted(tmp_path / "disk", "size=8m,nr_inodes=120") as disk:
        store = CheckpointStore.open(disk / "store", "run")
        session = Attempt(store).session()
        for step in range(4):
            session.report({}, folder(tmp_path / "c", model=bytes(10_000)), step=step)
        fill(disk, inodes=request.param == "inodes")
        with pytest.raises(OSError, match="No space left"):
            store.storage.put_bytes("run/x/y", b"1")
        yield store


def test_a_prune_frees_a_full_disk(full_run):
    decided = prune_as_leader(full_run, RetentionPolicy(num_to_keep=1))
    assert len(decided.drop) == 3
    assert [manifest.step for manifest in full_run.list()] == [3]


def test_a_restart_claims_a_run_on_a_full_disk_and_prunes_it(full_run):
    attempt = claim_attempt(full_run, Owner.current(), world_size=1)
    record_resumed_from(full_run, attempt, full_run.path_of(full_run.latest().id))
    assert [it.number for it in list_attempts(full_run)] == [1, 2]
    assert 0 < len(parts(full_run)) < NUM_PARTS
    assert len(prune_as_leader(full_run, RetentionPolicy(num_to_keep=1)).drop) == 3


def test_a_disk_is_not_filled_by_the_reserve(tmp_path):
    with mounted(tmp_path / "disk", "size=1m") as disk:
        store = CheckpointStore.open(disk, "run")
        Attempt(store)
        assert parts(store) == []
        store.storage.put_bytes("run/x", bytes(500_000))


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_parts_are_given_up_until_the_record_is_stored_and_the_error_is_raised_after_the_last(tmp_path, monkeypatch, reason):
    store = CheckpointStore.open(tmp_path, "run")
    session = Attempt(store).session()
    for step in range(3):
        session.report({}, folder(tmp_path / "c", model=b"1"), step=step)
    put, refused = LocalStorage.put_bytes, []

    def put_with_parts(storage, key, data):
        if len(parts(store)) > left:
            refused.append(key.split("/")[1])
            raise OSError(reason, os.strerror(reason), key)
        put(storage, key, data)

    monkeypatch.setattr(LocalStorage, "put_bytes", put_with_parts)
    left = NUM_PARTS - 2
    assert len(prune_as_leader(store, RetentionPolicy(num_to_keep=2)).drop) == 1
    assert refused == ["deletions"] * 2
    assert len(parts(store)) == NUM_PARTS
    left = -1
    with pytest.raises(StorageError, match=r"1 of 1 checkpoints .*; the next prune tries again"):
        prune_as_leader(store, RetentionPolicy(num_to_keep=1))
    assert parts(store) == []
    assert len(store.list()) == 2


def test_the_reserve_is_no_object_and_no_garbage(tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    Attempt(store).session().report({}, folder(tmp_path / "source", model="x"))
    assert len(parts(store)) == NUM_PARTS
    assert not any(".tmp-" in info.key for info in store.storage.list(""))
    for name in parts(store):
        os.utime(tmp_path / "run" / name, (0, 0))
    (tmp_path / "run/.tmp-0123456789abcdef").touch()
    os.utime(tmp_path / "run/.tmp-0123456789abcdef", (0, 0))
    collect_garbage(begun_long_ago(store))
    assert parts(store) == list(reserve._NAMES)


def test_trials_use_the_reserve_of_their_sweep(tmp_path):
    trials = [CheckpointStore.open(tmp_path, f"sweep/trial-000{number}-0123abcd") for number in range(2)]
    for trial in trials:
        Attempt(trial)
    assert sorted(path.parent.name for path in tmp_path.rglob(".tmp-*")) == ["sweep"] * NUM_PARTS


def test_a_part_that_was_cut_short_is_written_again(tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    Attempt(store)
    path = tmp_path / "run" / reserve._NAMES[3]
    path.write_bytes(b"")
    keep_space(store)
    assert path.stat().st_size == reserve._PART_BYTES


def test_what_cannot_be_written_or_removed_is_no_error(tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    keep_space(store)  # nothing was begun
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run" / reserve._NAMES[0]).mkdir(parents=True)
    keep_space(store)
    assert parts(store) == [reserve._NAMES[0]]
    give_up_space(store)
    bucket = CheckpointStore.open(MemoryStorage(), "run")
    Attempt(bucket)
    give_up_space(bucket)


def test_none_is_kept_on_fuse_which_may_be_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(reserve, "filesystem_of", lambda _: "fuse.rclone")
    store = CheckpointStore.open(tmp_path, "run")
    Attempt(store)
    assert parts(store) == []
