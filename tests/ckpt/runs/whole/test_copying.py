"""A copy of a whole run has every record of it, as it was written; what it leaves behind is listed here."""

import inspect

import pytest
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointCorruptError, CheckpointNotFoundError, StorageError
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.whole.copying import copy_planned, plan_copy
from prefect_torch.ckpt.storage.retry import RetryingStorage, RetryPolicy
from stored_runs import store_run
from waiting_storage import WaitingStorage
from wrapped_storage import WrappedStorage

WITH_THE_MANIFESTS = {"checkpoints", "manifests", "metadata"}
LEFT_BEHIND = {
    "answered",  # between processes that lead the sweep now
    "asked",
    "deletions",  # marks of deletions that are under way
    "deployed.json",
    "index",  # a cache of manifests, as is the hint
    "latest.json",
    "unreported",  # what a rank still writes
}


def every_key(layout):
    """Return a key of every kind that a layout has."""
    for name, member in inspect.getmembers(Layout):
        if isinstance(member, property):
            yield getattr(layout, name)
        elif inspect.isfunction(member) and not name.startswith("_"):
            parameters = list(inspect.signature(member).parameters.values())[1:]
            values = [1 if parameter.annotation is int else "x" for parameter in parameters]
            yield getattr(layout, name)(*values)
            yield getattr(layout, name)(*values[: sum(parameter.default is parameter.empty for parameter in parameters)])


def test_a_whole_copy_leaves_nothing_behind_but_what_belongs_to_this_storage():
    source, target = MemoryStorage(), MemoryStorage()
    run = Run.open(source, "run")
    for key in every_key(run.layout):
        if isinstance(key, str):
            source.put_bytes(f"{key}x" if key.endswith("/") else key, b"{}")
    copy_planned(plan_copy(run, (), whole=True), source, target, lambda _: None)
    there, here = ({info.key.split("/")[1] for info in storage.list("run/")} for storage in (target, source))
    assert here - there == WITH_THE_MANIFESTS | LEFT_BEHIND
    assert there


class Gateway(WrappedStorage):
    """Answers the first reads of each record with a page of its own and status 200."""

    def __init__(self, inner, num_pages):
        super().__init__(inner)
        self.num_pages = num_pages
        self.pages = {}

    def get_bytes(self, key):
        sent = self.pages.get(key, 0)
        if sent < self.num_pages:
            self.pages[key] = sent + 1
            return b'{"error": "busy"}'
        return self.inner.get_bytes(key)


@pytest.fixture
def source(tmp_path):
    """A run with every kind of record."""
    store = store_run(MemoryStorage(), tmp_path, steps=1)
    (manifest,) = store.list()
    store.pin(manifest.id)
    store.put_metadata(manifest.id, {"of": "the user"})
    store.attach_metrics(manifest.id, {"accuracy": 0.5})
    store.storage.put_bytes(f"{store.layout.logs(1)}rank-0.0.log", b"a line")
    store.storage.put_bytes(f"{store.layout.evaluation_logs('e', manifest.id)}rank-0.0.log", b"a line")
    return store


def test_many_checkpoints_are_copied_at_the_same_time(tmp_path):
    store = store_run(MemoryStorage(), tmp_path, steps=20)
    awaited = ("checkpoints", "manifests")
    source, target = WaitingStorage(store.storage, "metadata", *awaited), WaitingStorage(MemoryStorage(), *awaited)
    copy_planned(plan_copy(Run.open(source, "run"), store.list(), whole=True), source, target, lambda _: None)
    assert objects(target.inner) == objects(source.inner)
    for storage in (source, target):
        assert min(storage.most[folder] for folder in awaited) >= 4
    assert source.most["metadata"] >= 4  # which none has


def test_the_size_of_a_checkpoint_is_summed_once_as_it_is_copied(tmp_path, monkeypatch):
    """It may have ten thousand files."""
    store = store_run(MemoryStorage(), tmp_path, steps=20)
    planned = plan_copy(store, store.list(), whole=True)
    summed = []
    monkeypatch.setattr(Manifest, "total_bytes", property(lambda it: summed.append(it.id) or 0))
    copy_planned(planned, store.storage, MemoryStorage(), lambda _: None)
    assert summed == [it.id for it in planned.checkpoints]


