"""Whatever lies in a run: each entry works or raises a CheckpointError, and the good checkpoints are found."""

import copy
import json
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from deep_folders import make_deep
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointError, CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.errors import CheckpointCorruptError, MalformedRecordError
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts, newest_attempt, read_outcomes
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.history import lost_records, newest_recorded, read_history
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.storage.local_files import storage as local
from prefect_torch.ckpt.storage.local_files.storage import MOST_RECORD_BYTES
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.records import seal
from prefect_torch.deployments.command_line.program import run
from prefect_torch.flows import Result
from prunes import prune_as_leader

STORED = Path(__file__).parents[2] / "support/stored_run_of_0_1"
FIRST, SECOND, THIRD = COMMITTED = GOOD = ("000001-00000000-08df6443", "000001-00000001-fd76df3f", "000002-00000002-3daffd56")
QUARANTINED = "000001-00000002-44ca13ab"
NEWER = "000002-00000009-00000000"

DEEP = 100_000
BLOBS = {
    "nothing": b"",
    "a blank": b"\n",
    "null": b"null",
    "true": b"true",
    "a number": b"3",
    "a text": b'"text"',
    "a list": b"[]",
    "objects": b"[{}]",
    "an empty object": b"{}",
    "no JSON": b"not JSON",
    "binary": bytes(range(256)),
    "zeros": b"\0" * 1000,
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep lists, cut": b"[" * DEEP,
    "a deep body": b'{"body": {"format":1,"metrics":' + b'{"a":' * DEEP,
    "a body, no digest": b'{"body":{"format":1}}',
    "a digest that is a number": b'{"body":{"format":1},"digest":3}',
    "a body that is a list": b'{"body":[],"digest":"0"}',
    "a huge integer": b'{"a":1' + b"0" * 5000 + b"}",
    "a large integer": b'{"id":1' + b"0" * 4000 + b"}",
    "a huge float": b'{"body":{"a":1e999},"digest":""}',
    "NaN": b'{"body":NaN,"digest":Infinity}',
    "an escaped surrogate": b'{"id":"\\ud800","reason":"\\ud800","host":"\\ud800"}',
    "a surrogate": b'{"id":"\xed\xa0\x80"}',
    "UTF-16": '{"id":"x"}'.encode("utf-16"),
    "a mark of UTF-8": b"\xef\xbb\xbf{}",
    "an enormous text": b'{"reason":"' + b"x" * 10**6 + b'"}',
    "an enormous name": b'{"' + b"x" * 10**6 + b'":1}',
    "a tag of nothing": b'{"__float__":[]}',
    "a format that is text": b'{"format":"9"}',
    "a format that is huge": b'{"format":1' + b"0" * 4000 + b"}",
    "a page": b"<!DOCTYPE html><title>404</title>",
}
PLACES = {
    "run.json": "run/run.json",
    "the hint": "run/latest.json",
    "a newer claim": "run/attempts/000003-00000000.json",
    "the newest claim": "run/attempts/000002-660f4c06.json",
    "an outcome": "run/outcomes/000002.json",
    "an outcome of nobody": "run/outcomes/x.json",
    "a newer manifest": f"run/manifests/{NEWER}.json",
    "an older manifest": "run/manifests/000001-00000000-00000000.json",
    "an evaluation": f"run/manifests/{FIRST}/eval.json",
    "metadata": f"run/metadata/{SECOND}.json",
    "a chunk": "run/metrics/000002-000000.jsonl",
    "a new chunk": "run/metrics/000002-000000000-0001.jsonl",
    "a pin": f"run/pins/{FIRST}.json",
    "a quarantine": f"run/quarantine/{QUARANTINED}.json",
    "somebody's files": "run/{}/notes.json",
    "somebody's files named oddly": "run/{}/\u0669\u0669-\ud7ff.x.json",
}
FOLDERS = ("attempts", "outcomes", "manifests", "metadata", "metrics", "pins", "quarantine", "checkpoints")

ODD = [
    *(None, True, -1, 0.5, 10**30, 2**63, "", "x", "\ud800", "9" * 5000, [], {}, [[]], [None], {"x": []}),
    *({"__float__": []}, {"__float__": "x"}, {"__float__": None}, {"a": {"b": {"c": [1, {"d": None}]}}}),
]


@pytest.fixture
def store():
    opened = CheckpointStore.open(MemoryStorage(), "run")
    for path in STORED.rglob("*"):
        if path.is_file():
            opened.storage.put_bytes(path.relative_to(STORED).as_posix(), path.read_bytes())
    return opened


def objects(store):
    return {info.key: store.storage.get_bytes(info.key) for info in store.storage.list("run/")}


def look(store):
    """Use every entry that reads a run: it works or raises a CheckpointError, and the good checkpoints are found."""
    assert {it.id for it in store.list()} >= set(GOOD)
    assert store.latest().id == THIRD
    assert {it.id for it in store.best(5, "loss", "min")} >= set(GOOD)
    assert {it.id for it in prune_as_leader(store, RetentionPolicy(1, "loss", "min"), dry_run=True).drop} <= set(COMMITTED)
    entries = (
        lambda: choose_checkpoint(store, lineage=1, verify="size"),
        lambda: choose_checkpoint(store, lineage=2, verify="none"),
        lambda: newest_attempt(store),
        lambda: list(list_attempts(store)),
        lambda: read_outcomes(store),
        lambda: read_history(store),
        lambda: newest_recorded(store),
        lambda: lost_records(store, list(store.listed()), attempt=3),
        lambda: [store.checkpoint(it).get_metadata() for it in store.list()],
        lambda: Result.from_storage(store.storage, "run"),
    )
    for entry in entries:
        with suppress(CheckpointError):
            entry()


@contextmanager
def url_of(store):
    """Yield the URL of what is stored, for commands; of objects in a dictionary, which has none, a copy's."""
    if store.storage.url != MemoryStorage.url:
        yield store.storage.url
        return
    copy = open_storage("memory://copy")
    for key, data in objects(store).items():
        copy.put_bytes(key, data)
    yield copy.url
    copy.delete([info.key for info in copy.list("")])


def look_from_a_terminal(store):
    """Run the commands; what they refuse is one line."""
    with url_of(store) as url:
        for command in (
            ["ls", url],
            ["ls", url, "run"],
            ["show", url, "run"],
            ["show", url, "run", SECOND],
            ["verify", url, "run"],
        ):
            assert run(command) in (0, 1)


@pytest.mark.parametrize("place", PLACES)
def test_junk_in_any_place_ends_nothing(store, place, capsys, caplog):
    before = objects(store)
    for name, blob in BLOBS.items():
        keys = [PLACES[place].format(folder) for folder in FOLDERS] if "{}" in PLACES[place] else [PLACES[place]]
        for key in keys:
            store.storage.put_bytes(key, blob)
        look(store)
        if name in ("deep objects", "an escaped surrogate", "an enormous text", "a format that is huge"):
            look_from_a_terminal(store)
        collect_garbage(store, grace_s=10**9)
        assert {key: data for key, data in objects(store).items() if key not in keys} == {
            key: data for key, data in before.items() if key not in keys
        }, name
        assert all(store.storage.get_bytes(key) == blob for key in keys), name
        store.storage.delete([key for key in keys if key not in before])
        for key in keys:
            if key in before:
                store.storage.put_bytes(key, before[key])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("place", [place for place, key in PLACES.items() if "{}" not in key])
def test_what_is_too_large_for_a_record_is_not_read(tmp_path, place, capsys):
    shutil.copytree(STORED, tmp_path / "store")
    file = tmp_path / "store" / PLACES[place]
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.truncate(file, MOST_RECORD_BYTES + 1)
    store = CheckpointStore.open(tmp_path / "store", "run")
    look(store)
    look_from_a_terminal(store)
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(MalformedRecordError, match=f"{file} has 1073741825 bytes, and a record 1073741824 at most"):
        store.storage.get_bytes(PLACES[place])


def test_a_record_that_would_be_too_large_to_read_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "MOST_RECORD_BYTES", 10)
    store = CheckpointStore.open(tmp_path, "run")
    store.storage.put_bytes("run/x", bytes(10))
    with pytest.raises(OSError, match=r"File too large: .*run/x"):
        store.storage.put_bytes("run/x", bytes(11))
    assert store.storage.get_bytes("run/x") == bytes(10)


