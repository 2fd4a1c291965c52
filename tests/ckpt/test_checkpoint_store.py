import json
import logging
import os
import shutil
import time
from contextvars import Context
from dataclasses import replace
from pathlib import Path

import pytest
from commits import commit
from crash_points import open_run
from deep_folders import deep
from memory_storage import MemoryStorage
from prefect_torch.ckpt import (
    Checkpoint,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointStore,
    RetentionPolicy,
    StorageError,
)
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.deletion import marks, pruning
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.history import (
    HistoryWriter,
    MetricRecord,
    lost_records,
    newest_metrics,
    newest_recorded,
    read_history,
)
from prefect_torch.ckpt.runs.manifest import ManifestMemory
from prefect_torch.ckpt.runs.quarantine import quarantine, why_quarantined
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.runs.whole.deletion import delete_run
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.retry import RetryingStorage
from prunes import prune_as_leader
from ranks import Attempt, folder, read_files
from stored_runs import begun_long_ago
from wrapped_storage import WrappedStorage


def fill(store, tmp_path, *scores):
    session = Attempt(store).session()
    for score in scores:
        session.report({"score": score}, folder(tmp_path / "c", model=str(score), config="same"))
    return store.list()


def stored(store, manifest, name="model"):
    return store.storage.local_path(store.layout.data(manifest.id, name))


def test_a_run_without_checkpoints_has_no_latest(store):
    assert store.latest() is None
    assert store.list() == []
    assert store.best(3, "score") == []


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b", "ü", "x" * 201, None, 3])
def test_a_run_name_is_one_folder_everywhere(tmp_path, name):
    with pytest.raises(ValueError, match="run name"):
        CheckpointStore.open(tmp_path, name)


@pytest.mark.parametrize(
    "hint", [b"", b"torn{", b"[]", b'{"id": 3}', b'{"id": "../../x"}', b'{"id": "000009-00000009-ffffffff"}']
)
def test_a_stale_or_torn_hint_does_no_harm(store, tmp_path, hint):
    manifests = fill(store, tmp_path, 1, 2)
    store.storage.put_bytes(store.layout.latest, hint)
    assert store.latest() == manifests[-1]


def test_at_any_value_of_the_hint_the_committed_ones_are_listed_newest_first(store, tmp_path):
    ids = [manifest.id for manifest in fill(store, tmp_path, 1, 2, 3)]
    never_committed = ("000000-00000009-ffffffff", "000001-00000001-ffffffff", "000009-00000009-ffffffff")
    for hint in (*ids, *never_committed):
        store.hint_latest(hint)
        assert [listed.id for listed in store.newest_first()] == ids[::-1], hint


def test_an_id_in_the_place_of_a_manifest_is_refused_at_once(store, tmp_path):
    (manifest,) = fill(store, tmp_path, 1)
    for refuses in (store.checkpoint, store.verify):
        with pytest.raises(TypeError, match=rf"'{manifest.id}' is no manifest: store\.get\(id\) returns the manifest of an id"):
            refuses(manifest.id)


@pytest.mark.parametrize("place", ["outside", "latest.json"])
def test_a_hint_that_is_a_link_is_left_out_and_replaced(store, tmp_path, place):
    first, _ = fill(store, tmp_path, 1, 2)
    hint = store.storage.local_path(store.layout.latest)
    (tmp_path / "outside").write_text(json.dumps({"id": first.id}))
    hint.unlink(missing_ok=True)
    hint.symlink_to(tmp_path / place if place == "outside" else place)
    assert store.latest().step == 1
    assert choose_checkpoint(store, lineage=1, verify="digest").step == 1
    store.hint_latest(first.id)
    assert (tmp_path / "outside").read_text() == json.dumps({"id": first.id})
    assert not hint.is_symlink()
    assert store.latest().step == 1


def test_latest_ignores_data_without_a_manifest(store, tmp_path):
    manifests = fill(store, tmp_path, 1)
    store.storage.put_bytes(store.layout.data("000001-00000009-00000000", "model"), b"half")
    assert store.latest() == manifests[0]


def test_the_best_come_best_first(store, tmp_path):
    fill(store, tmp_path, 2, 3, 1)
    assert [manifest.metrics["score"] for manifest in store.best(2, "score", "min")] == [1, 2]


