"""The checkpoint that an attempt starts from."""

import errno
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from commits import commit
from memory_storage import MemoryStorage
from prefect.logging import disable_run_logger
from prefect_torch.ckpt import CheckpointCorruptError, CheckpointNotFoundError, CheckpointStore, RetentionPolicy, StorageSpec
from prefect_torch.ckpt.reporting.decisions import Verdict
from prefect_torch.ckpt.reporting.events import CommitEvent, DecisionRequest, EventSender, ReportEvent
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_key, newest_attempt, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import MetricRecord, newest_recorded, read_history
from prefect_torch.ckpt.runs.index import writer
from prefect_torch.ckpt.runs.index.segments import read_index
from prefect_torch.ckpt.runs.index.writer import IndexWriter
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.storage.retry import LoginError
from prefect_torch.ckpt.text import utc_now
from prefect_torch.tasks import RunConfig
from prefect_torch.tasks.gang.gang import Gang
from prefect_torch.tasks.gang.gang_run import GangRun
from prefect_torch.tasks.gang.termination import Termination
from prefect_torch.tasks.gang.watch import RankWatch
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.training import retention_schedule
from prefect_torch.tasks.training.attempt_leader import AttemptLeader
from prefect_torch.tasks.training.backoff import FIRST_PAUSE_S
from prefect_torch.tasks.training.leadership import lineage_of
from prefect_torch.tasks.training.recorder import RunRecorder
from prefect_torch.tasks.training.start import choose_start, claim
from ranks import Attempt, folder
from small_disk import mounted
from wrapped_storage import WrappedStorage

CLAIM = "run/attempts/000001-00000000.json"  # that nobody looks for


@pytest.fixture
def seed(tmp_path):
    """The checkpoint of another run, and its file."""
    store = CheckpointStore.open(tmp_path / "store", "seed")
    Attempt(store).session().report({}, folder(tmp_path / "c", model="good"))
    (manifest,) = store.list()
    return CheckpointRef(store.spec, "seed", manifest.id), store.storage.local_path(store.layout.data(manifest.id, "model"))


def start_from(initial, storage=None, decisions=None, **run_config):
    storage = storage or initial.storage
    store = CheckpointStore.open(storage, "run")
    attempt = claim_attempt(store, Owner.current(), world_size=1, lineage=1)
    job = SimpleNamespace(
        initial_checkpoint=initial, run_config=RunConfig(**run_config), storage=storage, run="run", decisions=decisions
    )
    with disable_run_logger():
        return choose_start(store, job, attempt, SimpleNamespace(notify=lambda event: None))


@pytest.mark.parametrize("takeover", [False, True])
def test_task_runs_that_a_process_left_are_ended_unless_another_flow_run_is_taken_over_that_may_live(
    tmp_path, monkeypatch, takeover
):
    store, ended = CheckpointStore.open(tmp_path, "run"), []
    monkeypatch.setattr("prefect_torch.tasks.training.start.end_left_task_runs", lambda it, *_: ended.append(it.number))
    monkeypatch.setattr("prefect_torch.tasks.training.liveness.has_flow_run_ended", lambda flow_run_id: True)
    job = SimpleNamespace(
        initial_checkpoint=None,
        run_config=RunConfig(storage=str(tmp_path), takeover=takeover),
        restarted=(),
        scaling=SimpleNamespace(most_workers=1, cluster=None),
        policy=RetentionPolicy(),
    )
    one, other, third = (Owner.current(f"0b1c2d3e-0000-4000-8000-00000000000{number}") for number in (1, 2, 3))
    for owner in (replace(one, host="elsewhere/boot"), other, replace(other, started=0), third):
        with disable_run_logger():
            claim(store, job, SimpleNamespace(owner=owner, refuse_if_used_up=lambda store: None))
    assert ended == ([2, 3] if takeover else [1, 2, 3])


def test_a_run_without_a_readable_claim_goes_on_unless_a_fresh_start_is_asked_for(seed):
    initial, _ = seed
    store = CheckpointStore.open(initial.storage, "seed")
    (claim,) = store.storage.list(store.layout.attempts)
    store.storage.put_bytes(claim.key, b"")  # as a power cut may leave it
    assert newest_attempt(store) is None
    assert lineage_of(None, RunConfig(resume="never"), ()) is None
    attempt = claim_attempt(store, Owner.current(), world_size=1, lineage=lineage_of(None, RunConfig(), ()))
    assert choose_checkpoint(store, lineage=attempt.lineage, verify="digest").id == initial.checkpoint_id


