"""What a report promises, with ranks as threads."""

import errno
import os
import re
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from crash_points import open_run
from memory_storage import MemoryStorage
from prefect_torch.ckpt import (
    Checkpoint,
    CheckpointStore,
    CommitFailedError,
    PeerGoneError,
    ReportMismatchError,
    RetentionPolicy,
    StorageError,
    TrainContext,
    get_checkpoint,
    get_context,
    log_metrics,
    report,
)
from prefect_torch.ckpt.errors import FencedError, StorageFullError
from prefect_torch.ckpt.files import shared_directory
from prefect_torch.ckpt.files.folder import scan_files
from prefect_torch.ckpt.reporting import rank_part
from prefect_torch.ckpt.reporting.events import CommitEvent
from prefect_torch.ckpt.reporting.rank_part import StagedReport
from prefect_torch.ckpt.reporting.rounds import Rounds
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.machine import mounts
from prefect_torch.ckpt.storage.protocol import RetryPolicy, StorageSpec
from prefect_torch.ckpt.storage.retry import RetryingStorage
from prefect_torch.ckpt.storage.synced.transport import Transport
from prunes import prune_as_leader
from ranks import Attempt, Session, as_rank, folder, read_files
from small_disk import mounted


def test_files_of_all_ranks_become_one_checkpoint(store, tmp_path):
    def train(session, rank):
        session.report({"loss": float(rank)}, folder(tmp_path / str(rank), **{f"model-{rank}.pt": f"of {rank}"}))

    assert Attempt(store, 3).run(train) == [None] * 3
    (manifest,) = store.list()
    assert read_files(store.checkpoint(manifest)) == {f"model-{rank}.pt": f"of {rank}".encode() for rank in range(3)}
    assert [(entry.path, entry.rank) for entry in manifest.files] == [(f"model-{rank}.pt", rank) for rank in range(3)]
    assert manifest.metrics == {"loss": 0.0}
    assert (manifest.world_size, manifest.attempt, manifest.step) == (3, 1, 0)


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_a_directory_whose_files_were_moved_away_is_no_empty_checkpoint(store, tmp_path, upload):
    def train(session, rank):
        with session.lent.lend() as lent:
            directory = lent if upload == "sync" else tmp_path / str(rank)
            checkpoint = folder(directory, **{f"m{rank}": "first"})
            session.report({}, checkpoint, upload=upload)
            with pytest.raises(ValueError, match="is empty, since the last report has moved its files away"):
                session.report({}, checkpoint, upload=upload)

    def train_on(session, rank):
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": "second"}), upload=upload)
        (tmp_path / str(rank) / "new").mkdir()
        session.report({}, Checkpoint.from_directory(tmp_path / str(rank)), upload="sync")  # touched since: it is meant

    assert Attempt(store, 1).run(train) == [None]
    assert Attempt(store, 1).run(train_on) == [None]
    assert len(store.list()) == 3


@pytest.mark.parametrize("reporter", [0, 1])
def test_one_rank_may_bring_all_files(store, tmp_path, reporter):
    def train(session, rank):
        session.report({}, folder(tmp_path / "c", model="x") if rank == reporter else None)
        assert store.latest() is not None  # durable for every rank when its report has returned

    assert Attempt(store, 2).run(train) == [None, None]


@pytest.mark.parametrize("step", [None, 0, 4])
def test_a_training_that_another_run_has_begun_stores_its_first_checkpoint_at_any_step(store, tmp_path, step):
    other = CheckpointStore.open(store.storage, "other")
    Attempt(other).session().report({}, folder(tmp_path / "a", model="x"), step=4)
    attempt = Attempt(store)
    attempt.restored = other.checkpoint(other.latest())
    context = TrainContext(0, 0, 0, 1, 1, store.run, attempt.number)
    session = Session(context, store, attempt.key_value, restored=attempt.restored)
    session.report({}, folder(tmp_path / "b", model="y"), step=step)
    (manifest,) = store.list()
    assert (manifest.step, manifest.parent) == (5 if step is None else step, attempt.restored.path)


def test_steps_count_reports_from_zero_and_on_from_the_restored_checkpoint(store, tmp_path):
    def train(session, rank):
        session.report({})
        session.report({}, folder(tmp_path / "c", model="x"))

    Attempt(store).run(train)
    Attempt(store).run(train)
    assert [(manifest.attempt, manifest.step) for manifest in store.list()] == [(1, 1), (2, 3)]
    assert store.list()[1].parent == store.list()[0].id


@pytest.mark.parametrize("step", [True, -1, 1.5, "3", 10**18])
def test_a_step_that_is_no_step_is_refused_before_anything_happens(store, step):
    session = Attempt(store).session()
    with pytest.raises(ValueError, match="step"):
        session.report({}, step=step)
    session.report({}, step=4)


def test_steps_of_checkpoints_grow(store, tmp_path):
    session = Attempt(store).session()
    checkpoint = folder(tmp_path / "c", model="x")
    session.report({}, checkpoint, step=5)
    with pytest.raises(ValueError, match="step=4 comes before the last checkpoint's step 5"):
        session.report({}, checkpoint, step=4)
    session.report({}, checkpoint, step=6)
    assert [manifest.step for manifest in store.list()] == [5, 6]


def test_steps_may_count_tokens(store, tmp_path):
    steps = [10**8 - 1, 10**8, 10**9 - 1, 10**9, 15 * 10**12]
    checkpoint = folder(tmp_path / "c", model="x")
    for some in (steps[:3], steps[3:]):
        session = Attempt(store).session()
        for step in some:
            session.report({"tokens": step}, checkpoint, step=step)
    assert [manifest.step for manifest in store.list()] == steps
    assert (store.latest().step, Attempt(store).session().restored.step) == (steps[-1], steps[-1])
    prune_as_leader(store, RetentionPolicy(2))
    assert [manifest.step for manifest in store.list()] == steps[-2:]


@pytest.mark.parametrize("first", ["sync", "async"])
@pytest.mark.parametrize("again", ["metrics", "checkpoint", "state", "one rank"])
def test_the_same_step_once_more_is_recorded_and_leaves_its_checkpoint_as_it_is(store, tmp_path, caplog, first, again):
    def train(session, rank):
        session.report({"loss": 2.0}, folder(tmp_path / f"{rank}", **{f"model-{rank}": "x"}), step=5, upload=first)
        other = folder(tmp_path / f"other-{rank}", **{f"model-{rank}": "y"})
        brought = {
            "metrics": {},
            "checkpoint": {"checkpoint": other},
            "state": {"state": {"value": 1}, "upload": "sync"},
            "one rank": {"checkpoint": other} if rank == 1 else {},
        }[again]
        session.report({"final": 1.0}, **brought, step=5)

    for _ in range(2):  # a resume begins with the checkpoint of step 5
        attempt = Attempt(store, 2)
        assert attempt.run(train) == [None, None]
        records = [event.record for event in attempt.events() if hasattr(event, "record")]
        assert [(record.step, record.metrics) for record in records] == [(5, {"loss": 2.0}), (5, {"final": 1.0})]
        assert records[1].checkpoint is None
        (manifest,) = store.list()
        assert (manifest.step, manifest.metrics) == (5, {"loss": 2.0})
        assert read_files(store.checkpoint(manifest)) == {"model-0": b"x", "model-1": b"x"}
        said = [message for message in caplog.messages if "whose checkpoint is stored or under way" in message]
        assert bool(said) == (again != "metrics" or attempt.restored is not None)
        caplog.clear()


