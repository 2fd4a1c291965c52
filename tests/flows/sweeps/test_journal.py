"""The journal of a sweep, with crashes at every storage operation, and two writers."""

import json
import math
import re
import tracemalloc

import pytest
from crash_points import crash_points
from memory_storage import MemoryStorage
from prefect_torch.ckpt import FencedError, StorageError, StorageSpec
from prefect_torch.ckpt.runs.attempts.attempt import claim_key
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.records import seal
from prefect_torch.ckpt.storage.retry import RetryingStorage
from prefect_torch.flows.sweeps.journal import journal as journals
from prefect_torch.flows.sweeps.journal.history import RungReport, TrialRecord
from prefect_torch.flows.sweeps.journal.journal import (
    Journal,
    JournalDamagedError,
    LostEntries,
    list_parts,
    read_journal,
    read_known_entries,
)
from prefect_torch.flows.sweeps.journal.stored_trials import read_known_trials, read_trials
from stored_sweeps import store_sweep
from wrapped_storage import WrappedStorage


def sweep_in(storage) -> Run:
    return Run(storage, Layout("sweep"), StorageSpec(storage.url))


def lead(run) -> Journal:
    """Claim the sweep, and begin as its leader does."""
    attempt = claim_attempt(run, Owner.current(), world_size=0)
    journal = Journal(run, claim_key(run, attempt), len(read_journal(run)))
    journal.append({"led": attempt.number})
    return journal


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(journals, "MOST_PARTS", 3)
    monkeypatch.setattr(journals, "MOST_ENTRIES", 6)


def numbers(run) -> list[int]:
    return [entry["n"] for entry in read_journal(run) if "n" in entry]


def test_entries_stay_in_order_and_few_objects(small):
    run = sweep_in(MemoryStorage())
    journal = lead(run)
    for number in range(40):
        journal.append({"n": number, "score": float("nan")})
    assert numbers(run) == list(range(40))
    assert len(list_parts(run)) <= 40 // 6 + 3


def test_a_journal_without_the_right_to_delete_is_stored_and_told_once(small, caplog):
    class Refusing(MemoryStorage):
        def delete(self, keys):
            if any("/journal/" in key for key in keys):
                raise PermissionError("access is refused")
            super().delete(keys)

    run = sweep_in(Refusing())
    journal = lead(run)
    for number in range(40):
        journal.append({"n": number})
    assert numbers(run) == list(range(40))
    assert caplog.messages == [
        "small objects of the journal of sweep 'sweep', which is stored, cannot be deleted, and stay: access is refused"
    ]


def test_a_journal_whose_merged_object_is_not_what_was_stored_keeps_its_parts(small):
    class Changing(MemoryStorage):
        def get_bytes(self, key):
            return super().get_bytes(key) + (b"?" if key.endswith("000003.jsonl") else b"")

    storage = Changing()
    journal = lead(sweep_in(storage))
    journal.append({"n": 0})
    with pytest.raises(StorageError, match=r"000003\.jsonl holds something else than was stored just now$"):
        journal.append({"n": 1})
    assert sum(part.count for part in list_parts(sweep_in(storage))) == 6


def test_a_crash_at_any_operation_loses_no_entry_that_was_appended_and_invents_none(small):
    inner = MemoryStorage()
    appended = []

    def fresh(number, way):
        nonlocal inner
        inner, appended[:] = MemoryStorage(), []
        return inner

    def write(storage):
        journal = lead(sweep_in(storage))
        for number in range(8):
            journal.append({"n": number})
            appended.append(number)

    seen = 0
    for faulty in crash_points(fresh, write):
        seen += 1
        known = numbers(sweep_in(faulty.inner))
        assert known in (appended, [*appended, len(appended)])
        journal = lead(sweep_in(faulty.inner))
        journal.append({"n": 100})
        assert numbers(sweep_in(faulty.inner)) == [*known, 100]
    assert seen > 50


def test_an_overtaken_leader_can_append_nothing(small):
    run = sweep_in(MemoryStorage())
    first = lead(run)
    first.append({"n": 0})
    second = lead(run)
    with pytest.raises(FencedError):
        first.append({"n": 1})
    assert numbers(run) == [0]
    second.append({"n": 2})
    assert numbers(run) == [0, 2]