def test_a_checkpoint_that_was_removed_by_hand_is_not_found(store, tmp_path):
    (manifest,) = fill(store, tmp_path, 1)
    handle = Checkpoint(store.checkpoint(manifest).path)
    store.storage.delete([store.layout.manifest(manifest.id)])
    with pytest.raises(CheckpointNotFoundError, match=rf"run 'run' .* has no checkpoint {manifest.id}"):
        read_files(handle)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: path.write_bytes(b"9"), "differs from what rank 0 committed"),
        (lambda path: path.write_bytes(b"11"), "has 2 bytes instead of 1"),
        (lambda path: path.write_bytes(b""), "has 0 bytes instead of 1"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_damage_is_found_quarantined_and_the_one_before_is_chosen(store, tmp_path, caplog, damage, found):
    first, second = fill(store, tmp_path, 1, 2)
    damage(stored(store, second))
    with pytest.raises(CheckpointCorruptError, match=found):
        store.verify(second)
    with caplog.at_level(logging.WARNING):
        assert choose_checkpoint(store, lineage=1, verify="digest") == first
    assert second.id in caplog.text
    assert found in caplog.text
    assert store.list() == [first]
    note = store.records.get_json(store.layout.quarantine(second.id))
    assert found in note["reason"]


def test_two_files_that_were_swapped_are_found(store, tmp_path):
    (manifest,) = fill(store, tmp_path, "swap")
    one, other = stored(store, manifest), stored(store, manifest, "config")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="config"):
        store.verify(manifest)


def test_an_unknown_level_verifies_nothing_and_is_refused(store, tmp_path):
    (manifest,) = fill(store, tmp_path, 1)
    for verify in (lambda: store.verify(manifest, "Digest"), lambda: store.checkpoint(manifest).verify("full")):
        with pytest.raises(ValueError, match="is unknown: give 'digest', 'size' or 'none'"):
            verify()


@pytest.mark.parametrize("data", [b"", b'{"body":'])
def test_a_manifest_that_was_cut_is_set_aside(store, tmp_path, data):
    first, second = fill(store, tmp_path, 1, 2)
    store.storage.put_bytes(store.layout.manifest(second.id), data)
    assert store.latest() == first
    assert choose_checkpoint(store, lineage=1, verify="digest") == first


def test_when_none_is_whole_all_that_were_tried_are_listed(store, tmp_path):
    manifests = fill(store, tmp_path, 1, 2)
    for manifest in manifests:
        stored(store, manifest).unlink()
    with pytest.raises(CheckpointCorruptError) as caught:
        choose_checkpoint(store, lineage=1, verify="size")
    assert all(manifest.id in str(caught.value) for manifest in manifests)
    with pytest.raises(CheckpointCorruptError, match="does not start fresh unasked"):
        choose_checkpoint(store, lineage=1, verify="size")  # nor does the next start
    assert choose_checkpoint(store, lineage=2, verify="size") is None


def test_where_the_data_of_all_are_missing_nothing_is_set_aside(store, tmp_path):
    """As where the directory of the data is a mount of its own that is not there."""
    manifests = fill(store, tmp_path, 1, 2, 3)
    place = tmp_path / "store/run/checkpoints"
    place.rename(tmp_path / "away")
    place.mkdir()
    with pytest.raises(CheckpointCorruptError, match=r"run/checkpoints/ has no file of any of them, so nothing was set aside"):
        choose_checkpoint(store, lineage=1, verify="size")
    place.rmdir()
    (tmp_path / "away").rename(place)
    assert choose_checkpoint(store, lineage=1, verify="size") == manifests[-1]


def test_where_a_bucket_has_lost_the_data_of_all_a_lifecycle_rule_is_named():
    store = CheckpointStore.open(MemoryStorage(), "run")
    commit(store, 1)
    store.storage.delete(store.keys("run/checkpoints/"))
    with pytest.raises(CheckpointCorruptError, match="set aside: they were deleted there, as by a lifecycle rule that expires"):
        choose_checkpoint(store, lineage=1, verify="size")


def test_an_older_lineage_is_not_resumed(store, tmp_path):
    fill(store, tmp_path, 1)
    assert choose_checkpoint(store, lineage=2, verify="digest") is None


def test_pinned_checkpoints_survive_a_prune_until_they_are_unpinned(store, tmp_path):
    first, second, _ = fill(store, tmp_path, 1, 2, 3)
    store.pin(first.id)
    assert [manifest.id for manifest in prune_as_leader(store, RetentionPolicy(1), dry_run=True).drop] == [second.id]
    assert prune_as_leader(store, RetentionPolicy(1)).keep[first.id] == ("pinned",)
    store.unpin(first.id)
    assert [manifest.id for manifest in prune_as_leader(store, RetentionPolicy(1)).drop] == [first.id]


def test_a_checkpoint_that_a_prune_is_about_to_delete_cannot_be_pinned(store, tmp_path):
    first, *_ = fill(store, tmp_path, 1, 2)
    mark = store.layout.deletion("killed")
    store.records.put_json(mark, {"checkpoints": [first.id]})
    with pytest.raises(CheckpointNotFoundError, match="is being pruned at this moment"):
        store.pin(first.id)
    assert store.pinned() == frozenset()
    store.records.put(mark, {"checkpoints": [first.id]})
    changed = store.storage.get_bytes(mark).replace(first.id[-4:].encode(), b"0000")
    for damaged in (b"torn{", changed):  # it may be any
        store.storage.put_bytes(mark, damaged)
        with pytest.raises(CheckpointNotFoundError, match="is being pruned"):
            store.pin(first.id)


