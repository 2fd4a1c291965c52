"""The order in which a run is deleted: a command that is killed can be repeated."""

from dataclasses import replace
from pathlib import PurePath

import pytest
from crash_points import crash_points, open_run
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.begun import has_begun
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.whole import deletion
from prefect_torch.ckpt.runs.whole.deletion import delete_run
from ranks import Attempt, folder
from wrapped_storage import WrappedStorage


def test_nothing_is_left_of_a_run_in_a_directory(tmp_path):
    store = CheckpointStore.open(tmp_path / "store", "run")
    session = Attempt(store).session()
    session.report({"loss": 1}, folder(tmp_path / "c", model="x"))
    session.lent.make()  # as a killed rank leaves it
    delete_run(store)
    assert list((tmp_path / "store").iterdir()) == []


def test_the_deletion_of_a_trial_deletes_nothing_of_another_run_to_which_a_link_leads(tmp_path):
    live = CheckpointStore.open(tmp_path, "live")
    lent = Attempt(live).session().lent.make()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/trial-0001-0000000a").symlink_to("../live")
    with pytest.raises(PermissionError, match="sweep/trial-0001-0000000a is a link to"):
        delete_run(live.beside("sweep/trial-0001-0000000a"))
    assert lent.is_dir()


def test_a_run_is_found_until_nothing_is_left_of_it(tmp_path):
    def stored(*_):
        storage = MemoryStorage()
        Attempt(open_run(storage)).session().report({"loss": 1}, folder(tmp_path / "c", model="x"))
        return storage

    for faulty in crash_points(stored, lambda faulty: delete_run(open_run(faulty))):
        left = open_run(faulty.inner)
        assert has_begun(left) or list(left.storage.list("")) == []
        delete_run(left)
        assert list(left.storage.list("")) == []


class ComparedKey(str):
    """A key that counts how often it is compared."""

    __slots__ = ()
    __hash__ = str.__hash__
    times = 0

    def __eq__(self, other):
        ComparedKey.times += 1
        return str.__eq__(self, other)


def test_a_run_is_deleted_without_a_comparison_of_each_object_with_each_claim():
    class Compared(WrappedStorage):
        def list(self, prefix, **options):
            yield from (replace(info, key=ComparedKey(info.key)) for info in self.inner.list(prefix, **options))

    store = CheckpointStore.open(Compared(MemoryStorage()), "run")
    for number in range(100):
        store.storage.put_bytes(store.layout.attempt(number + 1, "0123abcd"), b"{}")
        store.storage.put_bytes(f"{store.layout.metrics}{number}", b"{}")
    delete_run(store)
    assert list(store.storage.list("")) == []
    assert ComparedKey.times < 100 * 10


def test_only_the_records_of_runs_are_looked_at_as_paths(monkeypatch):
    looked = []
    monkeypatch.setattr(deletion, "PurePath", lambda key: looked.append(key) or PurePath(key))
    run = Run.open(MemoryStorage(), "run")
    data = [run.layout.data("000001-00000001-abcdef01", f"file-{number}") for number in range(100)]
    deletion.check_holds_no_other([run], [run.layout.run_info, *data, run.layout.manifest("000001-00000001-abcdef01")])
    assert looked == []
    with pytest.raises(ValueError, match="run/other is another run, in a storage below run 'run'"):
        deletion.check_holds_no_other([run], [*data, "run/other/run.json"])
    assert looked == ["run/other/run.json"]