@pytest.mark.parametrize("value", ["high", True, {"mean": 1.0}])
@pytest.mark.parametrize("reporting", ["every rank", "rank 0"])
def test_a_score_that_is_no_number_is_refused_on_every_rank_before_anything_happens(store, tmp_path, value, reporting):
    def train(session, rank):
        metrics = {"eval": {"score": value}} if reporting == "every rank" or rank == 0 else {}
        session.report(metrics, folder(tmp_path / f"{rank}", model="x"), step=1)

    errors = Attempt(store, 2, checkpoint_score_attribute="eval/score").run(train)
    assert isinstance(errors[0], ValueError)
    assert isinstance(errors[1], ValueError if reporting == "every rank" else CommitFailedError)
    for error in errors:
        assert f"metric 'eval/score' is {value!r}, a {type(value).__name__}" in str(error)
    assert store.list() == []


def test_a_score_that_is_missing_or_no_number_yet_is_taken_and_so_is_text_under_other_names(store, tmp_path):
    session = Attempt(store, checkpoint_score_attribute="score").session()
    for step, metrics in enumerate([{}, {"score": None}, {"score": float("nan")}, {"score": 1, "note": "high", "done": True}]):
        session.report(metrics, folder(tmp_path / str(step), model="x"), step=step)
    assert len(store.list()) == 4


def test_ranks_that_disagree_on_the_step_all_raise(store, tmp_path):
    errors = Attempt(store, 2).run(lambda session, rank: session.report({}, folder(tmp_path / "c", m="x"), step=rank))
    assert [type(error) for error in errors] == [ReportMismatchError] * 2
    assert "rank 1 reported step 1 but rank 0 reported step 0" in str(errors[0])
    assert store.list() == []


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_reports_less_often_is_named_on_every_rank_within_seconds(store, early):
    def train(session, rank):
        for _ in range(2 if rank == early else 3):
            session.report({})

    attempt = Attempt(store, 2)  # its claim makes directories, and syncs each
    started = time.monotonic()
    errors = attempt.run(train)
    assert time.monotonic() - started < 5
    assert isinstance(errors[1 - early], ReportMismatchError)
    assert f"rank {early} returned after 2 reports" in str(errors[1 - early])
    assert isinstance(errors[early], (ReportMismatchError, PeerGoneError))


def test_a_rank_that_fails_is_named_on_every_rank(store, tmp_path):
    def train(session, rank):
        if rank == 1:
            raise ZeroDivisionError("by zero")
        session.report({}, folder(tmp_path / "c", model="x"))

    errors = Attempt(store, 3).run(train)
    assert isinstance(errors[1], ZeroDivisionError)
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerGoneError)
        assert "rank 1 failed after 0 reports (ZeroDivisionError: by zero)" in str(errors[rank])
    assert store.list() == []


def test_equal_files_of_two_ranks_are_stored_once(store, tmp_path):
    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), config="same", **{f"m{rank}": "x"}))

    assert Attempt(store, 2).run(train) == [None, None]
    assert [(entry.path, entry.rank) for entry in store.list()[0].files] == [("config", 0), ("m0", 0), ("m1", 1)]


def test_different_files_of_one_name_fail_on_every_rank_and_name_both(store, tmp_path):
    errors = Attempt(store, 3).run(lambda session, rank: session.report({}, folder(tmp_path / str(rank), m=str(rank))))
    assert [type(error) for error in errors] == [ReportMismatchError] * 3
    assert "rank 0 and rank 1 both reported a file 'm'" in str(errors[2])
    assert store.list() == []


def test_bad_metrics_are_refused_before_anything_is_stored(store, tmp_path):
    session = Attempt(store).session()
    with pytest.raises(ValueError, match="metric 'history'"):
        session.report({"history": [1]}, folder(tmp_path / "c", model="x"))
    session.report({"loss": 1})
    assert store.list() == []


def test_a_folder_that_does_not_exist_is_not_found(store, tmp_path):
    session = Attempt(store).session()
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        session.report({}, Checkpoint.from_directory(tmp_path / "missing"))
    (tmp_path / "model.pt").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"/model.pt is a file: give its directory"):
        session.report({}, Checkpoint.from_directory(tmp_path / "model.pt"))


def test_an_empty_folder_is_a_checkpoint(store, tmp_path):
    Attempt(store).session().report({"loss": 1}, folder(tmp_path / "c"))
    assert store.list()[0].files == ()
    assert read_files(store.checkpoint(store.list()[0])) == {}


def test_a_checkpoint_without_a_file_is_warned_of_once(store, tmp_path, caplog):
    session = Attempt(store).session()
    empty = folder(tmp_path / "empty")
    session.report({}, folder(tmp_path / "c", model="x"))
    empty.set_metadata({"position": 3})
    session.report({}, empty)  # a checkpoint may be its metadata
    assert caplog.messages == []
    empty.set_metadata({})
    session.report({}, empty)
    session.report({}, empty)
    assert [message.partition(",")[0] for message in caplog.messages] == ["the checkpoint of step 2 is empty"]


def test_a_sync_report_leaves_the_folder_as_it_was(store, tmp_path):
    Attempt(store).session().report({}, folder(tmp_path / "c", model="x"))
    (tmp_path / "c/model").write_bytes(b"y")
    assert read_files(store.checkpoint(store.list()[0])) == {"model": b"x"}


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_ranks_may_report_one_directory_that_they_share(store, tmp_path, upload):
    shared = folder(tmp_path / "shared", **{f"m{number}": str(number) for number in range(20)})
    begin = threading.Barrier(3)

    def train(session, rank):
        begin.wait()
        session.report({}, shared, upload=upload)

    assert Attempt(store, 3).run(train) == [None] * 3
    (manifest,) = store.list()
    store.verify(manifest)
    assert read_files(store.checkpoint(manifest)) == {f"m{number}": str(number).encode() for number in range(20)}