def test_the_mark_of_a_prune_that_was_killed_holds_for_an_hour(store, tmp_path):
    first, *_ = fill(store, tmp_path, 1, 2)
    mark = store.layout.deletion("killed")
    store.records.put_json(mark, {"checkpoints": [first.id]})
    store.records.put_json(store.layout.pins_witness("killed"), {})
    an_hour_ago_s = time.time() - 3700
    os.utime(store.storage.local_path(mark), (an_hour_ago_s, an_hour_ago_s))
    store.pin(first.id)
    assert store.pinned() == {first.id}
    collect_garbage(begun_long_ago(store))
    assert list(store.storage.list(store.layout.deletions)) == []
    assert [first.id in key for key in store.keys(store.layout.pins)] == [True]


@pytest.mark.parametrize("clock_that_goes_on", ["monotonic", "time"])  # the latter alone while a machine sleeps
def test_a_long_prune_renews_its_mark_and_looks_for_pins_again(store, tmp_path, monkeypatch, clock_that_goes_on):
    manifests = fill(store, tmp_path, 1, 2, 3, 4)
    monkeypatch.setattr(pruning, "_AT_ONCE", 1)
    now_s, delete = [0.0], type(store.storage).delete
    monkeypatch.setattr(f"time.{clock_that_goes_on}", lambda: now_s[0])
    seen = []

    def watched(self, keys):
        keys = list(keys)
        delete(self, keys)
        now_s[0] += 350  # the manifest, then the data
        if keys == [store.layout.manifest(manifests[0].id)]:
            seen.extend(info.key for info in store.storage.list(store.layout.deletions))
            store.storage.put_bytes(f"{store.layout.pins}{manifests[1].id}.json", b"{}")  # as version 0.1 writes it

    monkeypatch.setattr(type(store.storage), "delete", watched)
    decided = prune_as_leader(store, RetentionPolicy(1))
    assert len(seen) == 1
    assert decided.drop == (manifests[0], manifests[2])
    assert decided.keep[manifests[1].id] == ("pinned",)
    assert list(store.storage.list(store.layout.deletions)) == []


class AwayFor(WrappedStorage):
    """Answers no deletion of manifests until `meanwhile` has been called once, more than an hour later."""

    def __init__(self, inner, monkeypatch, meanwhile):
        super().__init__(inner)
        self.meanwhile, self.passed_s = meanwhile, 0.0
        monkeypatch.setattr(marks, "Stopwatch", lambda: SinceThen(self))

    def _do(self, verb, *args, **kwargs):
        if verb == "delete" and "/manifests/" in args[0][0] and not self.passed_s:
            self.passed_s = marks.STALE_S + 100
            for path in Path(self.url).glob("run/deletions/*.json"):
                os.utime(path, (path.stat().st_mtime - self.passed_s,) * 2)
            Context().run(self.meanwhile)  # as in another process
            raise StorageError("no answer")
        return super()._do(verb, *args, **kwargs)


class SinceThen:
    def __init__(self, clock):
        self.clock, self.then_s = clock, clock.passed_s

    @property
    def elapsed_s(self):
        return self.clock.passed_s - self.then_s


def test_a_deletion_that_is_tried_again_after_its_mark_has_ended_deletes_nothing_that_was_pinned_since(
    store, tmp_path, monkeypatch
):
    """As of a machine that is cut off from the storage for an hour, where retries have a deadline of two."""
    first, second, _ = fill(store, tmp_path, 1, 2, 3)
    away = AwayFor(LocalStorage(Path(store.storage.url)), monkeypatch, lambda: store.pin(first.id))
    patient = RetryingStorage(lambda: away, RetryPolicy(7200.0, 0.0, 0.0))
    with pytest.raises(StorageError, match="has not answered for 20 minutes: what was to be deleted stays"):
        prune_as_leader(replace(store, storage=patient), RetentionPolicy(1))
    assert away.passed_s
    assert first.id in store.ids()
    prune_as_leader(store, RetentionPolicy(1))
    assert (first.id in store.ids(), second.id in store.ids()) == (True, False)


def test_a_pin_of_version_01_is_a_pin_and_can_be_taken_back(store, tmp_path):
    first, *_ = fill(store, tmp_path, 1, 2)
    store.storage.put_bytes(f"{store.layout.pins}{first.id}.json", b"{}")
    assert store.pinned() == {first.id}
    store.unpin(first.id)
    assert store.pinned() == frozenset()


def test_pinning_what_does_not_exist_is_not_found(store):
    with pytest.raises(CheckpointNotFoundError):
        store.pin("000001-00000000-00000000")


def test_a_dry_run_only_decides(store, tmp_path):
    fill(store, tmp_path, 1, 2, 3)
    assert len(prune_as_leader(store, RetentionPolicy(1), dry_run=True).drop) == 2
    assert len(store.list()) == 3


