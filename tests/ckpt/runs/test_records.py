"""Stored records: those of version 0.1 are read, those of later versions are left alone, and bytes stay what they were."""

import json
import math
import shutil
import tracemalloc
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointStore, RankLocal, RetentionPolicy, UnsupportedFormatError
from prefect_torch.ckpt.errors import MalformedRecordError
from prefect_torch.ckpt.runs import bulk
from prefect_torch.ckpt.runs.attempts.attempt import (
    list_attempts,
    newest_attempt,
    read_outcome,
    read_outcomes,
    record_resumed_from,
    write_outcome,
)
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord, read_history
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.records.fields import decode
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.state.index import StateIndex
from prefect_torch.ckpt.storage.records import MAX_DEPTH, parse, seal, unseal
from prefect_torch.deployments.command_line.program import run
from prefect_torch.flows import Result
from prunes import prune_as_leader
from ranks import Attempt, folder

STORED = Path(__file__).parents[2] / "support/stored_run_of_0_1"
FIRST, SECOND, THIRD = "000001-00000000-08df6443", "000001-00000001-fd76df3f", "000002-00000002-3daffd56"
QUARANTINED = "000001-00000002-44ca13ab"
AGES = 10 * 365 * 24 * 3600


@pytest.fixture
def store(tmp_path):
    """A run that version 0.1 stored: three checkpoints and one in quarantine, of two attempts."""
    shutil.copytree(STORED, tmp_path / "store")
    return CheckpointStore.open(tmp_path / "store", "run")


def test_a_run_of_version_0_1_is_read(store):
    first, second, third = store.list()
    assert [it.id for it in (first, second, third)] == [FIRST, SECOND, THIRD]
    assert math.isnan(first.metrics["loss"])
    assert first.metrics["note"] == "\u00fc \ud800"
    assert first.metrics["eval"] == {"accuracy": 0.9, "worst": -math.inf}
    assert second.metadata == {"author": "me", "tag": {"__float__": 3}, "nested": [1, [None, 1.5]]}
    assert store.metadata(second) == {**second.metadata, "format": 2, "reviewed": True}  # a user's own "format"
    assert store.latest() == third
    assert store.pinned() == {SECOND}
    for manifest in (first, second, third):
        store.verify(manifest)
    claims = list(list_attempts(store))
    assert [(it.number, it.owner.pid, it.restored_id) for it in claims] == [(1, 4242, None), (2, 4242, SECOND)]
    assert newest_attempt(store).policy == RetentionPolicy(3, "loss", "min", evaluation_timeout_s=60.0)
    assert [it.ending for it in read_outcomes(store)] == ["failed", "completed"]
    assert read_outcome(store, 2).return_value == {"final": math.inf, "list": [1, "x"]}
    assert [(it.attempt, it.step, it.is_logged) for it in read_history(store)] == [
        *((1, 0, False), (1, 1, False), (1, 2, False), (1, 3, True), (2, 2, False))
    ]
    assert choose_checkpoint(store, lineage=1, verify="digest") == third
    state = {"extra": None, "rng": RankLocal(None)}
    store.checkpoint(third).load_state(state)
    assert state["extra"] == {"epoch": 4, "losses": [1.5]}


def test_a_run_of_version_0_1_goes_on(store, tmp_path):
    attempt = Attempt(store)
    attempt.session().report({"loss": 0.1}, folder(tmp_path / "c", model="x"))
    writer = HistoryWriter(store, attempt.number)
    newest = store.latest()
    writer.append(MetricRecord(3, newest.step, newest.metrics, newest.id, "2026-11-21T00:00:00+00:00"))
    writer.close()
    assert (attempt.number, newest.parent) == (3, THIRD)
    assert [it.step for it in Result.from_storage(store.storage.url, "run").history] == [0, 1, 2, 3, 2, 3]
    assert prune_as_leader(store, RetentionPolicy(1, "loss", "min")).drop[0].id == FIRST