@pytest.mark.parametrize("num_shared", [1, 2])
def test_machines_may_report_one_shared_directory_asynchronously(store, tmp_path, monkeypatch, num_shared):
    """Each machine numbers the directories of a file server on its own, so that they are not known by their numbers."""
    monkeypatch.setattr(mounts, "_OF_ONE_KERNEL", frozenset())
    monkeypatch.setattr(shared_directory, "kernel_id", lambda: threading.current_thread().name)
    files = {f"m{number}": str(number) for number in range(20)}

    def train(session, rank):
        directory = tmp_path / f"shared-{rank % num_shared}"
        for epoch in range(3):
            if rank < num_shared:
                folder(directory, epoch=str(epoch), **files)
            session.report({})  # the files are there
            session.report({}, Checkpoint.from_directory(directory), upload="async")
            session.report({})
            assert list(directory.iterdir()) == []
            session.report({})  # every rank has looked

    assert Attempt(store, 4, nodes=[2, 2]).run(train) == [None] * 4
    assert [read_files(store.checkpoint(it)) for it in store.list()] == [
        {"epoch": str(epoch).encode(), **{name: content.encode() for name, content in files.items()}} for epoch in range(3)
    ]
    assert [path for path in tmp_path.glob("shared-*/**/*") if path.is_file()] == []


def test_a_token_by_which_ranks_know_a_directory_is_no_file_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_OF_ONE_KERNEL", frozenset())
    folder(tmp_path, m="x")
    assert shared_directory.identity_of(tmp_path, "5") == shared_directory.identity_of(tmp_path, "5")
    assert len(list(tmp_path.iterdir())) == 2
    assert scan_files(tmp_path) == ["m"]
    shared_directory.forget_identity(tmp_path, "5")
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


@pytest.mark.parametrize("differing", [{"step": [5, 6]}, {"upload": ["sync", "async"]}])
def test_a_report_on_which_ranks_do_not_agree_leaves_no_token(store, tmp_path, monkeypatch, differing):
    monkeypatch.setattr(mounts, "_OF_ONE_KERNEL", frozenset())
    shared = folder(tmp_path / "shared", m="x")
    begin = threading.Barrier(2)

    def train(session, rank):
        begin.wait()
        session.report({}, shared, **{"upload": "async"} | {name: values[rank] for name, values in differing.items()})

    assert [type(error) for error in Attempt(store, 2).run(train)] == [ReportMismatchError] * 2
    assert list((tmp_path / "shared").iterdir()) == [tmp_path / "shared" / "m"]


def test_what_a_killed_rank_has_left_of_a_token_does_not_stop_the_next_attempt(store, tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_OF_ONE_KERNEL", frozenset())
    shared = folder(tmp_path / "shared", m="x")
    begin = threading.Barrier(2)

    def is_killed(session, rank):
        begin.wait()
        session.report({}, shared, upload="async", step=5 + rank)

    def train(session, rank):
        begin.wait()
        session.report({}, shared, upload="async", step=5)

    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        assert [type(error) for error in Attempt(store, 2).run(is_killed)] == [ReportMismatchError] * 2
    left = [path for path in (tmp_path / "shared").iterdir() if path.name != "m"]
    assert left
    for path in left:
        os.truncate(path, 0)
    assert Attempt(store, 2).run(train) == [None] * 2


def test_a_token_that_cannot_be_written_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_OF_ONE_KERNEL", frozenset())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            shared_directory.identity_of(tmp_path, "5")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_token_may_be_written_as_late_as_a_storage_answers(tmp_path, monkeypatch):
    """Its file server fails over in the middle of it."""
    monkeypatch.setattr(mounts, "_OF_ONE_KERNEL", frozenset())
    shared_directory._token_file(tmp_path, "5").touch()
    now_s = 0.0

    def sleep(_):
        nonlocal now_s
        now_s += 25.0
        if now_s == 100.0:
            shared_directory._token_file(tmp_path, "5").write_text("another rank's")

    monkeypatch.setattr(shared_directory, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    assert shared_directory.identity_of(tmp_path, "5") == "another rank's"
    shared_directory._token_file(tmp_path, "6").touch()
    with pytest.raises(TimeoutError, match="stays empty"):
        shared_directory.identity_of(tmp_path, "6")


def test_a_single_rank_leaves_no_token(store, tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "_OF_ONE_KERNEL", frozenset())
    monkeypatch.setattr("prefect_torch.ckpt.reporting.rank_report.identity_of", lambda *_: pytest.fail("a token"))
    session = Attempt(store).session()
    session.report({}, folder(tmp_path / "c", m="x"), upload="async")
    session.finish()
    assert [it.step for it in store.list()] == [0]


def test_an_async_report_compares_files_of_one_name_though_another_rank_stores_them(store, tmp_path):
    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), same="x", **{f"m{rank}": "y"}), upload="async")
        assert list((tmp_path / str(rank)).iterdir()) == []
        (tmp_path / str(rank) / "same").write_text("written again at once")

    assert Attempt(store, 2).run(train) == [None, None]
    assert read_files(store.checkpoint(store.list()[0])) == {"same": b"x", "m0": b"y", "m1": b"y"}


def test_an_async_report_holds_what_a_file_with_two_names_held(store, tmp_path):
    session = Attempt(store).session()
    checkpoint = folder(tmp_path / "c", model="first")
    os.link(tmp_path / "c/model", tmp_path / "other")
    session.report({}, checkpoint, upload="async")
    (tmp_path / "other").write_text("second")
    session.finish()
    assert read_files(store.checkpoint(store.list()[0])) == {"model": b"first"}


def test_an_async_report_takes_the_files_over_and_is_durable_at_the_end(store, tmp_path):
    def train(session, rank):
        for epoch in range(3):
            session.report({"epoch": epoch}, folder(tmp_path / str(rank), **{f"m{rank}": str(epoch)}), upload="async")
            assert not (tmp_path / str(rank) / f"m{rank}").exists()

    assert Attempt(store, 2).run(train) == [None, None]
    assert [read_files(store.checkpoint(manifest))["m1"] for manifest in store.list()] == [b"0", b"1", b"2"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".prefect-torch-")]


def test_a_failed_async_commit_is_raised_once_by_the_next_report_on_every_rank(store, tmp_path):
    raised = []

    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), m=str(rank)), upload="async")  # different files of one name
        try:
            session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": "x"}), upload="async")
        except ReportMismatchError as exc:
            raised.append((rank, str(exc)))
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": "y"}), upload="async", step=0)

    assert Attempt(store, 2).run(train) == [None, None]
    assert sorted(rank for rank, _ in raised) == [0, 1]
    (manifest,) = store.list()
    assert (manifest.step, manifest.parent) == (0, None)  # as if the failed one had never been


@pytest.fixture
def second_begun(monkeypatch):
    """Returns, called once, a little after both ranks have begun the second report."""
    begun, agree = threading.Semaphore(0), Rounds.agree

    def begin(self, *given, **options):
        begun.release()
        return agree(self, *given, **options)

    def second_begun():
        assert all(begun.acquire(timeout=20) for _ in range(2 * 2))
        time.sleep(0.2)  # there is time for it to end

    monkeypatch.setattr(Rounds, "agree", begin)
    return second_begun


