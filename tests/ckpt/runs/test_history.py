"""The metric history: objects written once, few of them, and no record lost or doubled whatever is killed or torn."""

import logging
import threading
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import xxhash
from counting_storage import CountingStorage
from crash_points import crash_points, open_run
from faulty_storage import Crash, FaultyStorage
from hypothesis import given
from hypothesis import strategies as st
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CheckpointStore, StorageError
from prefect_torch.ckpt.runs import history as history_module
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord, lost_records, newest_recorded, read_history
from prefect_torch.ckpt.runs.parts import metric_chunks as chunks_module
from prefect_torch.ckpt.runs.parts.metric_chunks import encode_line, new_chunk, read_chunk
from prefect_torch.ckpt.storage.parallel import AT_ONCE
from prefect_torch.ckpt.storage.records import fields_of, seal
from prefect_torch.deployments.command_line.program import run
from prefect_torch.flows import Result
from ranks import Attempt, folder
from wrapped_storage import WrappedStorage

AT = "2026-11-21T00:00:00+00:00"


@pytest.fixture
def store():
    return CheckpointStore.open(MemoryStorage(), "run")


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of six records, and three parts at most."""
    for module in (history_module, chunks_module):
        monkeypatch.setattr(module, "CHUNK_RECORDS", 6)
    monkeypatch.setattr(history_module, "MOST_PARTS", 3)


def record(step: int) -> MetricRecord:
    return MetricRecord(1, step, {"loss": step / 2}, f"000001-{step:08d}-00000000", AT)


def steps(store) -> list[int]:
    return [it.step for it in read_history(store)]


def chunks(store) -> list[str]:
    return sorted(info.key for info in store.storage.list(store.layout.metrics))


def write(store, count: int, per_flush: int = 1) -> HistoryWriter:
    writer = HistoryWriter(store, 1)
    for step in range(count):
        writer.append(record(step))
        if step % per_flush == per_flush - 1:
            writer.flush()
    return writer


@pytest.mark.parametrize("most_bytes", [2**22, 900])  # of five lines
def test_a_crash_at_any_operation_loses_and_doubles_no_record(small_chunks, most_bytes, monkeypatch):
    monkeypatch.setattr(history_module, "MOST_BYTES", most_bytes)
    stored: dict[int, HistoryWriter] = {}

    def run_writer(faulty):
        writer = stored[id(faulty.inner)] = HistoryWriter(open_run(faulty), 1)
        for step in range(15):
            writer.append(record(step))
            if step % 2 == 0:
                writer.flush()
        writer.close()

    fired = 0
    for faulty in crash_points(lambda *_: MemoryStorage(), run_writer):
        fired += faulty.fired
        store, recorded = open_run(faulty.inner), stored[id(faulty.inner)].recorded
        found = steps(store)
        assert found == list(range(len(found)))
        assert recorded is None or record(len(found) - 1).checkpoint >= recorded
        assert newest_recorded(store) >= (recorded or "")
    assert fired > 40


@pytest.mark.parametrize("way", [{}, {"after": True}, {"torn": True}], ids=["before", "after", "torn"])
@pytest.mark.parametrize("most_bytes", [2**22, 900])
def test_an_error_at_any_operation_is_made_up_for(small_chunks, way, most_bytes, monkeypatch):
    monkeypatch.setattr(history_module, "MOST_BYTES", most_bytes)
    verbs: Counter[str] = Counter()
    for number in range(1, 200):
        faulty = FaultyStorage(MemoryStorage(), number, error=StorageError("no answer"), **way)
        store = CheckpointStore.open(faulty, "run")
        writer = HistoryWriter(store, 1)
        for step in range(15):
            writer.append(record(step))
            try:
                writer.flush()
            except StorageError:
                verbs[faulty.operations[-1][0]] += 1
        for _ in range(2):
            try:
                writer.close()
            except StorageError:
                verbs[faulty.operations[-1][0]] += 1
        if not faulty.fired:
            break
        assert steps(store) == list(range(15))
        assert len(chunks(store)) == 3  # what an error left is gone
    else:
        pytest.fail("it never ends")
    assert verbs.keys() == {"put_bytes", "get_bytes", "delete"}


def test_weeks_of_reports_are_an_object_per_thousand_and_few_others(store):
    writer, most = HistoryWriter(store, 1), 0
    for step in range(4321):
        writer.append(record(step))
        writer.flush()
        most = max(most, len(chunks(store)) - step // 1000)
    assert most <= history_module.MOST_PARTS + 1
    writer.close()
    assert len(chunks(store)) == 5
    assert steps(store) == list(range(4321))


def test_long_reports_are_stored_again_with_few_others(store, monkeypatch):
    """Each merge stored up to a thousand again: 18 times the bytes of a history of reports with a thousand metrics."""
    monkeypatch.setattr(history_module, "MOST_BYTES", 80 * len(encode_line(100, fields_of(record(100)))))
    num_bytes, put = 0, store.storage.put_bytes

    def counted(key, data):
        nonlocal num_bytes
        num_bytes += len(data)
        put(key, data)

    store.storage.put_bytes = counted
    write(store, 1000).close()
    assert num_bytes < 4 * sum(info.bytes for info in store.storage.list(store.layout.metrics))
    assert 12 <= len(chunks(store)) <= 14
    assert steps(store) == list(range(1000))


def test_no_object_of_the_history_is_written_twice(store, small_chunks):
    written: Counter[str] = Counter()
    put = store.storage.put_bytes
    store.storage.put_bytes = lambda key, data: (written.update([key]), put(key, data))
    write(store, 40).close()
    assert set(written.values()) == {1}


def test_a_flush_costs_one_request_and_a_merge_three_more():
    counting = CountingStorage(MemoryStorage())
    writer = write(CheckpointStore.open(counting, "run"), history_module.MOST_PARTS - 1)
    assert counting.taken() == {"put_bytes": history_module.MOST_PARTS - 1}
    writer.append(record(31))
    writer.flush()
    assert counting.taken() == {"put_bytes": 2, "get_bytes": 1, "delete": 1}


def test_parts_stay_until_what_takes_their_place_is_read_back_whole(store, small_chunks):
    writer = write(store, 2)
    put = store.storage.put_bytes
    store.storage.put_bytes = lambda key, data: put(key, data if key.endswith("-0001.jsonl") else data[:-9])
    writer.append(record(2))
    with pytest.raises(StorageError, match=r"000001-000000002-0003.jsonl holds something else than was stored just now"):
        writer.flush()
    assert steps(store) == [0, 1, 2]
    store.storage.put_bytes = put
    writer.close()
    assert [key.rpartition("/")[2] for key in chunks(store)] == ["000001-000000002-0003.jsonl"]
    assert steps(store) == [0, 1, 2]


class Merging(FaultyStorage):
    """Its history is merged as soon as it has been listed."""

    writer: HistoryWriter

    def list(self, prefix, *, after=None, splits=None):
        listed = list(self.inner.list(prefix, after=after))
        if prefix == "run/metrics/" and not self.operations:
            self.operations.append(("list", prefix))
            self.writer.close()
        return iter(listed)


def test_a_history_without_the_right_to_delete_is_stored_and_told_once(store, small_chunks, caplog):
    def refuse(keys):
        raise PermissionError("access is refused")

    with mock.patch.object(store.storage, "delete", refuse):
        write(store, 20).close()
    assert steps(store) == list(range(20))
    assert caplog.messages == [
        "small objects of the metric history of run 'run', which is stored, cannot be deleted, and stay: access is refused"
    ]


def test_whoever_reads_while_parts_are_merged_misses_none(store):
    merging = Merging(store.storage)
    merging.writer = write(store, 20)
    assert steps(CheckpointStore.open(merging, "run")) == list(range(20))
    assert merging.operations
    assert len(chunks(store)) == 1


def test_a_chunk_that_is_listed_and_not_there_ends_somewhere(store, caplog):
    write(store, 3)

    class Gone(FaultyStorage):
        def get_bytes(self, key):
            if key.endswith("000000001-0001.jsonl"):
                self.operations.append(("get_bytes", key))
                raise FileNotFoundError(key)
            return self.inner.get_bytes(key)

    gone = Gone(store.storage)
    assert steps(CheckpointStore.open(gone, "run")) == [0, 2]
    assert gone.counts()["get_bytes"] == 2


def test_what_was_read_of_a_long_history_is_dropped_once_it_is_decoded(store):
    """All chunks were held beside their records: twice the memory, of each process that restarts a long training."""
    for number in range(200):
        store.storage.put_bytes(new_chunk(store.layout, 1, number, 1).key, encode_line(number, fields_of(record(number))))
    one, num_held, most_held = threading.Lock(), 0, 0

    def count(change: int) -> None:
        nonlocal num_held, most_held
        with one:
            num_held += change
            most_held = max(most_held, num_held)

    class Data(bytes):
        def __del__(self) -> None:
            count(-1)

    class Reading(WrappedStorage):
        def _do(self, verb, *args, **kwargs):
            data = super()._do(verb, *args, **kwargs)
            if verb != "get_bytes":
                return data
            count(1)
            return Data(data)

    assert steps(CheckpointStore.open(Reading(store.storage), "run")) == list(range(200))
    assert num_held == 0
    assert 0 < most_held <= AT_ONCE


def test_a_torn_chunk_is_left_out_wherever_it_is_torn_and_everything_starts(tmp_path, caplog, capsys):
    """On a storage whose puts are not atomic; what came with a checkpoint is known from its manifest."""
    store = CheckpointStore.open(f"memory://{tmp_path}", "run")
    attempt = Attempt(store)
    for score in (1, 2):
        attempt.session().report({"score": score}, folder(tmp_path / "c", model="x"), step=score)
    ids = list(store.ids())
    writer = HistoryWriter(store, 1)
    for it, step in (("", 0), (ids[0], 1), (ids[1], 2)):
        writer.append(MetricRecord(1, step, {"score": step}, it or None, AT))
    writer.flush()
    (key,) = chunks(store)
    data = store.storage.get_bytes(key)
    whole = [index for index in range(len(data)) if data[index : index + 1] == b"\n"]
    assert len(whole) == 2
    for length in range(len(data)):
        store.storage.put_bytes(key, data[:length])
        caplog.clear()
        first = [0] if length >= whole[0] else []
        assert [it.step for it in read_history(store)] == [*first, 1, 2]
        assert key in caplog.text
        assert [it.checkpoint for it in lost_records(store, list(store.listed()), 2)] in (ids, ids[1:], [])
        assert newest_recorded(store) == (ids[0] if length >= whole[1] else "")
    assert Result.from_storage(f"memory://{tmp_path}", "run").metrics == {"score": 2}
    assert run(["show", f"memory://{tmp_path}", "run"]) == 0
    assert "3 reports" in capsys.readouterr().out
    assert "line 3 of " in caplog.text
    claim_attempt(store, Owner.current(), world_size=1)


def test_a_flipped_bit_in_a_line_leaves_out_that_line_alone_and_names_it(store, caplog):
    write(store, 3, per_flush=3)
    (key,) = chunks(store)
    data = store.storage.get_bytes(key)
    place = data.index(b'"loss":0.5')
    store.storage.put_bytes(key, data[: place + 9] + b"7" + data[place + 10 :])
    with caplog.at_level(logging.WARNING):
        assert steps(store) == [0, 2]
    assert f"line 2 of memory/{key} does not match its own digest" in caplog.text


@given(
    st.sampled_from(["format", "number", "attempt", "step", "metrics", "checkpoint", "reported_at", "is_logged", "new"]),
    st.sampled_from(
        [
            *(..., 0, 1, 2, -1, True, 1.0, 2**63, 10**6, 10**18, "x", None, [], {}, {"a": 1}, {"a": True, "b": None, "c": 0.5}),
            *({"a": "x"}, {"a": []}, {"a": {"__float__": "nan"}}, {"__float__": "nan"}, {"a": {"b": 1}}),
        ]
    ),
)
def test_many_lines_at_once_are_read_as_each_of_them(field, value):
    """Whatever is in a field of one, with a digest that fits; ... for no such field."""
    fields = {**fields_of(record(1)), "format": 1, "number": 1, field: value}
    check_reading([encode_line(0, fields_of(record(0))), seal({key: it for key, it in fields.items() if it is not ...})])


@pytest.mark.parametrize("at", ["2026-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "now", None])
def test_a_time_that_some_zone_does_not_have_is_left_out_alone(at):
    """Else a command that shows how long ago it was ends in a traceback."""
    line = seal({**fields_of(record(1)), "format": 1, "number": 1, "reported_at": at})
    assert len(check_reading([encode_line(0, fields_of(record(0))), line])) == 1


@pytest.mark.parametrize(
    "body", ["1,2", '{"format":1},{"format":1}', "[1", "1]", "", "NaN", '{"format":1,"number":1e999}', "\xe9"]
)
def test_a_line_that_holds_no_value_or_two_is_left_out_alone(body):
    digest = xxhash.xxh3_128_hexdigest(body.encode("latin-1"))
    line = f'{{"body":{body},"digest":"{digest}"}}'.encode("latin-1")
    assert len(check_reading([encode_line(0, fields_of(record(0))), line])) == 1


def check_reading(lines):
    store = CheckpointStore.open(MemoryStorage(), "run")
    chunk = new_chunk(store.layout, 1, len(lines) - 1, len(lines))
    store.storage.put_bytes(chunk.key, b"\n".join(lines))
    found = read_chunk(store.storage, chunk, MetricRecord)
    with mock.patch.object(chunks_module, "_quick", return_value=None):
        each = read_chunk(store.storage, chunk, MetricRecord)
    assert repr(found) == repr(each), "NaN differs from itself"
    return found


@pytest.mark.parametrize("junk", [b"", b"\xff\x00\n\n", b"null", b"[" * 100_000, b'{"body":{"format":2}}', b"{}\n" * 5000])
def test_junk_in_the_place_of_chunks_is_one_warning_each(store, caplog, junk):
    write(store, 3)
    for name in ("000001-000000003-0001.jsonl", "000001-000000.jsonl", "notes.txt", "1-2.jsonl"):
        store.storage.put_bytes(f"{store.layout.metrics}{name}", junk)
    with caplog.at_level(logging.WARNING):
        assert steps(store) == [0, 1, 2]
    assert len(caplog.records) == 4
    assert newest_recorded(store) == record(2).checkpoint


def test_a_history_of_version_0_1_goes_on_in_new_attempts(store):
    metrics = b'"metrics": {"loss": {"__float__": "nan"}}, "checkpoint": null, '
    line = b'{"attempt": 1, "step": %d, ' + metrics + b'"reported_at": "2026-01-01T00:00:00+00:00", "is_logged": false}'
    for chunk, count in ((0, 1000), (1, 3)):
        lines = b"\n".join(line % (1000 * chunk + step) for step in range(count))
        store.storage.put_bytes(f"{store.layout.metrics}000001-{chunk:06d}.jsonl", lines)
    writer = HistoryWriter(store, 2)
    for step in range(1003, 1010):
        writer.append(replace(record(step), attempt=2))
        writer.flush()
    assert steps(store) == list(range(1010))


def test_a_dead_process_writes_no_more(small_chunks):
    """The crash of a merge is one in the middle of the run: the next attempt begins with numbers of its own."""
    faulty = FaultyStorage(MemoryStorage(), 4, torn=True)
    with pytest.raises(Crash):
        write(open_run(faulty), 5)
    assert faulty.fired == 1
    store = open_run(faulty.inner)
    after = HistoryWriter(store, 2)
    after.append(replace(record(5), attempt=2))
    after.close()
    assert steps(store) == [0, 1, 2, 5]


def test_while_some_of_the_lost_reports_are_unstored_none_after_them_count_as_stored(small_chunks):
    class FailsAtTheSecondChunk(MemoryStorage):
        def put_bytes(self, key, data):
            if next(self.list("run/metrics/"), None) is not None:
                raise StorageError("no answer")
            super().put_bytes(key, data)

    lost = [record(step) for step in range(7)]
    writer = HistoryWriter(CheckpointStore.open(FailsAtTheSecondChunk(), "run"), 2, lost[-1].checkpoint, lost)
    with pytest.raises(StorageError, match="no answer"):
        writer.flush()
    assert writer.recorded == lost[5].checkpoint


def test_reports_that_an_earlier_leader_lost_make_none_that_came_after_them_count_as_unstored(store, tmp_path):
    """The leader of the first of three attempts was killed; its last checkpoint stays, and a prune has to delete newer ones."""
    first = Attempt(store)
    for step in range(2):
        first.session().report({}, folder(tmp_path / "c", model="x"), step=step)
    (lost,) = lost_records(store, store.listed()[1:], 2)
    second = Attempt(store)
    second.session().report({}, folder(tmp_path / "c", model="x"), step=2)
    newest = store.listed()[-1].id
    writer = HistoryWriter(store, 2, lost.checkpoint, [lost])
    writer.append(replace(lost, attempt=2, step=2, checkpoint=newest))
    writer.flush()
    left = lost_records(store, store.listed(), 3)
    assert lost in left
    third = HistoryWriter(store, 3, newest, left)
    assert third.recorded is None
    third.flush()
    assert third.recorded == newest == newest_recorded(store)