def test_the_manifest_of_another_checkpoint_is_no_manifest(store, caplog):
    copied = "000002-00000005-0123abcd"
    store.storage.put_bytes(store.layout.manifest(copied), store.storage.get_bytes(store.layout.manifest(THIRD)))
    with pytest.raises(CheckpointError, match=f"{copied}.json describes {THIRD}"):
        store.committed(copied)
    assert tuple(manifest.id for manifest in store.list()) == GOOD
    assert choose_checkpoint(store, lineage=1, verify="size").id == THIRD
    assert f"checkpoint {copied} of run 'run' is left out" in caplog.text
    assert store.exists(copied)


def test_names_that_are_no_keys_end_nothing(tmp_path, capsys):
    """A directory has them from other programs; a training looks at the outcomes before each of its starts."""
    top = tmp_path / "store"
    shutil.copytree(STORED, top)
    for folder in (*FOLDERS, "deletions", "logs/000002"):
        for name in ("a\\b.json", f"{THIRD}.a\nb.json"):
            (top / "run" / folder).mkdir(parents=True, exist_ok=True)
            (top / "run" / folder / name).write_bytes(b"{}")
    (top / "run/logs/000002/rank-0.000000.log").write_text("a line")
    store = CheckpointStore.open(top, "run")
    look(store)
    assert [outcome.attempt for outcome in read_outcomes(store)] == [1, 2]
    store.pin(THIRD)
    for pinned in store.pinned():
        store.unpin(pinned)
    for command in ("ls", "show", "logs"):
        assert run([command, str(top), "run"]) == 0
    assert run(["copy", str(top), "run", str(tmp_path / "copied")]) == 0
    assert run(["delete", str(top), "run", "--yes"]) == 0
    assert "cannot be a storage key" not in capsys.readouterr().err
    assert {info.key.rpartition("/")[2] for info in store.storage.list("run/")} == {"a\\b.json", f"{THIRD}.a\nb.json"}