def test_a_run_without_checkpoints_starts_from_the_initial_one(seed):
    initial, _ = seed
    start = start_from(initial)
    assert start.restored == initial
    assert start.own is None
    assert start.path.endswith(f"/seed/checkpoints/{initial.checkpoint_id}")
    assert newest_attempt(CheckpointStore.open(initial.storage, "run")).resumed_from == start.path


def test_what_must_resume_begins_nowhere_without_a_checkpoint(seed, tmp_path):
    initial, _ = seed
    assert start_from(initial, resume="must").restored == initial
    nothing = r"run 'run' in .*elsewhere has no checkpoint to resume from.*, or give resume='auto'$"
    with pytest.raises(CheckpointNotFoundError, match=nothing):
        start_from(None, CheckpointStore.open(tmp_path / "elsewhere", "run").spec, resume="must")
    assert start_from(None, CheckpointStore.open(tmp_path / "elsewhere", "run").spec).restored is None


def test_a_missing_initial_checkpoint_is_one_of_a_run_that_does_not_exist_or_one_that_the_run_does_not_have(seed):
    initial, _ = seed
    missing = r"^there is no run 'nope' in .*store, so it has no checkpoint 000001-.*: correct the name or the storage"
    with pytest.raises(CheckpointNotFoundError, match=missing):
        start_from(replace(initial, run="nope"))
    with pytest.raises(CheckpointNotFoundError, match=r"^run 'seed' in .*store has no checkpoint 000009-00000009-00000000"):
        start_from(replace(initial, checkpoint_id="000009-00000009-00000000"))


@pytest.mark.parametrize("damage", ["evil", "long one"])
def test_an_initial_checkpoint_is_verified_before_any_rank_starts(seed, damage):
    initial, file = seed
    file.write_text(damage)
    with pytest.raises(CheckpointCorruptError, match="model"):
        start_from(initial)
    assert pinned(initial) == frozenset()  # as no later start would remove it


def test_an_initial_checkpoint_is_trusted_where_that_is_asked_for(seed):
    initial, file = seed
    file.write_text("evil")
    assert start_from(initial, verify="none").restored == initial


def pinned(initial):
    return CheckpointStore.open(initial.storage, initial.run).pinned()


def test_an_initial_checkpoint_is_pinned_until_the_run_has_one_of_its_own(seed, tmp_path):
    initial, _ = seed
    start = start_from(initial)
    again = start_from(initial)  # as after a kill
    assert pinned(initial) == {initial.checkpoint_id}
    with disable_run_logger():
        start.source_pin.remove()
    assert pinned(initial) == frozenset()
    with disable_run_logger():
        again.source_pin.set(CheckpointStore.open(initial.storage, initial.run))
    Attempt(CheckpointStore.open(initial.storage, "run")).session().report({}, folder(tmp_path / "c", model="own"))
    start = start_from(initial)  # after an attempt that was killed right after its first commit
    assert start.own is not None
    with disable_run_logger():
        start.source_pin.remove()
    assert pinned(initial) == frozenset()


def test_a_run_with_a_checkpoint_starts_without_a_request_to_the_storage_of_the_initial_one(seed, tmp_path, monkeypatch):
    initial, _ = seed
    away = CheckpointStore.open(tmp_path / "away", "seed").spec
    own = CheckpointStore.open(initial.storage, "run")
    Attempt(own).session().report({}, folder(tmp_path / "c", model="own"))

    def refuse(store, *_):
        raise AssertionError(f"a request to {store.storage.url}")

    monkeypatch.setattr(CheckpointStore, "pin", refuse)
    monkeypatch.setattr(CheckpointStore, "unpin", refuse)
    assert start_from(replace(initial, storage=away), own.spec).own == own.latest()


def test_a_login_for_the_storage_of_the_initial_checkpoint_that_fails_meanwhile_ends_no_training_that_has_its_own(
    seed, tmp_path, monkeypatch, caplog
):
    initial, _ = seed
    away = CheckpointStore.open(tmp_path / "away", "seed").spec
    own = CheckpointStore.open(initial.storage, "run")
    Attempt(own).session().report({}, folder(tmp_path / "c", model="own"))
    opened, open_run = [], CheckpointStore.open

    def fail_away(storage, *args, **options):
        opened.append(storage)
        if storage == away:
            raise LoginError("the session has expired")
        return open_run(storage, *args, **options)

    monkeypatch.setattr(CheckpointStore, "open", fail_away)
    monkeypatch.setattr("prefect_torch.tasks.training.source_pin.get_run_logger", lambda: logging.getLogger("run"))
    start = start_from(replace(initial, storage=away), own.spec)
    assert (start.own, opened) == (own.latest(), [own.spec])
    start.source_pin.remove()
    unpin = f"prefect-torch unpin {away.url} seed {initial.checkpoint_id}"
    assert f"of run 'seed' stays pinned (the session has expired); `{unpin}` removes its pins" in caplog.text