def objects(storage):
    return {info.key: storage.get_bytes(info.key) for info in storage.list("run/")}


@pytest.fixture
def plan(source):
    return plan_copy(source, source.list(), whole=True)


def test_a_gateways_page_is_copied_as_no_record(source, plan):
    gateway, target = Gateway(source.storage, 1), MemoryStorage()
    copy_planned(plan, RetryingStorage(lambda: gateway, RetryPolicy(60, 0), gateway), target, lambda _: None)
    expected = objects(source.storage)
    expected.pop(source.layout.latest, None)  # a hint
    assert objects(target) == expected
    data = {source.layout.data(it.id, entry.path) for it in plan.checkpoints for entry in it.files}
    assert set(expected) - set(gateway.pages) == data


def test_a_record_that_never_arrives_whole_ends_the_copy(source, plan):
    with pytest.raises(StorageError, match=r"17 bytes came of the \d+ of memory/run/run.json"):
        copy_planned(plan, Gateway(source.storage, 10**6), target := MemoryStorage(), lambda _: None)
    assert objects(target) == {}


def test_a_log_that_has_grown_since_the_plan_is_copied(source, plan):
    key = f"{source.layout.logs(1)}rank-0.0.log"
    source.storage.put_bytes(key, b"a line\nand another")
    copy_planned(plan, source.storage, target := MemoryStorage(), lambda _: None)
    assert target.get_bytes(key) == b"a line\nand another"


def test_a_manifest_that_is_damaged_is_whole_in_the_copy(source, plan, caplog):
    """The index has its content, by which the data were compared."""
    key = source.layout.manifest(plan.checkpoints[0].id)
    whole = source.storage.get_bytes(key)
    source.storage.put_bytes(key, whole.replace(b'"loss":1', b'"loss":2'))
    copy_planned(plan, source.storage, target := MemoryStorage(), lambda _: None)
    assert target.get_bytes(key) == whole
    assert f"{key} does not match its own digest" in caplog.text


@pytest.mark.parametrize("gone", ["data", "manifest"])
def test_a_checkpoint_that_is_pruned_meanwhile_is_named_and_left_out_by_a_repeated_copy(tmp_path, gone):
    source, target = store_run(MemoryStorage(), tmp_path), MemoryStorage()
    plan = plan_copy(source, source.list(), whole=True)
    pruned, *left = source.list()
    data = [source.layout.data(pruned.id, entry.path) for entry in pruned.files]
    source.storage.delete([source.layout.manifest(pruned.id), *(data if gone == "data" else [])])
    with pytest.raises(CheckpointNotFoundError, match=rf"{pruned.id}.* is gone: .*; the same command copies"):
        copy_planned(plan, source.storage, target, lambda _: None)
    copy_planned(plan_copy(source, source.list(), whole=True), source.storage, target, lambda _: None)
    assert Run.open(target, "run").exists(left[-1].id)
    assert not Run.open(target, "run").exists(pruned.id)


def test_a_file_that_is_missing_is_damage_while_its_manifest_is_there(source, plan):
    missing = source.layout.data(plan.checkpoints[0].id, plan.checkpoints[0].files[0].path)
    source.storage.delete([missing])
    with pytest.raises(CheckpointCorruptError, match=rf"{missing} is missing, so .*: prefect-torch verify names"):
        copy_planned(plan, source.storage, target := MemoryStorage(), lambda _: None)
    assert not Run.open(target, "run").exists(plan.checkpoints[0].id)


def test_an_object_that_has_grown_is_neither_read_nor_copied(source, plan):
    grown = source.layout.data(plan.checkpoints[0].id, plan.checkpoints[0].files[0].path)
    source.storage.put_bytes(grown, bytes(2**20))
    written = {}

    class Watching(WrappedStorage):
        def get_file(self, key, path, *rest):
            got = self.inner.get_file(key, path, *rest)
            written[key] = path.exists()
            return got

    with pytest.raises(CheckpointCorruptError, match=rf"{grown} differs from what was committed"):
        copy_planned(plan, Watching(source.storage), target := MemoryStorage(), lambda _: None)
    assert not written[grown]
    assert grown not in objects(target)
