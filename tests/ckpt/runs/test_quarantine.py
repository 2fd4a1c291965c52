"""What was found damaged stays until somebody removes it or its time is over, and comes back when it is whole."""

import errno
import os
import time

import pytest
from prefect_torch.ckpt import CheckpointCorruptError, CheckpointNotFoundError, RetentionPolicy
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.quarantine import quarantine
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.tasks import CheckpointConfig
from ranks import Attempt, folder, read_files
from stored_runs import begun_long_ago

DAY_S = 24 * 3600


def fill(store, tmp_path, *scores):
    session = Attempt(store).session()
    for score in scores:
        session.report({"score": score}, folder(tmp_path / "c", model=str(score)))
    return store.list()


def damage_newest(store):
    """Damage the newest checkpoint, have it set aside, and return it with what mends it."""
    newest = store.list()[-1]
    path = store.storage.local_path(store.layout.data(newest.id, "model"))
    content = path.read_bytes()
    path.write_bytes(b"?")
    try:
        choose_checkpoint(store, lineage=1, verify="digest")
    except CheckpointCorruptError:
        assert len(store.list()) == 0
    return newest, lambda: path.write_bytes(content)


def set_back(store, checkpoint_id, days):
    """Have the checkpoint be in quarantine for `days` by the storage's clock."""
    note = store.storage.local_path(store.layout.quarantine(checkpoint_id))
    since_s = time.time() - days * DAY_S
    os.utime(note, (since_s, since_s))


@pytest.mark.parametrize(("days", "keeps", "is_kept"), [(6, 7, True), (8, 7, False), (3650, None, True), (0.5, 0.25, False)])
def test_data_in_quarantine_stay_for_the_days_of_the_policy(store, tmp_path, days, keeps, is_kept):
    fill(store, tmp_path, 1, 2)
    damaged, _ = damage_newest(store)
    fill(store, tmp_path, 3)
    set_back(store, damaged.id, days)
    assert collect_garbage(store, grace_s=0, keep_quarantined_days=keeps) == ([] if is_kept else [damaged.id])
    assert any(store.storage.list(store.layout.data(damaged.id))) == is_kept
    assert store.records.get_json(store.layout.quarantine(damaged.id))["reason"]
    assert list(store.storage.list(store.layout.deletions)) == []


def test_an_object_with_a_date_in_the_future_ends_no_quarantine(store, tmp_path):
    fill(store, tmp_path, 1, 2)
    damaged, _ = damage_newest(store)
    (kept,) = fill(store, tmp_path, 3)[-1:]
    next_year_s = time.time() + 365 * DAY_S
    os.utime(store.storage.local_path(store.layout.data(kept.id, "model")), (next_year_s, next_year_s))
    assert collect_garbage(store, grace_s=0, keep_quarantined_days=7) == []
    assert any(store.storage.list(store.layout.data(damaged.id)))


def test_a_policy_keeps_them_for_a_week_and_the_form_says_so():
    assert RetentionPolicy().keep_quarantined_days == CheckpointConfig().policy().keep_quarantined_days == 7
    for wrong in (-1, True, "7", float("nan")):
        with pytest.raises(ValueError, match="keep_quarantined_days"):
            RetentionPolicy(keep_quarantined_days=wrong)


def test_what_is_pinned_stays_in_quarantine_for_good(store, tmp_path):
    newest = fill(store, tmp_path, 1, 2)[-1]
    store.pin(newest.id)
    damaged, _ = damage_newest(store)
    assert damaged == newest
    fill(store, tmp_path, 3)
    set_back(store, damaged.id, 100)
    assert collect_garbage(store, grace_s=0, keep_quarantined_days=7) == []


def test_what_is_whole_comes_back_into_its_place(store, tmp_path):
    fill(store, tmp_path, 1, 2)
    damaged, mend = damage_newest(store)
    fill(store, tmp_path, 3)
    mend()
    assert store.restore(damaged.id) == damaged
    assert [manifest.metrics["score"] for manifest in store.list()] == [1, 2, 3]
    assert read_files(store.checkpoint(damaged)) == {"model": b"2"}
    assert store.records.get_json(store.layout.quarantine(damaged.id)) is None


def test_what_is_damaged_stays_where_it_is(store, tmp_path):
    first, _ = fill(store, tmp_path, 1, 2)
    damaged, _ = damage_newest(store)
    with pytest.raises(CheckpointCorruptError, match=r"stays in quarantine, since it is damaged: .*/model differs from"):
        store.restore(damaged.id)
    store.storage.delete([store.layout.data(damaged.id, "model")])
    with pytest.raises(CheckpointCorruptError, match=r"stays in quarantine, since it is damaged: .*/model is missing"):
        store.restore(damaged.id)
    assert store.list() == [first]
    assert store.records.get_json(store.layout.quarantine(damaged.id)) is not None