def test_an_initial_checkpoint_in_the_storage_of_the_run_needs_no_other_client(seed, monkeypatch):
    initial, _ = seed
    opened, open_run = [], CheckpointStore.open
    monkeypatch.setattr(CheckpointStore, "open", lambda *args, **options: (opened.append(args), open_run(*args, **options))[1])
    with disable_run_logger():
        start_from(initial).source_pin.remove()
    assert len(opened) == 1


def test_the_pin_of_a_person_and_of_another_run_stay(seed):
    initial, _ = seed
    source = CheckpointStore.open(initial.storage, initial.run)
    source.pin(initial.checkpoint_id)
    with disable_run_logger():
        start_from(initial).source_pin.remove()
    assert pinned(initial) == {initial.checkpoint_id}


def test_a_run_with_the_same_path_on_another_machine_has_a_pin_of_its_own(seed, tmp_path):
    initial, _ = seed
    mounted_here = StorageSpec(str(tmp_path / "mount"))
    pin = start_from(initial, mounted_here).source_pin
    (tmp_path / "mount").rename(tmp_path / "of-one-machine")
    start_from(initial, mounted_here)
    with disable_run_logger():
        pin.remove()
    assert pinned(initial) == {initial.checkpoint_id}


def test_an_attempt_with_another_mount_point_removes_the_pin_of_an_earlier_one(seed, tmp_path):
    initial, _ = seed
    start_from(initial, StorageSpec(str(tmp_path / "mount")))
    (tmp_path / "mount").rename(tmp_path / "elsewhere")
    with disable_run_logger():
        start_from(initial, StorageSpec(str(tmp_path / "elsewhere"))).source_pin.remove()
    assert pinned(initial) == frozenset()


def test_a_sweep_pins_what_its_trials_start_from(seed):
    initial, _ = seed
    assert start_from(initial, decisions=object()).source_pin is None
    assert pinned(initial) == frozenset()


def test_an_initial_checkpoint_that_cannot_be_written_to_is_started_from(seed, monkeypatch):
    def refuse(*_):
        raise PermissionError("read-only")

    initial, _ = seed
    monkeypatch.setattr(CheckpointStore, "pin", refuse)
    monkeypatch.setattr(CheckpointStore, "unpin", refuse)
    start = start_from(initial)
    assert start.restored == initial
    start.source_pin.remove()


def test_the_leader_renews_its_claim_each_day(tmp_path, monkeypatch):
    store = CheckpointStore.open(tmp_path, "run")
    attempt = claim_attempt(store, Owner.current(), world_size=1)
    claim = tmp_path / store.layout.attempt(attempt.number, attempt.token)
    job = SimpleNamespace(policy=RetentionPolicy(), decisions=None)
    with disable_run_logger():
        recorder = RunRecorder(store, job, claim_key(store, attempt), None, SimpleNamespace(notify=lambda event: None))
        os.utime(claim, (0, 0))
        recorder.poll()
        monkeypatch.setattr("prefect_torch.ckpt.runs.attempts.claims._RENEWED_AFTER_S", 0)
        recorder.poll()
        recorder.close()
    assert claim.stat().st_mtime > 0


@pytest.mark.parametrize(("ending", "is_due"), [(None, True), ("failed", True), ("completed", False), ("stopped", False)])
def test_what_an_attempt_that_was_killed_has_left_is_looked_for_by_the_next(tmp_path, monkeypatch, ending, is_due):
    store = CheckpointStore.open(tmp_path / "store", "run")
    asked = []

    def submit(*_, garbage, **__):
        asked.append(garbage)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(retention_schedule, "prune_checkpoints", SimpleNamespace(submit=submit))
    job = SimpleNamespace(store=store, run="run", policy=RetentionPolicy(), decisions=None)
    Attempt(store).session().report({}, folder(tmp_path / "c", model="x"))
    if ending is not None:
        write_outcome(store, Outcome(1, ending))
    second = Attempt(store)
    with disable_run_logger():
        recorder = RunRecorder(store, job, second.claim, second.restored.manifest, SimpleNamespace(notify=id))
        recorder.close()
        recorder.prune(may_go_on=False)
    assert asked == [True] * is_due