@pytest.mark.parametrize("bringing", [{0}, {1}, {0, 1}])
def test_a_sync_report_that_repeats_the_step_of_a_commit_under_way_raises_its_failure_on_every_rank(
    store, tmp_path, monkeypatch, second_begun, bringing
):
    put_bytes, fails = type(store.storage).put_bytes, True

    def fail_late(self, key, data):
        if fails and key.startswith(store.layout.manifests):
            second_begun()
            raise CommitFailedError("no manifest")
        put_bytes(self, key, data)

    monkeypatch.setattr(type(store.storage), "put_bytes", fail_late)

    def train(session, rank):
        def brought(content):
            return folder(tmp_path / str(rank), **{f"m{rank}": content})

        nonlocal fails
        session.report({}, brought("x"), step=5, upload="async")
        with pytest.raises(CommitFailedError, match="no manifest"):
            session.report({"final": 1.0}, brought("y") if rank in bringing else None, step=5)
        fails = False
        session.report({}, brought("z"), step=5)

    attempt = Attempt(store, 2)
    assert attempt.run(train) == [None, None]
    (manifest,) = store.list()
    assert read_files(store.checkpoint(manifest)) == {"m0": b"z", "m1": b"z"}
    assert [event.record.metrics for event in attempt.events() if hasattr(event, "record")] == [{}, {}]


@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_that_brings_nothing_to_a_sync_report_ends_its_commits_before_it_too(
    store, tmp_path, monkeypatch, second_begun, idle
):
    release = StagedReport.release

    def release_late(self):
        if self.report.files == (f"m{idle}",):
            second_begun()
        release(self)

    monkeypatch.setattr(StagedReport, "release", release_late)

    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": "x"}), step=1, upload="async")
        session.report({}, folder(tmp_path / "c", m="y") if rank != idle else None, step=2)
        session.wait_for_commits()
        session.report({}, folder(tmp_path / "c", m="z"), step=2)  # again: on each rank 2 is the newest step

    assert Attempt(store, 2).run(train) == [None, None]
    first, second = store.list()
    assert (first.step, second.step, second.parent) == (1, 2, first.id)


def test_a_failed_async_commit_is_raised_at_the_end_on_every_rank(store, tmp_path):
    errors = Attempt(store, 2).run(
        lambda session, rank: session.report({}, folder(tmp_path / str(rank), m=str(rank)), upload="async")
    )
    assert [type(error) for error in errors] == [ReportMismatchError] * 2


def test_a_background_commit_survives_an_exception_of_the_training(store, tmp_path):
    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": "x"}), upload="async")
        raise ZeroDivisionError

    Attempt(store, 2).run(train)
    assert len(store.list()) == 1


@pytest.mark.parametrize("failing", [{1}, {0, 1}])
@pytest.mark.parametrize("upload", ["sync", "async"])
def test_the_error_of_a_commit_has_the_ranks_that_could_not_store_their_parts(store, tmp_path, monkeypatch, upload, failing):
    store_of_rank = rank_part._store

    def refuse(run, job, rank):
        if rank in failing:
            raise StorageError("no answer")
        return store_of_rank(run, job, rank)

    monkeypatch.setattr(rank_part, "_store", refuse)

    def train(session, rank):
        for name in "mn":
            session.report({}, folder(tmp_path / str(rank), **{f"{name}{rank}": "x"}), upload=upload)

    errors = Attempt(store, 2).run(train)
    assert [error.ranks for error in errors] == [tuple(failing)] * 2
    first = f"rank {min(failing)} could not store its part: StorageError: no answer"
    assert all(str(error).startswith(first) for error in errors)


def test_a_rank_that_cannot_store_its_part_fails_the_commit_on_every_rank(store, tmp_path, monkeypatch):
    put_file = type(store.storage).put_file

    def full(self, key, path):
        if key.endswith("m1"):
            raise OSError(28, "No space left on device")
        return put_file(self, key, path)

    monkeypatch.setattr(type(store.storage), "put_file", full)

    def train(session, rank):
        checkpoint = folder(tmp_path / str(rank), **{f"m{rank}": "x"})
        with pytest.raises(CommitFailedError, match=r"rank 1 could not store its part: .*No space left"):
            session.report({}, checkpoint, step=3)
        monkeypatch.setattr(type(store.storage), "put_file", put_file)
        session.report({}, checkpoint, step=3)  # the same step again is harmless

    assert Attempt(store, 2).run(train) == [None, None]
    assert [manifest.step for manifest in store.list()] == [3]


class LosesWrites(MemoryStorage):
    """A bucket that acknowledges the second checkpoint's files, and has the first byte of them."""

    def put_buffers(self, key, parts):
        acknowledged = super().put_buffers(key, parts)
        if "-00000001-" in key:
            self.put_bytes(key, b"".join(parts)[:1])
        return acknowledged


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_a_bucket_that_acknowledges_more_than_it_has_fails_the_report_and_no_prune_counts_it(tmp_path, upload):
    store = open_run(LosesWrites())
    session = Attempt(store).session()

    def report_twice():
        for number in (1, 2):  # where it is stored in the background, the second raises
            session.report({}, folder(tmp_path / str(number), model="lost"), upload=upload)

    session.report({}, folder(tmp_path / "0", model="good"), upload=upload)
    with pytest.raises(CommitFailedError, match=r"memory has acknowledged 4 bytes of run/.*/model, and has 1: it loses"):
        report_twice()
    prune_as_leader(store, RetentionPolicy(num_to_keep=1))
    assert read_files(store.checkpoint(store.latest())) == {"model": b"good"}


def test_a_bucket_that_acknowledges_a_manifest_and_has_none_fails_the_report_for_good(tmp_path):
    """Also if it shows the manifest later."""
    hidden = ["/manifests/"]

    class HidesManifests(MemoryStorage):
        def list(self, prefix, **options):
            return (info for info in super().list(prefix, **options) if not any(part in info.key for part in hidden))

        def size(self, key):
            if any(part in key for part in hidden):
                raise FileNotFoundError(key)
            return super().size(key)

    store = open_run(HidesManifests())
    with pytest.raises(CommitFailedError, match=r"acknowledged \d+ bytes of run/manifests/.*\.json, and has no such object"):
        Attempt(store).session().report({}, folder(tmp_path / "0", model="x"))
    hidden.clear()
    assert store.latest() is None


class OldListings(LocalStorage):
    """A mount that shows this machine the files of another one after some looks, if ever."""

    looks_left = 10**9

    def list(self, prefix, *, after=None, splits=None):
        if "/checkpoints/" in prefix:
            self.looks_left -= 1
        shown = super().list(prefix, after=after, splits=splits)
        return iter([info for info in shown if "there" not in info.key or self.looks_left < 0])

    def size(self, key):
        if "there" in key and self.looks_left >= 0:
            raise FileNotFoundError(key)
        return super().size(key)

    def reopened(self):
        return self


def report_from_two_machines(store, tmp_path):
    """Return each rank's error of a report to which both machines contribute a file."""

    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), **{("here", "there")[rank]: "x"}))

    return Attempt(store, 2, nodes=[1, 1]).run(train)