def test_directories_of_any_depth_end_nothing(tmp_path, capsys):
    top = tmp_path / "store"
    for name in ("run", "other"):
        shutil.copytree(STORED / "run", top / name)
    for folder in ("", *FOLDERS, f"checkpoints/{THIRD}"):
        (make_deep(top / "run" / folder) / "m").touch()
    store = CheckpointStore.open(top, "run")
    look(store)
    look_from_a_terminal(store)
    collect_garbage(store, grace_s=10**9)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "is nested more than 128 levels deep" in said.err
    assert "other" in said.out


def test_junk_everywhere_at_once_is_left_where_it_is(store, capsys):
    keys = [key for key in PLACES.values() if "{}" not in key] + ["run/attempts/000009-x", "run/manifests/x/y/z"]
    for number, key in enumerate(keys):
        store.storage.put_bytes(key, list(BLOBS.values())[number])
    before = objects(store)
    look(store)
    look_from_a_terminal(store)
    dropped = {it.id for it in prune_as_leader(store, RetentionPolicy(1, "loss", "min")).drop}
    collect_garbage(store, grace_s=-(10**9))
    with suppress(CheckpointError):
        claim_attempt(store, Owner.current(), world_size=1)
    gone = before.keys() - objects(store).keys()
    assert not [key for key in gone if not any(it in key for it in (*dropped, QUARANTINED))]
    assert NEWER not in dropped
    assert store.latest().id == THIRD


def fields_of(value, path=()):
    """Yield the path of every field of a record, and of the first of each list in it."""
    if isinstance(value, dict):
        for name in value:
            yield (*path, name)
            yield from fields_of(value[name], (*path, name))
    elif isinstance(value, list) and value:
        yield (*path, 0)
        yield from fields_of(value[0], (*path, 0))


def changed(record, path, value):
    other = at = copy.deepcopy(record)
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return other