def test_what_is_written_is_byte_for_byte_what_version_0_1_wrote(store):
    before = {path: path.read_bytes() for path in (STORED / "run").rglob("*") if path.is_file()}
    mirror = CheckpointStore.open(MemoryStorage(), "run")
    for attempt in list_attempts(store):
        key = mirror.layout.attempt(attempt.number, attempt.token)
        mirror.records.put_json(key, asdict(replace(attempt, resumed_from=None)))
        if attempt.resumed_from is not None:
            record_resumed_from(mirror, attempt, attempt.resumed_from)
    for outcome in read_outcomes(store):
        write_outcome(mirror, outcome)
    for manifest in store.list():
        mirror.storage.put_bytes(mirror.layout.manifest(manifest.id), manifest.encode())
    mirror.hint_latest(THIRD)
    mirror.put_metadata(SECOND, store.metadata(store.get(SECOND)))
    evaluation = store.layout.evaluation(FIRST, "eval")
    mirror.storage.put_bytes(evaluation, seal(unseal(store.storage.get_bytes(evaluation), "here", "an evaluation")))
    key = store.layout.data(THIRD, ".state.json")
    files = {entry.path: entry.bytes for entry in store.get(THIRD).files}
    mirror.storage.put_bytes(key, StateIndex.decode(store.storage.get_bytes(key), "here", files).encode())
    written = {STORED / info.key: mirror.storage.get_bytes(info.key) for info in mirror.storage.list("run/")}
    assert len(written) == 11
    extended_since = ("attempts", "outcomes", "metadata")
    extended = {path for path in written if path.parent.name in extended_since}
    assert {path: data for path, data in written.items() if path not in extended} == {
        path: data for path, data in before.items() if path in written.keys() - extended
    }
    for path in extended:
        old, new = json.loads(before[path]), json.loads(written[path])
        assert old.pop("owner", {}).items() <= new.pop("owner", {}).items()
        assert old.items() <= new.items()


RECORDS = {
    "a claim": lambda store: store.layout.attempt(2, "660f4c06"),
    "an outcome": lambda store: store.layout.outcome(2),
    "a manifest": lambda store: store.layout.manifest(THIRD),
    "an evaluation": lambda store: store.layout.evaluation(FIRST, "eval"),
    "a history": lambda store: f"{store.layout.metrics}000002-000000.jsonl",
    "run.json": lambda store: store.layout.run_info,
    "a hint": lambda store: store.layout.latest,
    "a pin": lambda store: f"{store.layout.pins}{SECOND}.json",
    "a quarantine": lambda store: store.layout.quarantine(QUARANTINED),
}


def change(store, what, **added):
    """Add fields to a stored record, as another version of this package would write them."""
    key = RECORDS[what](store)
    record = json.loads(store.storage.get_bytes(key))
    is_sealed = "body" in record
    body = {**(record["body"] if is_sealed else record), **added}
    if what == "a claim" and "format" not in added:
        body = {**body, "owner": {**body["owner"], **added}, "settings": {**body["settings"], **added}}
    if what == "a manifest" and "format" not in added:
        body["files"] = [{**entry, **added} for entry in body["files"]]
    store.storage.put_bytes(key, seal(body) if is_sealed else json.dumps(body).encode())
    return key


def everything(store):
    claims = [(it.number, it.token, it.owner, it.policy, it.resumed_from) for it in list_attempts(store)]
    return repr([store.list(), claims, read_outcomes(store), read_history(store), store.pinned(), store.latest()])


@pytest.mark.parametrize("what", RECORDS)
def test_a_field_that_a_later_version_adds_is_ignored(store, caplog, what):
    before = everything(store)
    change(store, what, added={"by": [2]}, evaluations=["x"])
    assert everything(store) == before
    claim_attempt(store, Owner.current(), world_size=1)
    assert choose_checkpoint(store, lineage=1, verify="digest").id == THIRD
    assert run(["show", store.storage.url, "run"]) == 0
    assert caplog.text == ""


def objects(store):
    return {info.key: store.storage.get_bytes(info.key) for info in store.storage.list("run/")}


def claim_long_after(store):
    """Claim more attempts, so that what an older one did not commit is garbage."""
    for number in range(4, 7):
        store.storage.put_bytes(store.layout.attempt(number, "00000000"), b"{}")