def test_what_an_overtaken_leader_wrote_at_the_same_moment_does_not_count():
    storage = MemoryStorage()
    run = sweep_in(storage)
    first = lead(run)
    first.append({"n": 0})

    class Late(WrappedStorage):
        """Stores the first leader's entry only after a second one has begun."""

        def _do(self, verb, *args, **kwargs):
            if verb == "put_bytes":
                second = lead(sweep_in(storage))
                second.append({"n": 2})
            return getattr(storage, verb)(*args, **kwargs)

    first._run = sweep_in(Late(storage))
    first.append({"n": 1})
    assert numbers(run) == [0, 2]


def test_a_missing_entry_is_an_error_and_no_shorter_journal():
    run = sweep_in(MemoryStorage())
    journal = lead(run)
    for number in range(3):
        journal.append({"n": number})
    run.storage.delete([list_parts(run)[1].key])
    with pytest.raises(JournalDamagedError, match="entry 1 of the journal of sweep 'sweep'"):
        read_journal(run)
    entries, lost = read_known_entries(run)
    assert {number: entry.get("n") for number, entry in entries.items()} == {0: None, 2: 1, 3: 2}
    assert lost == LostEntries(1, f"entry 1 of the journal of sweep 'sweep' in {run.storage.url} cannot be read: it is missing")


@pytest.mark.parametrize("name", ["999999999-000001-000002", "999999999-000001-999999"])
def test_the_name_of_an_object_costs_no_memory(name):
    run = sweep_in(MemoryStorage())
    lead(run).append({"n": 0})
    run.storage.put_bytes(f"{run.layout.journal}{name}.jsonl", b"")
    tracemalloc.start()
    try:
        entries, lost = read_known_entries(run)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20
    assert [entry.get("n") for entry in entries.values()] == [None, 0]
    assert lost is not None
    assert (lost.count, lost.first.partition(" of ")[0]) == (10**9 - 2, "entry 2")


def test_an_object_that_would_begin_before_the_first_entry_is_none_of_the_journal(caplog):
    run = sweep_in(MemoryStorage())
    lead(run).append({"n": 0})
    run.storage.put_bytes(f"{run.layout.journal}000000001-000001-000003.jsonl", b"")
    assert numbers(run) == [0]
    assert "000000001-000001-000003.jsonl is no part of a sweep's journal" in caplog.text


@pytest.mark.parametrize("kept", [0, 20, -1])
def test_a_merged_object_without_its_end_is_an_error_and_no_shorter_journal(small, kept):
    run = sweep_in(MemoryStorage())
    journal = lead(run)
    for number in range(2):
        journal.append({"n": number})
    (merged,) = list_parts(run)
    run.storage.put_bytes(merged.key, run.storage.get_bytes(merged.key)[:kept])
    with pytest.raises(JournalDamagedError, match="of the journal of sweep 'sweep'"):
        read_journal(run)


@pytest.mark.parametrize("came", [0, 40])
def test_a_last_entry_that_a_gateway_cuts_off_for_a_while_is_no_torn_one(came):
    inner = MemoryStorage()
    journal = lead(sweep_in(inner))
    for number in range(3):
        journal.append({"n": number})
    last = list_parts(sweep_in(inner))[-1].key

    class CutsOff(WrappedStorage):
        left = 5

        def get_bytes(self, key):
            data = self.inner.get_bytes(key)
            if key != last or not self.left:
                return data
            self.left -= 1
            return data[:came]

    gateway = CutsOff(inner)
    assert numbers(sweep_in(RetryingStorage(lambda: gateway, RetryPolicy(60.0, 0.0, 0.0)))) == [0, 1, 2]
    assert gateway.left == 0
    inner.put_bytes(last, inner.get_bytes(last)[:came])  # what has really been cut off was never appended
    assert numbers(sweep_in(inner)) == [0, 1]


def test_a_merged_object_of_an_overtaken_leader_says_nothing_of_the_entries_after_it(small):
    alone, run = sweep_in(MemoryStorage()), sweep_in(MemoryStorage())
    journal = lead(alone)
    for number in range(2):
        journal.append({"n": number})
    (merged,) = list_parts(alone)
    for _ in range(2):
        lead(run)
    run.storage.put_bytes(merged.key, alone.storage.get_bytes(merged.key))
    assert [entry["led"] for entry in read_journal(run)] == [1, 2]


def test_an_object_with_long_entries_is_not_stored_again_and_again(small, monkeypatch):
    monkeypatch.setattr(journals, "MOST_BYTES", 2000)
    run = sweep_in(MemoryStorage())
    journal = lead(run)
    for number in range(11):
        journal.append({"n": number, "text": "x" * 1000})
    assert numbers(run) == list(range(11))
    assert {part.count for part in list_parts(run)} == {3}