def test_a_prune_removes_manifest_data_and_metadata(store, tmp_path):
    manifests = fill(store, tmp_path, 1, 2)
    store.checkpoint(manifests[0]).set_metadata({"a": 1})
    prune_as_leader(store, RetentionPolicy(1))
    keys = [info.key for info in store.storage.list("run/")]
    assert not [key for key in keys if manifests[0].id in key]


def test_metadata_of_a_prune_that_was_killed_go_with_the_data(store, tmp_path):
    pruned, expired, _ = fill(store, tmp_path, 1, 2, 3)
    for it in (pruned, expired):
        store.checkpoint(it).set_metadata({"a": 1})
    quarantine(store, expired.id, "model differs")
    store.storage.delete([store.layout.manifest(pruned.id)])
    assert collect_garbage(store, keep_quarantined_days=0) == [pruned.id, expired.id]
    assert store.keys("run/metadata/") == []


def test_a_prune_deletes_data_last_by_which_garbage_is_found(store, tmp_path):
    deleted = []

    class Watching(WrappedStorage):
        def delete(self, keys):
            keys = list(keys)
            deleted.extend(keys)
            self.inner.delete(keys)

    first, _ = fill(store, tmp_path, 1, 2)
    store.checkpoint(first).set_metadata({"a": 1})
    prune_as_leader(CheckpointStore.open(Watching(store.storage), "run"), RetentionPolicy(1))
    of_first = [key.split("/")[1] for key in deleted if first.id in key]
    assert of_first == ["manifests", "metadata", "checkpoints", "checkpoints"]


def test_many_checkpoints_are_deleted_by_few_requests_but_those_that_were_pinned_meanwhile(store, tmp_path):
    requests = []

    class Pinning(WrappedStorage):
        """Between a prune's plan and its mark, another process pins one."""

        def delete(self, keys):
            requests.append(sorted(keys))
            self.inner.delete(requests[-1])

        def put_bytes(self, key, data):
            if key.startswith("run/deletions/"):
                store.pin(manifests[7].id, "release")
            self.inner.put_bytes(key, data)

    manifests = fill(store, tmp_path, *range(41))
    decided = prune_as_leader(CheckpointStore.open(Pinning(store.storage), "run"), RetentionPolicy(1))
    assert [it.id for it in store.list()] == [manifests[7].id, manifests[-1].id]
    assert {key.split("/")[2] for key in store.keys("run/checkpoints/")} == {manifests[7].id, manifests[-1].id}
    assert {it.id for it in decided.drop} == {it.id for it in manifests[:-1]} - {manifests[7].id}
    assert len(requests) == 3 * 2 + 1  # 16 checkpoints by two, and the mark


def test_a_delete_that_fails_does_not_stop_the_others_and_is_told(store, tmp_path, monkeypatch):
    manifests = fill(store, tmp_path, 1, 2, 3, 4)
    delete = type(store.storage).delete

    def failing(self, keys):
        keys = list(keys)
        if any(manifests[0].id in key for key in keys):
            raise OSError(5, "Input/output error")
        delete(self, keys)

    monkeypatch.setattr(type(store.storage), "delete", failing)
    expected = f"1 of 3 checkpoints of run 'run' could not be deleted, {manifests[0].id} first: .*; the next prune tries again$"
    with pytest.raises(StorageError, match=expected):
        prune_as_leader(store, RetentionPolicy(1))
    assert [manifest.id for manifest in store.list()] == [manifests[0].id, manifests[3].id]


@pytest.mark.parametrize(
    ("at_once", "error", "tries"),
    [
        (1, StorageError("no answer"), 3),
        (2, StorageError("no answer"), 3),
        (5, StorageError("no answer"), 1),
        (1, OSError(5, "Input/output error"), 5),
        (2, OSError(5, "Input/output error"), 2 + 5),  # the last is alone
        (5, OSError(5, "Input/output error"), 1 + 5),
    ],
)
def test_a_prune_gives_up_on_a_storage_that_does_not_answer(store, tmp_path, monkeypatch, at_once, error, tries):
    monkeypatch.setattr(pruning, "_AT_ONCE", at_once)
    manifests, tried = fill(store, tmp_path, *range(6)), []

    def failing(self, keys):
        tried.append(keys)
        raise error

    monkeypatch.setattr(type(store.storage), "delete", failing)
    with pytest.raises(StorageError, match=f"5 of 5 checkpoints of run 'run' could not be deleted, {manifests[0].id} first"):
        prune_as_leader(store, RetentionPolicy(1))
    assert len(tried) == tries


class Undeletable(WrappedStorage):
    """Refuses to delete any key with one of `parts`, and counts the refusals."""

    def __init__(self, inner, error, *parts):
        super().__init__(inner)
        self.error, self.parts, self.num_refused = error, parts, 0

    def delete(self, keys):
        keys = list(keys)
        if any(part in key for key in keys for part in self.parts):
            self.num_refused += 1
            raise self.error
        self.inner.delete(keys)