@pytest.mark.parametrize("what", RECORDS)
def test_nothing_of_a_newer_format_is_taken_for_damage_or_ever_deleted(store, caplog, what):
    key = change(store, what, format=2)
    claim_long_after(store)
    before = objects(store)
    dropped = {manifest.id for manifest in prune_as_leader(store, RetentionPolicy(1, "loss", "min")).drop}
    collect_garbage(store, grace_s=-AGES)
    everything(store)
    lost = before.keys() - objects(store).keys()
    assert objects(store)[key] == before[key]
    assert {it for it in lost if not any(checkpoint_id in it for checkpoint_id in (*dropped, QUARANTINED))} == set()
    assert dropped == {"a manifest": {FIRST}, "an evaluation": set()}.get(what, {FIRST})
    if what in {"a claim", "an outcome", "a manifest", "an evaluation", "a history"}:
        assert f"{key} has format 2 and this version reads 1: upgrade prefect-torch" in caplog.text


@pytest.mark.parametrize("what", ["run.json", "a claim", "a manifest"])
def test_a_start_beside_a_newer_version_is_refused_and_asks_for_an_upgrade(store, what):
    key = change(store, what, format=2)
    before = objects(store)
    with pytest.raises(UnsupportedFormatError, match=rf"{key} has format 2 and this version reads 1: upgrade prefect-torch"):
        begin(store)
    assert {it: data for it, data in objects(store).items() if "attempts" not in it or it in before} == before


def begin(store):
    newest_attempt(store)  # who leads
    claim_attempt(store, Owner.current(), world_size=1)
    choose_checkpoint(store, lineage=1, verify="digest")


def test_a_newer_checkpoint_ends_the_start_and_an_older_one_behind_it_does_not(store):
    change(store, "a manifest", format=2)
    with pytest.raises(UnsupportedFormatError, match=rf"{THIRD}\.json has format 2 .* upgrade prefect-torch"):
        choose_checkpoint(store, lineage=1, verify="digest")
    assert store.latest().id == SECOND
    with pytest.raises(UnsupportedFormatError):
        store.get(THIRD)
    newest = replace(store.get(SECOND), id="000003-00000009-00000000", step=9, attempt=3)
    store.storage.put_bytes(store.layout.manifest(newest.id), newest.encode())
    assert choose_checkpoint(store, lineage=1, verify="none").id == newest.id


@pytest.mark.parametrize("name", [f"{THIRD}.json", f"{THIRD}.msgpack", f"{THIRD}.v2.json"])
def test_the_data_of_whatever_is_committed_in_another_way_is_no_garbage(store, name):
    """A newer version may name its manifests otherwise, and write them in another encoding."""
    before = {key for key in objects(store) if key.startswith(store.layout.data(THIRD))}
    store.storage.delete([store.layout.manifest(THIRD)])
    store.storage.put_bytes(f"{store.layout.manifests}{name}", b"\x82\xa4body\x00")
    claim_attempt(store, Owner.current(), world_size=1)
    assert collect_garbage(store, grace_s=-AGES) == []
    assert before <= objects(store).keys()


def test_an_envelope_that_a_newer_version_changed_is_newer_not_damaged():
    for data in (b'{"format":2}', b'{"format": 3, "digest": "x"}', b'{"body":{"format":2,"id":1},"digest":"sha256:0"}'):
        with pytest.raises(UnsupportedFormatError, match=r"here has format [23] and this version reads 1"):
            Manifest.decode(data, "here")


@pytest.mark.parametrize("format_version", [0, -1, True, 1.0, "2", None, [2]])
def test_a_format_that_none_ever_was_is_malformed(format_version):
    with pytest.raises(MalformedRecordError, match="here is not a manifest: format: "):
        Manifest.decode(seal({"format": format_version}), "here")


def test_the_deepest_object_that_is_read_and_the_first_that_is_not():
    deep = {"a": None}
    for _ in range(MAX_DEPTH - 1):
        deep = {"a": deep}
    assert parse(json.dumps(deep).encode(), "here", "it") == deep
    with pytest.raises(MalformedRecordError, match="here is not it: it is nested too deeply"):
        parse(json.dumps({"a": deep}).encode(), "here", "it")