RECORDS = {
    "a claim": "run/attempts/000002-660f4c06.json",
    "an outcome": "run/outcomes/000002.json",
    "a manifest": f"run/manifests/{FIRST}.json",
    "an evaluation": f"run/manifests/{FIRST}/eval.json",
    "a chunk": "run/metrics/000002-000000.jsonl",
    "a quarantine": f"run/quarantine/{QUARANTINED}.json",
    "the hint": "run/latest.json",
}


@pytest.mark.parametrize("what", RECORDS)
def test_any_field_may_be_of_any_type(store, what, monkeypatch):
    """Each is sealed anew, as whoever can write to the storage could: a digest says nothing of the types behind it."""
    monkeypatch.setattr(f"{__name__}.GOOD", (SECOND, THIRD))
    key = RECORDS[what]
    record = json.loads(store.storage.get_bytes(key))
    body, tried = record.get("body", record), 0
    for path in fields_of(body):
        for value in ODD:
            other = changed(body, path, value)
            store.storage.put_bytes(key, seal(other) if "body" in record else json.dumps(other).encode())
            look(store)
            tried += 1
            if tried % 50 == 1:
                look_from_a_terminal(store)
    assert tried >= len(ODD)


@pytest.mark.parametrize("path", ["../../x", "/etc/passwd", "a//b", "", "a\\b", "a\nb", "\ud800"])
def test_a_path_that_leads_elsewhere_is_no_path_of_a_file(store, path):
    key = RECORDS["a manifest"]
    body = json.loads(store.storage.get_bytes(key))["body"]
    body["files"][0]["path"] = path
    store.storage.put_bytes(key, seal(body))
    assert [it.id for it in store.list()] == [SECOND, THIRD]
    assert FIRST not in {it.id for it in prune_as_leader(store, RetentionPolicy(1)).drop}


def test_a_start_passes_over_a_path_that_is_too_long_for_a_file(tmp_path):
    shutil.copytree(STORED, tmp_path / "store")
    store = CheckpointStore.open(tmp_path / "store", "run")
    body = json.loads(store.storage.get_bytes(store.layout.manifest(THIRD)))["body"]
    for path in ("x" * 256, "x" * 256 + "/y"):
        body["files"][0]["path"] = path
        store.storage.put_bytes(store.layout.manifest(THIRD), seal(body))
        assert choose_checkpoint(store, lineage=1, verify="size", dry_run=True).id == SECOND
        with pytest.raises(CheckpointCorruptError, match=f"{THIRD}/xxx.* is missing"):
            store.verify(store.get(THIRD))


@pytest.mark.parametrize("are_gone", [False, True])
def test_a_run_whose_claims_cannot_be_read_is_not_said_to_be_missing(store, are_gone):
    for key in store.keys(store.layout.attempts):
        if are_gone:
            store.storage.delete([key])
        else:
            store.storage.put_bytes(key, b"?")
    with pytest.raises(CheckpointCorruptError, match=r"run 'run' in memory has no claim of an attempt that can be read"):
        Result.from_storage(store.storage, "run")
    with pytest.raises(FileNotFoundError, match="there is no run 'other'"):
        Result.from_storage(store.storage, "other")


def test_claims_that_no_number_can_follow_are_refused_by_name(store):
    store.storage.put_bytes("run/attempts/1000000-00000000.json", b"{}")
    assert claim_attempt(store, Owner.current(), world_size=1).number == 3
    store.storage.put_bytes("run/attempts/999999-00000000.json", b"{}")
    with pytest.raises(CheckpointError, match=r"run 'run' in memory has attempt 999999, and 999999 at most"):
        claim_attempt(store, Owner.current(), world_size=1)


def test_a_run_that_holds_nothing_but_what_cannot_be_read_is_not_begun_anew(tmp_path):
    store = CheckpointStore.open(f"memory://{tmp_path}", "run")
    store.storage.put_bytes(f"run/manifests/{NEWER}.json", b"\x82")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"(?s)does not start fresh unasked .*{NEWER}: .* is not a manifest"):
            choose_checkpoint(store, lineage=1, verify="digest")
    assert objects(store).keys() == {f"run/manifests/{NEWER}.json"}
    assert choose_checkpoint(store, lineage=3, verify="digest") is None