def test_where_nothing_may_be_deleted_a_checkpoint_that_a_prune_would_delete_can_be_pinned(store, tmp_path):
    dropped, _ = fill(store, tmp_path, 1, 2)
    refusing = open_run(Undeletable(store.storage, PermissionError(13, "Permission denied"), ""))
    with pytest.raises(pruning.DeletionRefusedError, match="1 of 1 checkpoints"):
        prune_as_leader(refusing, RetentionPolicy(1))
    assert store.keys(store.layout.deletions) != []
    store.pin(dropped.id)
    assert any(dropped.id in key for key in store.keys(store.layout.pins))


def test_where_nothing_may_be_deleted_each_start_passes_a_damaged_checkpoint_over(store, tmp_path, caplog):
    first, second = fill(store, tmp_path, 1, 2)
    stored(store, second).write_bytes(b"9")
    refusing = Undeletable(store.storage, PermissionError(13, "Permission denied"), "")
    for num_refused in (1, 2):
        assert choose_checkpoint(open_run(refusing), lineage=1, verify="digest") == first
        assert refusing.num_refused == num_refused
    assert f"checkpoint {second.id} of run 'run' stays listed: [Errno 13] Permission denied" in caplog.messages
    assert "differs" in why_quarantined(store)[second.id]
    assert choose_checkpoint(store, lineage=1, verify="digest") == first
    assert store.list() == [first]


def test_garbage_that_cannot_be_deleted_does_not_keep_the_rest(store, tmp_path, caplog):
    (kept,) = fill(store, tmp_path, 1)
    session = Attempt(store).session()  # the second attempt
    left = tmp_path / "store/run/unreported/000001-0123456789abcdef/model"
    refused, later, quarantined, expired = (f"000001-0000000{number}-00000000" for number in range(4))
    for checkpoint_id in (refused, later, quarantined, expired):
        store.storage.put_bytes(store.layout.data(checkpoint_id, "model"), b"x")
    for checkpoint_id in (quarantined, expired):
        store.records.put_json(store.layout.quarantine(checkpoint_id), {})
    evaluations = [f"{store.layout.manifests}{it}/test.json" for it in (refused, later)]
    for key in evaluations:
        store.records.put_json(key, {})
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x")
    unfinished = tmp_path / "store/run/logs/.tmp-0123456789abcdef"
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"x")
    refusing = Undeletable(store.storage, PermissionError(13, "Permission denied"), refused, quarantined)
    with caplog.at_level(logging.WARNING):
        assert collect_garbage(open_run(refusing), grace_s=-60, keep_quarantined_days=-1) == [later, expired]
    assert refusing.num_refused == 3
    (warning,) = caplog.messages
    assert warning == (
        f"garbage of run 'run' could not be deleted ({refused}, {quarantined}, evaluations of {refused}), and is left to the "
        "next prune; the first error: [Errno 13] Permission denied"
    )
    assert {key.split("/")[2] for key in store.keys(store.layout.checkpoints)} == {kept.id, refused, quarantined}
    assert not left.exists()
    assert not unfinished.exists()
    session.finish()


def test_garbage_collection_gives_up_on_a_storage_that_does_not_answer(store, tmp_path):
    fill(store, tmp_path, *range(6))
    for step in range(5):
        store.storage.put_bytes(store.layout.data(f"000001-0000000{step}-00000000", "model"), b"x")
    silent = Undeletable(store.storage, StorageError("no answer"), "checkpoints")
    with pytest.raises(StorageError, match="no answer"):
        collect_garbage(open_run(silent))
    assert silent.num_refused == 3


def test_data_of_an_older_attempt_is_garbage_only_after_the_grace(store, tmp_path):
    fill(store, tmp_path, 1)
    store.storage.put_bytes(store.layout.data("000001-00000005-00000000", "model"), b"half")
    fill(store, tmp_path, 2)
    assert collect_garbage(store, grace_s=3600) == []
    assert collect_garbage(store, grace_s=0) == ["000001-00000005-00000000"]


@pytest.mark.parametrize("hours_ahead", [-1000, 1000])
def test_the_grace_is_counted_by_the_clock_of_the_storage(store, tmp_path, hours_ahead):
    fill(store, tmp_path, 1)
    half = "000001-00000005-00000000"
    store.storage.put_bytes(store.layout.data(half, "model"), b"half")
    fill(store, tmp_path, 2)
    storage_s = time.time() + hours_ahead * 3600
    for path in (tmp_path / "store").rglob("*"):
        os.utime(path, (storage_s, storage_s))
    file = store.storage.local_path(store.layout.data(half, "model"))
    assert collect_garbage(store, grace_s=3600) == []
    os.utime(file, (storage_s - 4000, storage_s - 4000))
    assert collect_garbage(store, grace_s=3600) == [half]