def test_what_rank_0_does_not_see_of_another_machines_files_is_not_committed(tmp_path):
    store = open_run(OldListings(tmp_path))
    errors = report_from_two_machines(store, tmp_path)
    assert [type(error) for error in errors] == [CommitFailedError] * 2
    assert re.search(r"sees 0 of the 1 bytes that rank 1 has stored on another one in run/.*/there; mount", str(errors[0]))
    assert store.list() == []


def test_in_a_synced_directory_each_machine_has_its_own_files_alone(tmp_path):
    mount = OldListings(tmp_path)
    synced = Transport("true", "true", str(tmp_path), "0", "60").options()
    store = CheckpointStore(mount, Layout("run"), StorageSpec(mount.url, synced))
    assert report_from_two_machines(store, tmp_path) == [None, None]


def test_another_machines_files_are_waited_for(tmp_path):
    mount = OldListings(tmp_path)
    mount.looks_left = 2
    store = open_run(RetryingStorage(lambda: mount, RetryPolicy(deadline_s=60, first_wait_s=0), mount))
    assert report_from_two_machines(store, tmp_path) == [None, None]
    assert len(store.list()) == 1
    assert mount.looks_left == -1


def test_a_bucket_whose_run_is_deleted_meanwhile_is_not_said_to_lose_writes(tmp_path):
    class Deleted(MemoryStorage):
        def put_buffers(self, key, parts):
            acknowledged = super().put_buffers(key, parts)
            self.delete([it.key for it in self.list("run/")])
            return acknowledged

    session = Attempt(open_run(Deleted())).session()
    with pytest.raises(FencedError, match=r"the claim of attempt 1 .* is gone"):
        session.report({}, folder(tmp_path / "0", model="x"))