def test_an_entry_with_a_value_that_no_entry_has_is_damaged():
    run = sweep_in(MemoryStorage())
    lead(run)
    body = {"format": 1, "number": 1, "attempt": 1, "entry": {"value": {"__float__": "much"}}}
    run.storage.put_bytes(list_parts(run)[0].key.replace("000000000-", "000000001-"), seal(body))
    run.storage.put_bytes(
        list_parts(run)[0].key.replace("000000000-", "000000002-"), seal({**body, "number": 2, "entry": {"n": 2}})
    )
    with pytest.raises(JournalDamagedError, match=r"entry 1 of the journal .*'much' is no float"):
        read_journal(run)


def test_an_event_of_a_trial_that_was_not_started_is_an_error(tmp_path):
    run, _ = store_sweep(str(tmp_path))
    whole = read_trials(run)
    start = next(part for part in list_parts(run) if b"TrialStarted" in run.storage.get_bytes(part.key))
    body = json.loads(run.storage.get_bytes(start.key))["body"]
    number = body["entry"]["trial"]
    run.storage.put_bytes(start.key, seal({**body, "entry": {**body["entry"], "trial": 7}}))  # as another sweep's
    with pytest.raises(JournalDamagedError, match=f"mentions trial {number} before its start"):
        read_trials(run)
    known, lost = read_known_trials(run)
    assert (known.keys(), lost) == ({7, *whole} - {number}, None)


@pytest.mark.parametrize(("change", "problem"), [({"run": "x"}, "run: .*'digits/x'"), ({"config": 3}, "config: ")])
def test_a_malformed_event_hides_no_other_and_a_start_names_its_object(tmp_path, change, problem):
    run, _ = store_sweep(str(tmp_path))
    whole = read_trials(run)
    start = list_parts(run)[3]
    body = json.loads(run.storage.get_bytes(start.key))["body"]
    run.storage.put_bytes(start.key, seal({**body, "entry": {**body["entry"], **change}}))
    with pytest.raises(JournalDamagedError, match=rf"^entry 3 .* is not a TrialStarted: {problem}.*/{start.key}\)"):
        read_trials(run)
    known, lost = read_known_trials(run)
    assert known == {number: trial for number, trial in whole.items() if number != body["entry"]["trial"]}
    assert re.match(r"1 of the journal's entries cannot be read, .* the first: entry 3 of the journal", lost)


def test_trials_are_known_without_an_entry_that_is_lost(tmp_path):
    run, _ = store_sweep(str(tmp_path))
    whole = read_trials(run)
    assert read_known_trials(run) == (whole, None)
    of_start, of_end = list_parts(run)[2], list_parts(run)[6]
    run.storage.put_bytes(of_start.key, run.storage.get_bytes(of_start.key).replace(b"lr", b"rl"))
    run.storage.delete([of_end.key])
    known, lost = read_known_trials(run)
    assert {**known, 1: whole[1]} == {**whole, 0: known[0]}
    assert (known[0].state, 1 in known) == ("running", False)
    assert re.match(r"2 of the journal's entries cannot be read, so .* the first: entry 2 of the journal .*000000002-", lost)


NAN = math.nan


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, 2], [1, 2]),
        ([1, 2, NAN, 3, NAN, 2], [1, NAN, NAN, 2]),
        ([1, 2, NAN, NAN], [1, 2, NAN, NAN]),
        ([2, NAN, 1, 2, 0], [NAN, 0]),
        ([NAN, NAN, 1], [NAN, NAN, 1]),
    ],
    ids=range(6),
)
def test_a_report_replaces_those_that_a_restart_has_taken_back_but_none_without_a_time(times, kept):
    trial = TrialRecord(0, "sweep/trial-0000", {}, 0)
    for time in times:
        trial = trial.with_report(RungReport(time, 0.5))
    assert repr([report.time for report in trial.reports]) == repr(kept)


def test_a_report_is_compared_with_those_that_it_replaces_not_with_thousands(monkeypatch):
    compared, is_repeated_by = [], RungReport.is_repeated_by
    monkeypatch.setattr(RungReport, "is_repeated_by", lambda it, later: compared.append(it) or is_repeated_by(it, later))
    trial = TrialRecord(0, "sweep/trial-0000", {}, 0, reports=tuple(RungReport(time, 0.5) for time in range(5000)))
    assert len(trial.with_report(RungReport(5000, 0.5)).reports) == 5001
    assert len(compared) == 1