def test_what_is_being_written_is_not_older_than_the_clock_of_the_storage_says(store, tmp_path):
    """As on a file server whose clock is behind that of the machine that collects garbage."""
    fill(store, tmp_path, 1)
    half = tmp_path / "store/run/checkpoints/000001-00000005-00000000/.tmp-0123456789abcdef"
    half.parent.mkdir()
    half.write_bytes(b"half")
    storage_s = time.time() - 7200
    for path in (tmp_path / "store").rglob("*"):
        os.utime(path, (storage_s, storage_s))
    collect_garbage(begun_long_ago(store))
    assert half.exists()
    os.utime(half, (storage_s - 4000, storage_s - 4000))
    collect_garbage(store)
    assert not half.exists()


def test_a_deleted_file_that_a_client_keeps_for_a_reader_is_no_garbage(store, tmp_path):
    """NFS answers EBUSY to its deletion, which was tried for two minutes, and anew by each prune."""
    fill(store, tmp_path, 1)
    kept = tmp_path / "store/run/checkpoints/000001-00000000-00000000/.nfs0000000004b40e9f00093dd8"
    kept.parent.mkdir()
    kept.write_bytes(b"deleted")
    for path in (kept, kept.parent):
        os.utime(path, (0, 0))
    assert collect_garbage(begun_long_ago(store)) == []
    assert kept.exists()
    kept.unlink()
    os.utime(kept.parent, (0, 0))
    collect_garbage(store)
    assert not kept.parent.exists()


def test_a_directory_that_a_killed_deletion_has_emptied_is_removed(store, tmp_path):
    (kept,) = fill(store, tmp_path, 1)
    checkpoints = tmp_path / "store/run/checkpoints"
    for name in ("000001-00000000-00000000/sub", "000001-00000000-11111111", "foreign"):
        (checkpoints / name).mkdir(parents=True)
        os.utime(checkpoints / name, (0, 0))
    assert collect_garbage(begun_long_ago(store)) == []
    assert {path.name for path in checkpoints.iterdir()} == {kept.id, "000001-00000000-00000000", "foreign"}
    collect_garbage(store, grace_s=-60)  # the other one was changed a moment ago
    assert {path.name for path in checkpoints.iterdir()} == {kept.id, "foreign"}


def test_data_of_the_running_attempt_is_no_garbage_unless_it_was_given_up(store, tmp_path):
    committed = fill(store, tmp_path, 1, 2)
    for again in ("000001-00000005-00000000", "000001-00000001-00000000"):  # also of the step whose commit was taken for failed
        store.storage.put_bytes(store.layout.data(again, "model"), b"being uploaded")
    assert collect_garbage(store, grace_s=0) == []
    store.storage.put_bytes(store.layout.data("000001-00000000-00000000", "model"), b"older than the committed one")
    assert collect_garbage(store, grace_s=0) == ["000001-00000000-00000000"]
    assert store.list() == committed


def test_data_of_the_newest_attempt_are_garbage_once_it_has_ended(store, tmp_path):
    committed = fill(store, tmp_path, 1)
    half = "000001-00000005-00000000"
    store.storage.put_bytes(store.layout.data(half, "model"), b"half")
    assert collect_garbage(store, grace_s=-60) == []
    write_outcome(store, Outcome(1, "cancelled"))
    assert collect_garbage(store) == []  # a rank elsewhere may still be ended
    assert collect_garbage(store, grace_s=-60) == [half]
    assert store.list() == committed


def test_what_ranks_of_the_newest_attempt_have_left_is_deleted_in_time_though_nothing_is_written_any_more(store, tmp_path):
    """As of a training that was cancelled during a report, and whose name nobody starts again."""
    fill(store, tmp_path, 1)
    half, unreported = "000001-00000005-00000000", tmp_path / "store" / store.layout.unreported(1, "0123456789abcdef")
    store.storage.put_bytes(store.layout.data(half, "model"), b"half")
    unreported.mkdir(parents=True)
    (unreported / "model").write_bytes(b"half")
    for path in (tmp_path / "store").rglob("*"):
        os.utime(path, (0, 0))
    assert collect_garbage(store) == []
    assert unreported.exists()
    write_outcome(store, Outcome(1, "cancelled"))
    assert collect_garbage(store) == [half]
    assert not unreported.exists()


def test_a_foreign_folder_among_the_data_is_left_alone(store, tmp_path):
    fill(store, tmp_path, 1)
    store.storage.put_bytes(f"{store.layout.checkpoints}notes/readme.txt", b"mine")
    collect_garbage(store, grace_s=0)
    assert store.storage.get_bytes(f"{store.layout.checkpoints}notes/readme.txt") == b"mine"


def test_history_comes_back_in_order_with_what_only_a_manifest_remembers(store, tmp_path):
    (manifest,) = fill(store, tmp_path, 7)
    writer = HistoryWriter(store, attempt=1)
    for step in range(1, 2500):
        writer.append(MetricRecord(1, step, {"nan": float("nan")}, None, "2026-11-21T00:00:00+00:00"))
        if writer.is_due():
            writer.flush()
    writer.flush()
    writer.flush()
    history = read_history(store)
    assert [record.step for record in history] == list(range(2500))
    assert history[0].checkpoint == manifest.id
    assert len(list(store.storage.list(store.layout.metrics))) == 3