def test_what_a_listing_leaves_out_is_requested(tmp_path):
    class Lagging(MemoryStorage):
        def list(self, prefix, **options):
            return [it for it in super().list(prefix, **options) if "/checkpoints/" not in it.key]

    store = open_run(Lagging())
    Attempt(store).session().report({}, folder(tmp_path / "0", model="x"))
    assert store.latest() is not None


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 1 MiB."""
    with mounted(tmp_path / "disk") as disk:
        yield disk


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_a_full_disk_fails_that_report_only_leaves_nothing_of_it_and_the_checkpoints_before_stay_good(
    small_disk, tmp_path, upload
):
    store = CheckpointStore.open(small_disk, "run")

    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": b"x" * 100_000}), upload=upload)
        with pytest.raises(StorageFullError, match="No space left on device"):  # noqa: PT012 - an async one fails later
            session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": b"y" * 600_000}), upload=upload)
            session.report({})
            session.wait_for_commits()
            session.report({})
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": b"z" * 300_000}), upload=upload)

    assert Attempt(store, 2).run(train) == [None, None]
    assert [len(read_files(store.checkpoint(manifest))["m0"]) for manifest in store.list()] == [100_000, 300_000]
    assert len(list((small_disk / "run/checkpoints").iterdir())) == 2


def test_a_full_disk_is_rid_of_garbage_and_the_report_succeeds(small_disk, tmp_path):
    store = CheckpointStore.open(small_disk, "run")
    given_up = f"000001-00000000-{'0' * 8}"
    store.storage.put_bytes(store.layout.data(given_up, "m"), b"g" * 700_000)

    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": b"x" * 1000}), step=1)
        session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": b"y" * 200_000}))

    assert Attempt(store, 2).run(train) == [None, None]
    assert [manifest.total_bytes for manifest in store.list()] == [2000, 400_000]
    assert not store.storage.local_path(store.layout.data(given_up)).exists()


def test_a_file_that_cannot_fit_is_refused_before_a_byte_of_it_is_written(small_disk, tmp_path):
    (tmp_path / "big").write_bytes(b"x" * 2_000_000)
    free = shutil.disk_usage(small_disk).free
    with pytest.raises(OSError, match=r"2000000 bytes needed, \d+ free") as raised:
        LocalStorage(small_disk).put_file("run/big", tmp_path / "big")
    assert raised.value.errno == errno.ENOSPC
    assert shutil.disk_usage(small_disk).free == free


@pytest.mark.parametrize(("one", "other"), [("Model", "model"), ("caf\u00e9", "cafe\u0301")], ids=["case", "unicode"])
def test_files_that_the_storage_keeps_as_one_are_no_checkpoint(tmp_path, monkeypatch, one, other):
    """As on CIFS, exFAT or APFS, where the second name finds the first file."""
    store = CheckpointStore.open(tmp_path / "store", "run")
    session = Attempt(store).session()
    session.report({}, folder(tmp_path / "a", **{one: "x", other: "y"}))
    monkeypatch.setattr(Path, "samefile", lambda *_: True)
    session.report({}, folder(tmp_path / "b", **{one: "x", "else": "y"}))
    with pytest.raises(ReportMismatchError, match=r"takes '.*' and '.*' for the name of one file"):
        session.report({}, folder(tmp_path / "c", **{one: "x", other: "y"}))
    assert len(store.list()) == 2


@pytest.mark.parametrize(("one", "other"), [("Model", "model"), ("in/A/x", "in/a/x")], ids=["file", "folder"])
def test_one_file_that_has_a_number_by_each_name_is_still_one(tmp_path, monkeypatch, one, other):
    """As on exFAT through FUSE, which numbers the names that were looked up: only a listing shows that there is one file."""
    store = CheckpointStore.open(tmp_path / "store", "run")
    session = Attempt(store).session()
    for name in ("in/A", "in/a"):
        (tmp_path / "c" / name).mkdir(parents=True)
    listed, hidden = Path.iterdir, {"model", "a"}
    monkeypatch.setattr(Path, "iterdir", lambda path: (it for it in listed(path) if it.name not in hidden))
    with pytest.raises(ReportMismatchError, match=r"takes '.*' and '.*' for the name of one file"):
        session.report({}, folder(tmp_path / "c", **{one: "x", other: "y"}))
    assert store.list() == []


def test_a_checkpoint_of_the_same_run_and_bucket_on_another_server_is_another_runs(tmp_path):
    inner = MemoryStorage()
    here, there = (
        CheckpointStore(inner, Layout("run"), StorageSpec("s3://bucket", {"aws_endpoint_url": f"http://{host}:9000"}))
        for host in ("here", "there")
    )
    attempt = Attempt(here)
    attempt.session().report({}, folder(tmp_path / "c", m="x"))
    (manifest,) = here.list()
    for store, is_own in ((here, True), (there, False)):
        attempt.restored = store.checkpoint(manifest)
        assert attempt.session().continues_own_run == is_own


def test_an_overtaken_attempt_cannot_commit(store, tmp_path):
    zombie = Attempt(store, 2)
    claim_attempt(store, Owner.current(), world_size=2)
    errors = zombie.run(lambda session, rank: session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": "x"})))
    assert [type(error) for error in errors] == [FencedError] * 2
    assert "attempt 1 of run 'run' was overtaken by attempt 2" in str(errors[0])
    assert store.list() == []


class Slept(MemoryStorage):
    """Stores a manifest only `slept_s` after it was asked to; another attempt has begun, and collected garbage, meanwhile."""

    def __init__(self, monkeypatch, slept_s):
        super().__init__()
        self.slept_s, self.now_s = slept_s, time.time()
        monkeypatch.setattr(time, "time", lambda: self.now_s)

    def put_bytes(self, key, data):
        if "/manifests/" in key:
            self.now_s += self.slept_s
            self.sleep()
        super().put_bytes(key, data)

    def sleep(self):
        claim_attempt(open_run(self), Owner.current(), world_size=1)
        collect_garbage(open_run(self))


@pytest.mark.parametrize(("slept_s", "commits"), [(1, True), (4000, False)])
def test_a_commit_that_took_long_is_withdrawn_if_its_data_were_collected_meanwhile(tmp_path, monkeypatch, slept_s, commits):
    """Its score alone would keep it, and drop another checkpoint."""
    store = open_run(Slept(monkeypatch, slept_s))
    session = Attempt(store).session()
    with nullcontext() if commits else pytest.raises(FencedError, match="overtaken by attempt 2"):
        session.report({}, folder(tmp_path / "c", model="x"))
    assert len(store.list()) == commits


class Unanswered(Slept):
    """Stores a manifest at once, and answers `slept_s` later."""

    def put_bytes(self, key, data):
        MemoryStorage.put_bytes(self, key, data)
        super().put_bytes(key, data)


def test_a_commit_that_took_long_stays_if_it_was_there_before_the_attempt_was_overtaken(tmp_path, monkeypatch):
    """The newer attempt has perhaps restored it."""
    store = open_run(Unanswered(monkeypatch, 4000))
    session = Attempt(store).session()
    with pytest.raises(FencedError, match="overtaken by attempt 2"):
        session.report({}, folder(tmp_path / "c", model="x"))
    (committed,) = store.list()
    store.verify(committed)


def test_an_attempt_whose_run_was_deleted_and_begun_again_commits_nothing(store, tmp_path):
    """As a machine that was presumed dead wakes up: its number is also that of the attempt that trains now."""
    deleted = Attempt(store)
    session = deleted.session()
    session.report({}, folder(tmp_path / "old", m="old"), step=50)
    store.storage.delete(store.keys("run/"))
    begun = Attempt(store)
    begun.session().report({}, folder(tmp_path / "new", m="new"))
    assert begun.number == deleted.number
    with pytest.raises(FencedError, match="the claim of attempt 1 on run 'run' is gone"):
        session.report({}, folder(tmp_path / "old", m="old"), step=51)
    assert [it.step for it in store.list()] == [0]


def test_metadata_is_committed_with_the_files_and_can_change_afterwards(store, tmp_path):
    checkpoint = folder(tmp_path / "c", model="x")
    checkpoint.set_metadata({"author": "me"})
    Attempt(store).session().report({}, checkpoint)
    stored = store.checkpoint(store.list()[0])
    assert stored.get_metadata() == {"author": "me"}
    assert read_files(stored) == {"model": b"x"}
    stored.update_metadata({"note": "good"})
    assert store.checkpoint(store.list()[0]).get_metadata() == {"author": "me", "note": "good"}


def test_metadata_with_one_changed_bit_is_not_believed(store, tmp_path, caplog):
    checkpoint = folder(tmp_path / "c", model="x")
    checkpoint.set_metadata({"author": "me"})
    Attempt(store).session().report({}, checkpoint)
    stored = store.checkpoint(store.list()[0])
    stored.set_metadata({"digest": "mine", "epoch": 4})
    assert stored.get_metadata() == {"digest": "mine", "epoch": 4}
    key = store.layout.metadata(store.list()[0].id)
    data = store.storage.get_bytes(key)
    store.storage.put_bytes(key, data.replace(b'"epoch": 4', b'"epoch": 5'))
    assert stored.get_metadata() == {"author": "me"}
    assert f"{key} is not the metadata of a checkpoint: it does not match its own digest" in caplog.text
    store.records.put_json(key, {"epoch": 4})  # as version 0.1 did
    assert stored.get_metadata() == {"epoch": 4}
    with pytest.raises(ValueError, match=r"the key 'prefect-torch\.digest', which is reserved"):
        stored.set_metadata({"prefect-torch.digest": "0" * 32})


def test_an_async_report_takes_the_metadata_with_the_files(store, tmp_path):
    def train_fn(session, rank):
        for author in ("me", None):
            checkpoint = folder(tmp_path / str(rank), **{f"m{rank}": "x"})
            if author is not None:
                checkpoint.set_metadata({"author": author})
            session.report({}, checkpoint, upload="async")

    assert Attempt(store, 2).run(train_fn) == [None] * 2
    assert [store.checkpoint(it).get_metadata() for it in store.list()] == [{"author": "me"}, {}]
    assert not any(any((tmp_path / rank).iterdir()) for rank in "01")


def test_a_committed_checkpoint_can_be_reported_again_and_stays(store, tmp_path, monkeypatch):
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    session = Attempt(store).session()
    session.report({}, folder(tmp_path / "c", model="x"))
    session.report({}, store.checkpoint(store.list()[0]), upload="async")
    session.finish()
    assert [read_files(store.checkpoint(manifest)) for manifest in store.list()] == [{"model": b"x"}] * 2
    assert not list(Path(tempfile.gettempdir()).glob(".prefect-torch-*"))


def test_events_tell_reports_and_commits_in_order(store, tmp_path):
    def train(session, rank):
        session.report({"a": float("nan")}, progress=0.5)
        session.report({"a": 2}, folder(tmp_path / str(rank), **{f"m{rank}": "xyz"}))

    attempt = Attempt(store, 2)
    attempt.run(train)
    first, commit, second = attempt.events()
    assert first.progress == 0.5
    assert repr(first.record.metrics) == "{'a': nan}"
    assert isinstance(commit, CommitEvent)
    assert (commit.id, commit.bytes) == (second.record.checkpoint, 6)


def test_a_model_in_place_of_a_directory_is_named_by_its_type_and_not_by_all_its_numbers(store):
    with pytest.raises(ValueError, match=r"^checkpoint is of type dict: .*state="):
        Attempt(store).session().report({}, {"weight": [0.5] * 1000})
    others = type("Checkpoint", (), {"__module__": "ray.train"})()
    with pytest.raises(ValueError, match=r"^checkpoint is of type ray\.train\.Checkpoint: .* of prefect_torch\.ckpt"):
        Attempt(store).session().report({}, others)


@pytest.mark.parametrize("progress", [True, -0.1, 1.1, "half", float("nan")])
def test_progress_is_a_share(store, progress):
    with pytest.raises(ValueError, match="progress"):
        Attempt(store).session().report({}, progress=progress)


def test_an_unknown_way_to_upload_is_refused(store):
    with pytest.raises(ValueError, match="'sync' or 'async'"):
        Attempt(store).session().report({}, upload="later")


@pytest.mark.parametrize("upload", [None, "sync", "async"])
def test_exchanges_leave_nothing_behind(store, tmp_path, upload):
    attempt = Attempt(store, 2)

    def work(session, rank):
        for step in range(30):
            checkpoint = folder(tmp_path / f"{rank}-{step}", **{f"rank{rank}": b"x"}) if upload else None
            session.report({"step": step}, checkpoint, upload=upload)

    assert attempt.run(work) == [None, None]
    attempt.events()
    assert not any(value for key, value in attempt.key_value._values.items() if key.startswith("event/"))  # slots used again
    left = [key for key in attempt.key_value._values if not key.startswith(("end", "left/", "all left", "event"))]
    assert len(left) <= 3, left  # the last round's, and the decision on the last commit


@pytest.mark.parametrize(
    ("name", "call"), [("report", lambda: report({})), ("get_checkpoint", get_checkpoint), ("get_context", get_context)]
)
def test_outside_of_a_training_it_says_where_it_may_be_called(name, call):
    with pytest.raises(RuntimeError, match=rf"{name}\(\) may be called only inside"):
        call()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("report", lambda: report({})),
        ("log_metrics", lambda: log_metrics({})),
        ("should_checkpoint", lambda: get_context().should_checkpoint()),
    ],
)
def test_a_process_that_a_rank_has_forked_reports_nothing(store, monkeypatch, name, call):
    attempt = Attempt(store)
    with as_rank(attempt.session()), monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match=rf"{name}\(\) was called in a process that rank 0 has forked"):
            call()
        assert get_context().world_rank == 0  # as the workers of a data loader may ask
    assert attempt.events() == []


def bad_arguments(tmp_path):
    return {
        "a metric": lambda: {"metrics": {"history": [1]}},
        "a step": lambda: {"metrics": {}, "step": "x"},
        "a checkpoint's step": lambda: {"metrics": {}, "step": 0, "checkpoint": folder(tmp_path / "again", model="x")},
        "progress": lambda: {"metrics": {}, "progress": 2},
        "a folder": lambda: {"metrics": {}, "checkpoint": Checkpoint.from_directory(tmp_path / "missing")},
        "no checkpoint": lambda: {"metrics": {}, "checkpoint": "/tmp"},
    }


@pytest.mark.parametrize("upload", ["sync", "async"])
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("what", list(bad_arguments(Path())))
def test_a_report_that_one_rank_got_wrong_is_none_on_every_rank_and_the_next_ones_still_pair(
    store, tmp_path, what, wrong, upload
):
    make_bad = bad_arguments(tmp_path)[what]

    def bring(rank, epoch):
        return folder(tmp_path / str(rank), **{f"m{rank}": str(epoch)})

    def train(session, rank):
        session.report({"epoch": 0}, bring(rank, 0), upload=upload)
        for epoch in range(1, 4):
            if epoch == 2 and rank == wrong:
                with pytest.raises((ValueError, FileNotFoundError)):
                    session.report(**make_bad())
            elif epoch == 2:
                with pytest.raises(CommitFailedError, match=f"rank {wrong} could not report, so no rank did"):
                    session.report({"epoch": epoch}, bring(rank, epoch))
            else:
                session.report({"epoch": epoch}, bring(rank, epoch), upload=upload)

    assert Attempt(store, 2).run(train) == [None, None]
    assert [manifest.metrics["epoch"] for manifest in store.list()] == [0, 1, 3]
    for manifest in store.list():
        stored = read_files(store.checkpoint(manifest))
        assert stored == {f"m{rank}": str(manifest.metrics["epoch"]).encode() for rank in range(2)}


def test_a_background_failure_is_told_though_the_report_that_learns_of_it_is_wrong_itself(store, tmp_path):
    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), m=str(rank)), upload="async")  # different files of one name
        session.wait_for_commits()
        with pytest.raises(ReportMismatchError, match="rank 0 and rank 1 both reported a file 'm'"):
            session.report({"bad": []})

    assert Attempt(store, 2).run(train) == [None, None]


def test_a_mismatch_does_not_hide_how_the_commit_in_the_background_ends(store, tmp_path, uploads_may_go_on):
    def train(session, rank):
        session.report({}, folder(tmp_path / str(rank), m=str(rank)), upload="async")  # different files of one name
        with pytest.raises(ReportMismatchError, match="reported step 1"):
            session.report({}, step=rank)
        uploads_may_go_on.set()

    errors = Attempt(store, 2).run(train)
    assert ["both reported a file 'm'" in str(error) for error in errors] == [True, True]


@pytest.mark.parametrize("state", [None, {"epoch": 3}], ids=["alone", "beside a state"])
def test_a_directory_that_vanishes_after_it_was_looked_at_takes_no_rank_out_of_step(store, tmp_path, monkeypatch, state):
    def vanishes(directory, report):
        shutil.rmtree(directory, ignore_errors=directory.name == "1")
        return shared_directory.identity_of(directory, report)

    def train(session, rank):
        with pytest.raises((FileNotFoundError, ReportMismatchError)):
            session.report({}, folder(tmp_path / str(rank), **{f"m{rank}": "x"}), state=state, upload="async", step=0)
        monkeypatch.undo()
        session.report({}, folder(tmp_path / f"again-{rank}", **{f"m{rank}": "x"}), state=state, upload="async", step=1)

    monkeypatch.setattr("prefect_torch.ckpt.reporting.rank_report.identity_of", vanishes)
    assert Attempt(store, 2).run(train) == [None, None]
    assert [manifest.step for manifest in store.list()] == [1]


@pytest.mark.parametrize("early", [0, 1])
def test_ranks_that_part_fail_at_the_end_though_the_error_was_swallowed(store, early):
    def train(session, rank):
        session.report({})
        if rank != early:
            with pytest.raises(ReportMismatchError):
                session.report({})

    errors = Attempt(store, 2).run(train)
    assert isinstance(errors[1 - early], ReportMismatchError)
    assert f"rank {early} returned after 1 report" in str(errors[1 - early])


def test_a_run_that_was_deleted_under_the_training_is_noticed_at_the_next_report(store, tmp_path):
    attempt = Attempt(store)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(FencedError, match="the claim of attempt 1 on run 'run' is gone"):
        attempt.session().report({}, folder(tmp_path / "c", model="x"))
    assert store.list() == []
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("below", ["", "trainings"], ids=["mount", "below"])
def test_a_report_after_an_unmount_leaves_nothing_below_the_mount_point(small_disk, tmp_path, below):
    """It would fill another disk, and be hidden after the next mount."""
    store = CheckpointStore.open(small_disk / below, "run")
    attempt = Attempt(store)
    session = attempt.session()
    session.report({}, folder(tmp_path / "c", model="x"))
    subprocess.run(["umount", small_disk], check=True)
    try:
        with pytest.raises(FencedError, match=r"the claim of attempt 1 on run 'run' is gone .* unmounted"):
            session.report({}, folder(tmp_path / "c", model="y"))
        with pytest.raises(FileNotFoundError), session.lent.lend():
            pass
        assert list(small_disk.iterdir()) == []
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small_disk], check=True)


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_metadata_that_is_none_is_named(store, tmp_path, content):
    checkpoint = folder(tmp_path / "c", **{".metadata.json": content})
    with pytest.raises(ValueError, match=r"c/\.metadata\.json .*set_metadata"):
        Attempt(store).session().report({}, checkpoint)


def test_so_many_commits_may_be_under_way_and_a_further_report_waits(store, tmp_path, uploads_may_go_on):
    returned = []

    def train(session, rank):
        for epoch in range(3):
            session.report({"epoch": epoch}, folder(tmp_path / str(rank), **{f"m{rank}": str(epoch)}), upload="async")
            returned.append(epoch)

    def release_when_two_wait():
        while returned.count(1) < 2:
            time.sleep(0.01)
        assert 2 not in returned
        uploads_may_go_on.set()

    releaser = threading.Thread(target=release_when_two_wait)
    releaser.start()
    assert Attempt(store, 2, max_in_flight=2).run(train) == [None, None]
    releaser.join()
    manifests = store.list()
    assert [manifest.metrics["epoch"] for manifest in manifests] == [0, 1, 2]
    assert [manifest.parent for manifest in manifests] == [None, manifests[0].id, manifests[1].id]


@pytest.mark.parametrize("reports", [2, 5])
def test_each_of_several_commits_under_way_that_fail_is_raised_once_on_every_rank(store, tmp_path, reports):
    def train(session, rank):
        told = []
        for epoch in range(reports):  # different files of one name, every second time
            name = "m" if epoch % 2 == 0 else f"m{rank}"
            made = folder(tmp_path / f"{rank}-{epoch}", **{name: str(rank)})  # of its own: a refused report leaves its files
            try:
                session.report({"epoch": epoch}, made, upload="async")
            except ReportMismatchError:
                told.append(epoch)
        for _ in range(reports):
            session.wait_for_commits()
            try:
                session.report({})
            except ReportMismatchError:
                told.append(reports)
        return told

    attempt = Attempt(store, 2, max_in_flight=3)
    told = {}
    assert attempt.run(lambda session, rank: told.update({rank: train(session, rank)})) == [None, None]
    assert told[0] == told[1]
    accepted = [epoch for epoch in range(reports) if epoch not in told[0]]
    assert [manifest.metrics["epoch"] for manifest in store.list()] == [epoch for epoch in accepted if epoch % 2]
    assert len(told[0]) == len([epoch for epoch in accepted if epoch % 2 == 0])


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_a_folder_that_holds_the_run_is_refused(store, tmp_path, upload):
    session = Attempt(store).session()
    session.report({}, folder(tmp_path / "c", model="x"))
    with pytest.raises(ValueError, match="holds the run itself"):
        session.report({}, Checkpoint.from_directory(tmp_path), upload=upload)
    store.verify(store.latest())


def test_the_folder_of_a_committed_checkpoint_is_never_taken_apart(store, tmp_path):
    def train_fn(session, rank):
        session.report({}, folder(tmp_path / "c", model="x"))
        session.report({}, Checkpoint.from_directory(store.checkpoint(store.latest()).path), upload="async")

    assert Attempt(store).run(train_fn) == [None]
    assert [read_files(store.checkpoint(manifest)) for manifest in store.list()] == [{"model": b"x"}] * 2


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_the_first_checkpoint_after_a_request_of_termination_is_the_last(store, tmp_path, upload):
    attempt, reported = Attempt(store, 2), {0: [], 1: []}

    def train(session, rank):
        try:
            for step in range(9):
                attempt.ends_soon |= step == 3
                reported[rank].append(step)
                made = folder(tmp_path / f"{rank}-{step}", **{f"m{rank}": str(step)}) if step % 2 == 0 else None
                session.report({}, made, upload=upload if made else None)
        finally:
            reported[rank].append("cleaned up")

    assert attempt.run(train) == [None, None]
    assert reported[0] == reported[1] == [0, 1, 2, 3, 4, "cleaned up"]  # the report of step 3 has no checkpoint
    assert [manifest.step for manifest in store.list()] == [0, 2, 4]


def test_a_function_that_asks_may_return_by_itself_but_stores_no_second_checkpoint(store, tmp_path):
    attempt, done = Attempt(store, 2), {0: [], 1: []}

    def train(session, rank):
        for step in range(9):
            attempt.ends_soon |= step == 3
            if session.context.should_checkpoint():
                session.report({}, folder(tmp_path / f"{rank}-{step}", **{f"m{rank}": str(step)}))
            done[rank].append(step)

    assert attempt.run(train) == [None, None]
    assert done[0] == done[1] == [0, 1, 2, 3]
    assert [manifest.step for manifest in store.list()] == [0]


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_a_last_checkpoint_that_failed_may_be_reported_again(store, tmp_path, monkeypatch, upload):
    attempt, put_bytes, failed = Attempt(store), type(store.storage).put_bytes, []

    def fail_once(self, key, data):
        if attempt.ends_soon and key.startswith(store.layout.manifests) and not failed:
            failed.append(key)
            raise CommitFailedError("no manifest")
        put_bytes(self, key, data)

    monkeypatch.setattr(type(store.storage), "put_bytes", fail_once)
    session = attempt.session()
    session.report({}, folder(tmp_path / "0", m="0"))
    if upload == "async":
        session.context.should_checkpoint()  # a function that calls it goes on after its last checkpoint
    attempt.ends_soon = True

    def report_last():
        session.report({}, folder(tmp_path / "1", m="1"), step=1, upload=upload)

    if upload == "async":
        report_last()
        session.wait_for_commits()
    with pytest.raises(CommitFailedError, match="no manifest"):
        report_last()
    with suppress(SystemExit):
        report_last()
    session.finish()
    assert len(failed) == 1
    assert store.latest().step == 1


def test_a_function_that_does_not_ask_for_the_checkpoint_of_its_attempt_is_warned_once_that_it_trains_anew(store, caplog):
    def train(session, _rank):
        with as_rank(session):
            for _ in range(2):
                report({"loss": 1.0})

    assert Attempt(store, 1).run(lambda session, _: session.report({}, state={"epoch": 0})) == [None]
    (manifest,) = store.list()
    assert not caplog.records
    assert Attempt(store, 1).run(train) == [None]
    (record,) = caplog.records
    assert re.match(rf"the function has not called get_checkpoint\(\), .* from {manifest.id}: ", record.message)

    def resume(session, rank):
        with as_rank(session):
            assert get_checkpoint().id == manifest.id
        train(session, rank)

    caplog.clear()
    assert Attempt(store, 1).run(resume) == [None]
    assert not caplog.records