def test_the_leader_is_told_of_the_first_commit_once(tmp_path):
    store = CheckpointStore.open(tmp_path, "run")
    job = SimpleNamespace(policy=RetentionPolicy(), decisions=None)
    with disable_run_logger():
        recorder = RunRecorder(store, job, CLAIM, None, SimpleNamespace(notify=lambda event: None))
        told = []
        recorder.on_first_commit = lambda: told.append(recorder.newest)
        for step in range(2):
            recorder.record(CommitEvent(f"000001-{step:08d}-00000000", step, {}, 1, 0.1))
        recorder._writer.shutdown()
    assert len(told) == 1


def test_a_repair_of_the_index_that_is_under_way_at_the_end_is_left_to_the_next_attempt(tmp_path, monkeypatch, caplog):
    repairs, is_closing = [], threading.Event()

    def repair(_, listed):
        repairs.append(listed)
        assert is_closing.wait(60)
        return True

    monkeypatch.setattr(IndexWriter, "repair", repair)
    monkeypatch.setattr("prefect_torch.tasks.training.recorder.get_run_logger", lambda: logging.getLogger("run"))
    job = SimpleNamespace(policy=RetentionPolicy(), decisions=None)
    with disable_run_logger():
        recorder = RunRecorder(
            CheckpointStore.open(tmp_path, "run"), job, CLAIM, None, SimpleNamespace(notify=lambda event: None)
        )
        submit = recorder._submit

        def submit_last(*args):
            submitted = submit(*args)
            is_closing.set()
            return submitted

        monkeypatch.setattr(recorder, "_submit", submit_last)
        recorder.close()
    assert len(repairs) == 1
    assert not caplog.records


def test_a_report_that_a_killed_leader_lost_is_not_newer_than_those_of_later_attempts(tmp_path):
    store = CheckpointStore.open(tmp_path / "store", "run")
    job = SimpleNamespace(policy=RetentionPolicy(), decisions=object())
    asked = []

    def lead(attempt):
        recorder = RunRecorder(store, job, attempt.claim, attempt.restored.manifest, SimpleNamespace(notify=id))
        recorder.on_request = asked.append
        return recorder

    def losses(value):
        return {"loss": value, "val": {"loss": value}}

    Attempt(store).session().report(losses(1), folder(tmp_path / "c", model="x"), step=1)
    second = Attempt(store)
    with disable_run_logger():
        recorder = lead(second)
        second.session().report(losses(2), folder(tmp_path / "c", model="x"), step=2)
        recorder.record(ReportEvent(MetricRecord(2, 2, losses(2), store.listed()[-1].id, utc_now())))
        recorder.close()
        recorder = lead(Attempt(store))
        recorder.record(DecisionRequest(0, 3, 3, {"loss": 3, "val": {"time": 3}}, None))
        recorder.record(ReportEvent(MetricRecord(3, 3, {"val": {"time": 4}}, None, utc_now())))
        recorder.record(DecisionRequest(0, 4, 4, {"loss": 4}, None))
        recorder.close()
    assert [request.newest for request in asked] == [
        {"loss": 3, "val": {"loss": 2, "time": 3}},
        {"loss": 4, "val": {"loss": 2, "time": 4}},
    ]


def test_ranks_that_wait_for_a_decision_do_not_hang(tmp_path):
    """A sweep that is started again may take minutes to answer."""
    now_s, is_decided, key_value = [0.0], threading.Event(), MemoryKeyValue()
    job = SimpleNamespace(policy=RetentionPolicy(), decisions=None)
    gang = Gang([], None)
    gang.watch = RankWatch([0], 5.0, lambda: now_s[0])

    def problem_after(seconds):
        for _ in range(seconds):
            now_s[0] += 1
            run._advance()
            gang.watch.record_heartbeats({0: int(now_s[0])})
        return gang.watch.problem([0])

    with disable_run_logger():
        recorder = RunRecorder(
            CheckpointStore.open(tmp_path, "run"), job, CLAIM, None, SimpleNamespace(notify=lambda event: None)
        )
        recorder.on_request = lambda _: is_decided.wait()
        run = GangRun(gang, key_value, recorder, Termination(0.0))
        EventSender(key_value).send(DecisionRequest(1, 1, 1, {}, None))
        try:
            assert problem_after(9) is None
        finally:
            is_decided.set()
            recorder.close()
        assert "no report came for 5 s" in str(problem_after(6))