def test_a_report_that_was_not_stored_comes_after_what_was_logged_before_it(store, tmp_path):
    first, second = fill(store, tmp_path, 0.5, 0.4)
    now, writer = "2026-11-21T00:00:00+00:00", HistoryWriter(store, 1)
    writer.append(MetricRecord(1, 0, {"score": 0.5}, first.id, now))
    writer.append(MetricRecord(1, 100, {"score": 9.0}, None, now, is_logged=True))  # counted in batches
    writer.flush()
    assert [record.step for record in read_history(store)] == [0, 100, 1]
    assert newest_metrics(read_history(store)) == {"score": 0.4}
    for attempt, record in ((2, MetricRecord(2, 2, {}, None, now)), (3, MetricRecord(1, 1, {"score": 0.4}, second.id, now))):
        writer = HistoryWriter(store, attempt)
        writer.append(record)
        writer.flush()
    assert [record.step for record in read_history(store)] == [0, 100, 1, 2]


def test_history_that_is_stored_bit_by_bit_is_an_object_per_thousand_reports(store):
    writer = HistoryWriter(store, attempt=1)
    for step in range(1050):
        writer.append(MetricRecord(1, step, {}, None, "2026-11-21T00:00:00+00:00"))
        if step % 7 == 0:
            writer.flush()
    assert len(list(store.storage.list(store.layout.metrics))) == 1 + 7  # of the last few flushes one each
    writer.close()
    assert [record.step for record in read_history(store)] == list(range(1050))
    assert len(list(store.storage.list(store.layout.metrics))) == 2


def test_a_history_that_could_not_be_stored_is_stored_later(store, monkeypatch):
    writer = HistoryWriter(store, attempt=1)
    writer.append(MetricRecord(1, 0, {}, "000001-00000000-00000000", "2026-11-21T00:00:00+00:00"))
    with monkeypatch.context() as broken:
        broken.setattr(type(store.storage), "put_bytes", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            writer.flush()
    assert writer.recorded is None
    writer.append(MetricRecord(1, 1, {}, None, "2026-11-21T00:00:00+00:00"))
    writer.flush()
    assert writer.recorded == "000001-00000000-00000000"
    assert [record.step for record in read_history(store)] == [0, 1]


def test_what_a_killed_leader_did_not_store_is_known_from_manifests_once(store, tmp_path):
    first, second, third = fill(store, tmp_path, 1, 2, 3)
    before = HistoryWriter(store, attempt=1)
    before.append(MetricRecord(1, 0, {"score": 1}, first.id, "2026-11-21T00:00:00+00:00"))
    before.flush()
    assert newest_recorded(store) == first.id
    lost = lost_records(store, list(store.listed()), attempt=2)
    assert [(record.checkpoint, record.metrics) for record in lost] == [(second.id, {"score": 2}), (third.id, {"score": 3})]
    after = HistoryWriter(store, attempt=2)
    for record in [*lost, *lost]:
        after.append(record)
    after.flush()
    assert newest_recorded(store) == third.id
    prune_as_leader(store, RetentionPolicy(1))
    assert [record.step for record in read_history(store)] == [0, 1, 2]
    write_outcome(store, Outcome(1, "failed"))  # which says nothing of its last records: the storage may have been away
    (again,) = lost_records(store, list(store.listed()), attempt=3)
    assert (again.checkpoint, again.metrics) == (third.id, {"score": 3})


def test_a_prune_deletes_nothing_that_a_link_in_a_checkpoint_leads_to(store, tmp_path):
    session = Attempt(store).session()
    for number in range(2):
        (tmp_path / "c/sub").mkdir(parents=True, exist_ok=True)
        session.report({}, folder(tmp_path / "c", **{"a": str(number), "sub/model": "same", "z": "same"}))
    first, second = store.list()
    sub = stored(store, first, "sub")
    sub.rename(tmp_path / "scratch")
    sub.symlink_to(tmp_path / "scratch")
    with pytest.raises(StorageError, match=rf"{first.id}/sub leads out of the storage .* to .*/scratch"):
        prune_as_leader(store, RetentionPolicy(1))
    assert [path.name for path in sub.parent.iterdir()] == ["sub"]
    assert (tmp_path / "scratch/model").read_text() == "same"
    assert prune_as_leader(store, RetentionPolicy(1)).keep.keys() == {second.id}


@pytest.mark.parametrize("place", ["", "sub"])
def test_a_prune_removes_a_link_to_another_runs_checkpoint_and_keeps_its_files(store, tmp_path, place):
    other = CheckpointStore.open(tmp_path / "store", "other")
    for it in (store, other):
        session = Attempt(it).session()
        for number in range(2):
            (tmp_path / "c/sub").mkdir(parents=True, exist_ok=True)
            session.report({}, folder(tmp_path / "c", **{"a": str(number), "sub/model": it.run}))
    (first, second), theirs = store.list(), other.latest()
    link = stored(store, first, place) if place else stored(store, first, "a").parent
    shutil.rmtree(link)
    link.symlink_to(stored(other, theirs, place) if place else stored(other, theirs, "a").parent)
    assert prune_as_leader(store, RetentionPolicy(1)).drop == (first,)
    other.verify(theirs)
    assert not any(store.storage.list(store.layout.data(first.id)))
    assert [path.name for path in (tmp_path / "store/run/checkpoints").iterdir()] == [second.id]


def test_garbage_collection_removes_directories_of_any_depth(store, tmp_path):
    fill(store, tmp_path, 1)
    write_outcome(store, Outcome(1, "completed"))
    run = tmp_path / "store" / store.run
    unreported, emptied = run / "unreported/000001-0123456789abcdef", run / "checkpoints/000001-00000005-00000000"
    with deep(unreported, emptied):
        (unreported / "x/model").write_bytes(b"half")
        collect_garbage(store, grace_s=-60)
        assert (unreported.exists(), emptied.exists()) == (False, False)


def test_a_deletion_removes_directories_of_any_depth(store, tmp_path):
    fill(store, tmp_path, 1)
    with deep(tmp_path / "store" / store.run / "unreported/000001-0123456789abcdef"):
        delete_run(store)
        assert [*(tmp_path / "store").iterdir()] == []


@pytest.mark.parametrize(("name", "target"), [("checkpoints", "../other/checkpoints"), ("unreported", "../other")])
def test_garbage_collection_deletes_nothing_of_another_run_to_which_a_link_leads(store, tmp_path, name, target):
    """As in a run's directory that was unpacked from an archive."""
    other = CheckpointStore.open(tmp_path / "store", "other")
    Attempt(other).session().report({}, folder(tmp_path / "c", model="x"))
    for _ in range(2):
        Attempt(store)
    (tmp_path / "store/run" / name).symlink_to(target)
    collect_garbage(store, grace_s=-60)
    other.verify(other.latest())
    assert other.keys(other.layout.attempts) != []


def test_nothing_newer_than_a_limit_is_pruned(store, tmp_path):
    first, second, _ = fill(store, tmp_path, 1, 2, 3)
    assert prune_as_leader(store, RetentionPolicy(1), up_to="", dry_run=True).drop == ()
    decided = prune_as_leader(store, RetentionPolicy(1), up_to=first.id)
    assert (decided.drop, decided.keep[second.id]) == ((first,), ("recent",))


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": -1}, {"order": "up"}, {"order": "MAX", "attribute": "loss"}])
def test_the_best_of_nothing_sensible_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="give"):
        CheckpointStore.open(tmp_path, "run").best(**wrong)