def test_a_manifest_that_is_damaged_itself_stays_where_it_is(store, tmp_path):
    _, second = fill(store, tmp_path, 1, 2)
    store.storage.put_bytes(store.layout.manifest(second.id), second.encode()[:-20])
    choose_checkpoint(store, lineage=1, verify="digest")
    with pytest.raises(CheckpointCorruptError, match=r"stays in quarantine.*the manifest in its quarantine note"):
        store.restore(second.id)
    assert store.records.get_json(store.layout.quarantine(second.id)) is not None


def test_a_reason_is_told_without_what_a_terminal_would_obey(store, tmp_path):
    (damaged,) = fill(store, tmp_path, 1)
    quarantine(store, damaged.id, "a\x1b[2J\rb")
    with pytest.raises(CheckpointCorruptError, match=rf"damaged are {damaged.id}: a \[2J b$") as caught:
        choose_checkpoint(store, lineage=1, verify="digest")
    assert str(caught.value).isprintable()


def test_what_is_not_in_quarantine_is_not_found(store, tmp_path):
    (manifest,) = fill(store, tmp_path, 1)
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint .* in quarantine; prefect-torch show"):
        store.restore(manifest.id)


def test_a_run_whose_only_checkpoint_is_in_quarantine_says_how_it_comes_back(store, tmp_path):
    fill(store, tmp_path, 1)
    damaged, mend = damage_newest(store)
    with pytest.raises(CheckpointCorruptError, match=f"`prefect-torch restore {store.storage.url} run {damaged.id}`"):
        choose_checkpoint(store, lineage=1, verify="digest")
    mend()
    store.restore(damaged.id)
    assert choose_checkpoint(store, lineage=1, verify="digest") == damaged


@pytest.mark.parametrize("what", ["pipe", "link to itself", "folder that is a link to itself"])
def test_what_is_no_regular_file_in_the_place_of_a_checkpoints_is_damage(store, tmp_path, what):
    whole, damaged = fill(store, tmp_path, 1, 2)
    file = store.storage.local_path(store.layout.data(damaged.id, "model"))
    file.unlink()
    if what == "pipe":
        os.mkfifo(file)
    elif what == "link to itself":
        file.symlink_to(file)
    else:
        file.parent.rmdir()
        file.parent.symlink_to(file.parent)
    with pytest.raises(CheckpointCorruptError, match=rf"{damaged.id}/model is missing"):
        store.verify(damaged)
    with pytest.raises(CheckpointCorruptError, match=rf"{damaged.id}/model is missing"):
        store.checkpoint(damaged).to_directory(tmp_path / "out")
    assert choose_checkpoint(store, lineage=1, verify="digest") == whole
    assert fill(store, tmp_path, 3)[-1].metrics == {"score": 3}


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_files_that_somebody_has_moved_and_linked_are_not_missing(store, tmp_path, place):
    session = Attempt(store).session()
    (tmp_path / "c/optimizer").mkdir(parents=True)
    session.report({}, folder(tmp_path / "c", **{"model": "m", "optimizer/state": "o"}))
    (manifest,) = store.list()
    data = store.storage.local_path(store.layout.data(manifest.id))
    moved = (tmp_path / "store" if place == "inside" else tmp_path) / "moved"
    (data / "optimizer").rename(moved)
    (data / "optimizer").symlink_to(moved)
    if place == "inside":
        assert choose_checkpoint(store, lineage=1, verify="digest").id == manifest.id
    else:
        with pytest.raises(PermissionError, match="leads out of the storage"):
            choose_checkpoint(store, lineage=1, verify="digest")
    assert list(store.keys(store.layout.quarantined)) == []


def test_an_odd_name_that_a_killed_rank_has_left_stops_no_garbage_collection_and_no_report(store, tmp_path, monkeypatch):
    """It hung all ranks where the storage was full: rank 0 collects garbage then, and the others wait for it."""
    directory = Attempt(store).session().lent.make()
    (directory / "loss\\epoch=1.pt").write_text("x")
    os.utime(directory / "loss\\epoch=1.pt", (1, 1))
    begun_long_ago(store)
    put_file, full = type(store.storage).put_file, [True, True]

    def refuse_first(self, key, path):
        if full:
            full.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put_file(self, key, path)

    monkeypatch.setattr(type(store.storage), "put_file", refuse_first)

    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), **{f"model-{rank}": "x" * 2**21}))

    assert Attempt(store, 2).run(train) == [None, None]
    assert len(store.list()) == 1
    assert not directory.exists()


@pytest.mark.parametrize("place", ["deletions", "checkpoints/{gone}", "evaluation-logs/x/{gone}", "unreported"])
def test_a_name_that_is_no_key_ends_no_garbage_collection(store, tmp_path, place):
    for score in (1, 2):  # of an attempt each
        fill(store, tmp_path, score)
    gone = "000001-00000099-0123abcd"
    garbage = store.storage.local_path(store.layout.data(gone, "garbage"))
    odd = store.storage.local_path("run") / place.format(gone=gone) / "a\\b.json"
    for path in (garbage, odd):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        os.utime(path, (1, 1))
    assert collect_garbage(begun_long_ago(store)) == [gone]
    assert not garbage.exists()
    assert odd.exists() == (place != "unreported")