def test_zeros_in_the_place_of_a_record_are_held_in_memory_once(store):
    size = 32 * 2**20
    store.storage.local_path(store.layout.manifest(THIRD)).write_bytes(bytes(size))
    tracemalloc.start()
    try:
        with pytest.raises(MalformedRecordError, match=rf"{THIRD}\.json is not a manifest: its {size} bytes do not begin with"):
            store.committed(THIRD)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * size
    finally:
        tracemalloc.stop()


def test_what_is_deeper_than_a_record_could_hold_is_refused_before_it_is_written(store, tmp_path):
    deep: list = []
    for _ in range(100):
        deep = [deep]
    checkpoint = folder(tmp_path / "c", model="x")
    for target in (checkpoint, store.checkpoint(store.latest())):
        target.set_metadata({"a": deep[0]})
        with pytest.raises(ValueError, match="more than 100 levels"):
            target.set_metadata({"a": deep})
    (tmp_path / "c/.metadata.json").write_text(json.dumps({"a": deep}))
    with pytest.raises(ValueError, match=r"metadata.json|100 levels"):
        checkpoint.get_metadata()
    checkpoint.set_metadata({"a": deep[0]})
    Attempt(store).session().report({"loss": 1}, checkpoint)
    assert store.latest().metadata == {"a": deep[0]}


def test_an_error_names_the_field_and_the_object(store):
    key = store.layout.manifest(SECOND)
    body = json.loads(store.storage.get_bytes(key))["body"]
    for changed, problem in (
        ({"files": [*body["files"], {**body["files"][0], "bytes": "many"}]}, "files/2/bytes: 'many' is not a whole number"),
        ({"step": 10**18}, f"step: {10**18} is not within 0 and {10**18 - 1}"),
        ({"created_at": "2026-11-21T00:00:00"}, "created_at: '2026-11-21T00:00:00' is not a time with its zone"),
        ({"timings": {"stall_s": None}}, "timings/stall_s: None is not a number"),
        ({"created_at": "9999-12-31T23:59:59-12:00"}, "created_at: '9999-12-31T23:59:59-12:00' is not a time with its zone"),
        ({"metrics": {"a": {"b": [1]}}}, "metrics/b: a list is no metric"),
        ({"timings": {"\x1b[2J": None}}, "timings/'\\x1b[2J': None is not a number"),
        ({"step": 8}, f"attempt {body['attempt']} and step 8 are not those of its id {SECOND}"),
        ({"files": body["files"][:1] * 2}, "it has a file twice"),
        (
            {"files": [body["files"][0], {**body["files"][0], "path": f"{body['files'][0]['path']}/below"}]},
            f"its {body['files'][0]['path']!r} is a file and a directory",
        ),
    ):
        with pytest.raises(MalformedRecordError) as caught:
            Manifest.decode(seal({**body, **changed}), key)
        assert str(caught.value) == f"{key} is not a manifest: {problem}"
    del body["parent"]
    with pytest.raises(MalformedRecordError, match=f"{key} is not a manifest: parent: it is missing"):
        Manifest.decode(seal(body), key)


def test_a_policy_with_fields_of_a_later_version_is_read_as_far_as_it_is_known():
    settings = {**asdict(RetentionPolicy(2)), "keep_hourly": 3}
    assert decode(RetentionPolicy, settings, "here", "a policy") == RetentionPolicy(2)


@pytest.mark.parametrize(("num_objects", "freezes"), [(100, 0), (100_000, 1)])
def test_what_few_records_left_behind_is_left_to_the_next_collection(monkeypatch, num_objects, freezes):
    """Else a process that reads a few again and again never frees its garbage."""
    called = []
    verbs = {name: partial(called.append, name) for name in ("disable", "enable", "freeze", "unfreeze")}
    told = {"isenabled": lambda: True, "get_count": lambda: (num_objects, 0, 0)}
    monkeypatch.setattr(bulk, "gc", SimpleNamespace(**verbs, **told))
    monkeypatch.setattr(bulk, "_has_frozen", lambda: False)
    with bulk.no_collection():
        assert called == ["disable"]
    assert (called.count("freeze"), called.count("unfreeze"), called[-1]) == (freezes, freezes, "enable")