def test_unpinning_one_checkpoint_leaves_the_pins_of_others(store, tmp_path):
    first, second = fill(store, tmp_path, 1, 2)
    store.pin(first.id)
    store.pin(second.id)
    store.unpin(first.id)
    assert store.pinned() == {second.id}


class Refusing(WrappedStorage):
    """Gives each of its objects but `refused`, and counts how often those were asked for."""

    def __init__(self, inner, error, *refused):
        super().__init__(inner)
        self.error, self.refused, self.fired = error, refused, 0

    def _do(self, verb, *args, **kwargs):
        if verb == "get_bytes" and args[0] in self.refused:
            self.fired += 1
            raise self.error
        return super()._do(verb, *args, **kwargs)


@pytest.mark.parametrize("error", [PermissionError("access is refused"), StorageError("failed 9 times")])
def test_a_manifest_that_is_refused_for_ever_ends_no_prune_and_is_not_deleted(caplog, error):
    store = CheckpointStore.open(MemoryStorage(), "run")
    first, second, third = (commit(store, step, loss=-step) for step in range(3))
    refusing = Refusing(store.storage, error, store.layout.manifest(first.id))
    training = replace(CheckpointStore.open(refusing, "run"), memory=ManifestMemory())
    for _ in range(2):
        prune_as_leader(training, RetentionPolicy(1))
    assert refusing.fired == 1
    assert store.list() == [first, third]
    assert CheckpointStore.open(refusing, "run").list() == [third]
    assert f"checkpoint {first.id} of run 'run' is left out: {error}" in caplog.text
    store.verify(first, "size")
    assert second.id not in store.ids()


def test_a_storage_that_gives_nothing_leaves_nothing_out():
    store = CheckpointStore.open(MemoryStorage(), "run")
    store.records.put_json(store.layout.run_info, {})
    manifests = [commit(store, step) for step in range(5)]
    keys = [store.layout.manifest(it.id) for it in manifests]
    for error, refused in ((PermissionError("no"), [*keys, store.layout.run_info]), (StorageError("late"), keys[:4])):
        with pytest.raises(type(error), match=str(error)):
            CheckpointStore.open(Refusing(store.storage, error, *refused), "run").list()