def test_an_attempt_is_known_to_be_stopped_before_its_ranks_are_told():
    """They may end at once, and it would count as completed, or as failed."""
    decisions, known = SimpleNamespace(decide=lambda _: Verdict(goes_on=False)), []
    leader = AttemptLeader(SimpleNamespace(decisions=decisions, store=None), *[None] * 5)

    class Noting(MemoryKeyValue):
        def set(self, key, value):
            known.append(leader._is_stopped)
            super().set(key, value)

    leader._decide(Noting(), DecisionRequest(0, 1, 1, {}, None))
    assert known == [True]


def test_a_commit_during_a_write_of_the_index_is_in_the_next(monkeypatch):
    monkeypatch.setattr(writer, "FEW", 4)
    is_read, may_be_read = threading.Event(), threading.Event()

    class SlowManifests(WrappedStorage):
        def get_bytes(self, key):
            if "/manifests/" in key:
                is_read.set()
                assert may_be_read.wait(60)
            return self.inner.get_bytes(key)

    store = CheckpointStore.open(MemoryStorage(), "run")
    job = SimpleNamespace(policy=RetentionPolicy(), decisions=None)
    slow = CheckpointStore.open(SlowManifests(store.storage), "run")
    with disable_run_logger():
        recorder = RunRecorder(slow, job, CLAIM, None, SimpleNamespace(notify=lambda event: None))
        for step in range(8):
            assert step != 4 or is_read.wait(60)
            recorder.record(CommitEvent(commit(store, step).id, step, {}, 1, 0.1))
            if step == 4:
                may_be_read.set()
        recorder.close()
    assert read_index(store.storage, store.layout).keys() == {it.id for it in store.listed()}


def test_a_full_disk_costs_a_warning_in_seconds_and_what_was_reported_is_stored_once_there_is_room(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("prefect_torch.ckpt.runs.history.CHUNK_AGE_S", 0)
    monkeypatch.setattr("prefect_torch.tasks.training.recorder.get_run_logger", lambda: logging.getLogger("run"))
    job = SimpleNamespace(policy=RetentionPolicy(), decisions=None)
    with mounted(tmp_path / "disk") as disk, disable_run_logger():
        store = CheckpointStore.open(disk, "run")
        recorder = RunRecorder(store, job, CLAIM, None, SimpleNamespace(notify=lambda event: None))
        with suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        recorder.record(ReportEvent(MetricRecord(1, 0, {"loss": 1.0}, None, utc_now())))
        until_s = time.monotonic() + FIRST_PAUSE_S / 2
        while time.monotonic() < until_s:
            recorder.poll()
            recorder._flushing.exception()  # returns once it is done
        assert caplog.text.count("the metric history could not be written") == 1
        (disk / "fill").unlink()
        recorder.close()
        assert [record.metrics for record in read_history(store)] == [{"loss": 1.0}]


class _FullUntilPruned(WrappedStorage):
    """A storage that has no room for the metric history until `has_room`."""

    has_room = False
    refused = 0

    def put_bytes(self, key, data):
        if "/metrics/" in key and not self.has_room:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.inner.put_bytes(key, data)


@pytest.mark.parametrize("makes_room", [True, False])
def test_the_last_reports_that_a_full_disk_has_not_taken_are_stored_after_the_last_prune(tmp_path, monkeypatch, makes_room):
    storage = _FullUntilPruned(MemoryStorage())
    store = CheckpointStore.open(storage, "run")
    job = SimpleNamespace(policy=RetentionPolicy(), decisions=None)
    finished = []

    def finish(_, recorded, *, may_go_on):
        storage.has_room = makes_room
        finished.append(recorded)

    monkeypatch.setattr(retention_schedule.RetentionSchedule, "finish", finish)
    with disable_run_logger():
        recorder = RunRecorder(store, job, CLAIM, None, SimpleNamespace(notify=lambda event: None))
        manifest = commit(store, 0)
        recorder.record(ReportEvent(MetricRecord(1, 0, {"loss": 1.0}, manifest.id, utc_now())))
        recorder.close()
        assert storage.refused == 1
        recorder.prune(may_go_on=False)
    assert recorder.lacks_reports is not makes_room
    assert finished == [None, *([manifest.id] if makes_room else [])]
    assert newest_recorded(store) == (manifest.id if makes_room else "")
