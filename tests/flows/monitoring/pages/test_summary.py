"""The page of a run from what its storage and its observers tell; no server."""

import re
import threading
import time
import tracemalloc
from dataclasses import asdict, replace
from datetime import datetime, timezone
from uuid import UUID

import pytest
from counting_storage import CountingStorage
from faulty_storage import FaultyStorage
from prefect.settings import PREFECT_UI_URL, temporary_settings
from prefect_torch.ckpt import Plan, RetentionPolicy, StorageError
from prefect_torch.ckpt.reporting.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, record_resumed_from, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.flows.monitoring.pages.attempt_log import resume_points
from prefect_torch.flows.monitoring.pages.machine import GpuSample, GpuUse
from prefect_torch.flows.monitoring.pages.run_view import RunView
from prefect_torch.flows.monitoring.pages.setup import Setup
from prefect_torch.flows.monitoring.pages.summary import SummaryContext, write_summary
from prefect_torch.flows.monitoring.restarted import Restart
from prefect_torch.flows.monitoring.text import page_url
from prefect_torch.tasks.training.observers import (
    AttemptEnded,
    AttemptStarted,
    CheckpointQuarantined,
    CheckpointsPruned,
    RanksStarted,
)
from ranks import Attempt, folder
from run_stories import BEGUN_S, checkpoint_id, claim, logged, record
from wrapped_storage import WrappedStorage

POLICY = RetentionPolicy(num_to_keep=1, checkpoint_score_attribute="score")
CONTEXT = SummaryContext("/store/run")


def view_of(store, *events, clock=time.monotonic):
    view = RunView(store, POLICY, clock)
    for at_s, event in enumerate(events):
        view.record(event, BEGUN_S + at_s)
    return view


def page_of(view, context=CONTEXT):
    return write_summary("run", view, context, BEGUN_S + 100)


def commit(attempt, step, **metrics):
    return CommitEvent(checkpoint_id(attempt, step), step, metrics, 7, 0.5, 0.25)


def test_a_running_training_shows_what_it_said_last(store):
    view = view_of(
        store,
        AttemptStarted(claim(1), None),
        ReportEvent(record(1, 3, 10.0, score=1.0), 0.25),
        commit(1, 3, score=1.0),
        commit(1, 4, score=0.5),
    )
    page = page_of(view)
    assert "**running** · attempt 1 · step 3 · 25% done · goodput" in page
    assert "steps/s" not in page
    assert "left" not in page
    assert "2 in storage, 14 B in total" in page
    assert view.kept() == {checkpoint_id(1, 4): ("latest",), checkpoint_id(1, 3): ("best",)}


def test_what_a_logger_records_by_its_own_steps_is_kept_with_the_report_after_it(store):
    """A report in each epoch, and the logger's hundred batches before it; epoch 2 is lost, and trained again."""
    epochs = [(1, 0), (1, 1), (1, 2), (2, 2)]
    saved = {epoch: checkpoint_id(*epoch) for epoch in epochs[:2]}
    told = [AttemptStarted(claim(1), None)]
    for number, (attempt, epoch) in enumerate(epochs):
        if attempt == 2:
            told.append(AttemptStarted(claim(2, 40.0, saved[1, 1]), saved[1, 1]))
        told += [ReportEvent(logged(attempt, 100 * epoch + 50, 10.0 * number, train=epoch))]
        told += [ReportEvent(record(attempt, epoch, 10.0 * number + 5, saved.get((attempt, epoch)), val=epoch))]
        told += [commit(attempt, epoch)] if (attempt, epoch) in saved else []
    view = view_of(store, *told, ReportEvent(logged(2, 350, 39.0, train=3)))
    curves = {curve.name: curve for curve in view.curves.sorted(None)}
    points = resume_points(view.logs)
    assert curves["val"].kept(points) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert curves["train"].kept(points) == [(50, 0.0), (150, 1.0), (250, 2.0), (350, 3.0)]
    assert curves["train"].lost(points, 5) == [[(250, 2.0)]]
    assert [(log.first_step, log.last_step, log.steps_per_s) for log in view.logs] == [(0, 2, 0.1), (2, 2, None)]
    assert "**running** · attempt 2 · step 2 · goodput" in page_of(view)


def test_what_another_process_left_behind_is_read_from_storage(store, tmp_path):
    """Its leader was killed, so that no outcome was written, and the last report is known from a manifest alone."""
    before = Attempt(store)
    session = before.session()
    for score in (1.0, 2.0):
        session.report({"score": score}, folder(tmp_path / "c", model=str(score)))
    first, second = store.list()
    HistoryWriter(store, 1).append(replace(record(1, 0, score=1.0), checkpoint=first.id))
    store.pin(first.id)
    claimed = claim_attempt(store, Owner.current("b"), world_size=2, lineage=1)
    path = f"{store.path}/checkpoints/{second.id}"
    record_resumed_from(store, claimed, path)
    view = view_of(store, AttemptStarted(claimed, path), ReportEvent(record(2, 2, 10.0, score=3.0)))
    page = page_of(view)
    assert "- attempt 1: killed with its flow's process, or overtaken by the next attempt" in page
    assert re.search(r"^\| 1 \|.*\| fresh start \| 0 to 1 \| lost \|$", page, re.MULTILINE)
    assert re.search(r"^\| 2 \|.*\| step 1, attempt 1 \| 2 to 2 \| running \|$", page, re.MULTILINE)
    assert view.kept() == {second.id: ("latest", "best", "in use"), first.id: ("pinned",)}
    assert [len(points) for points in view.curves.sorted(None)[0].points.values()] == [2, 1]
    assert {mark.newest for mark in view.logs[0].checkpoints if mark.num_timed} == {first.id, second.id}


def test_an_attempt_that_could_not_choose_where_to_begin_is_told_too(store):
    claimed = claim_attempt(store, Owner.current("a"), world_size=2)
    error = "CheckpointCorruptError('2 checkpoints and none is whole')"
    view = view_of(
        store,
        CheckpointQuarantined(checkpoint_id(1, 1), "a bit | flipped"),
        AttemptEnded(Outcome(claimed.number, "failed", "a", "final", error)),
    )
    page = page_of(view)
    assert "- attempt 1: final: CheckpointCorruptError" in page
    assert f"- set aside as damaged: `{checkpoint_id(1, 1)}`, a bit \\| flipped" in page


def test_what_was_pruned_is_gone_and_pins_are_known_from_the_plan(store):
    view = view_of(store, AttemptStarted(claim(1), None), *(commit(1, step, score=step) for step in range(3)))
    committed_at = datetime.fromtimestamp(BEGUN_S, timezone.utc)
    dropped = Manifest(checkpoint_id(1, 1), 1, 1, {}, (FileEntry("f", 7, "", 0),), 1, None, committed_at)
    view.record(CheckpointsPruned(Plan({checkpoint_id(1, 0): ("pinned",)}, (dropped,))), BEGUN_S)
    assert [it.step for it in view.checkpoints.held] == [0, 2]
    assert (view.checkpoints.num, view.checkpoints.bytes) == (2, 14)
    assert view.kept() == {checkpoint_id(1, 2): ("latest", "best"), checkpoint_id(1, 0): ("pinned",)}


def test_the_end_is_read_from_storage_where_others_prune_and_pin(store, tmp_path):
    session = Attempt(store).session()
    session.report({"score": 1}, folder(tmp_path / "c", model="1"))
    (kept,) = store.list()
    view = view_of(store, AttemptStarted(claim(2), None), commit(2, 7, score=1))
    store.pin(kept.id)
    view.read_checkpoints()
    assert {it.id for it in view.checkpoints.held} == {kept.id}
    assert view.kept() == {kept.id: ("latest", "best", "pinned")}


def test_the_best_by_a_score_that_evaluations_attach_is_named(store):
    context = SummaryContext("/store/run", first_metric="eval/error", order="min")
    told = [AttemptStarted(claim(1), None), ReportEvent(record(1, 0, loss=1.0)), commit(1, 0, loss=1.0)]
    assert "Best:" not in page_of(view_of(store, *told), context)
    evaluated = [commit(1, step, eval={"error": error}) for step, error in [(1, 0.5), (2, 0.25), (3, 0.75)]]
    assert "\nBest: **eval/error 0.25** at step 2.\n" in page_of(view_of(store, *told, *evaluated), context)


def test_errors_are_shortened_in_the_list_whole_at_the_top_and_no_markdown(store):
    error = f"rank 1 failed: ValueError: {'<b>*x*|' * 100}\n\nTraceback\n```\nline"
    page = page_of(view_of(store, AttemptStarted(claim(1), None), AttemptEnded(Outcome(1, "failed", "a", "user", error))))
    (reason,) = re.findall("^- attempt 1: (.*)$", page, re.MULTILINE)
    assert reason.startswith(r"user: rank 1 failed: ValueError: \<b\>\*x\*\|")
    assert reason.endswith("…")
    fence = page.split("```")
    assert len(fence) == 3
    assert "Traceback" in fence[1]


def test_a_failed_training_says_what_is_safe(store):
    begun, failed = AttemptStarted(claim(1), None), AttemptEnded(Outcome(1, "failed", "a", "user", "ValueError: x"))
    ranks, commits = RanksStarted(1, {0: UUID(int=1)}), (commit(1, 3, score=1.0), commit(1, 4, score=0.5))
    assert "```\n\nNothing was committed yet.\n" in page_of(view_of(store, begun, ranks, failed))
    page = page_of(view_of(store, begun, ranks, *commits, failed))
    assert f"Work is safe up to step 4 (`{checkpoint_id(1, 4)}`), where the next training named `run` continues." in page
    overtaken = AttemptEnded(Outcome(1, "failed", "a", "final", "rank 0 of attempt 1 failed: FencedError: overtaken"))
    for unknown in ((begun, *commits, failed), (begun, ranks, *commits, overtaken)):
        assert "afe up to" not in page_of(view_of(store, *unknown))


@pytest.mark.parametrize(
    ("reason", "state"),
    [("suspended", "suspended"), ("gave way to the more urgent flow run 'a'", "yielded"), ("it", "preempted")],
)
def test_a_training_that_goes_on_later_is_not_headed_preempted(store, reason, state):
    outcome = Outcome(1, "preempted", "a", error=f"{reason}; work is safe up to step 4")
    page = page_of(view_of(store, AttemptStarted(claim(1), None), commit(1, 4), AttemptEnded(outcome)))
    assert f"**{state}** · attempt 1" in page
    assert f"| none | {state} |" in page
    assert page.count("ork is safe") == 2  # in the error, and in the list of attempts


def test_an_error_is_folded_to_the_width_of_a_block_of_code(store):
    frame = f'  File "/home/ada/my_training.py", line 7, in train_fn\n    {"call(argument) + " * 9}1\n{" " * 90}~~^~~'
    error = f"rank 1 failed: ValueError: {'word ' * 20}{'x' * 100}\n\nTraceback (most recent call last):\n{frame}\nValueError"
    page = page_of(view_of(store, AttemptStarted(claim(1), None), AttemptEnded(Outcome(1, "failed", "a", "user", error))))
    lines = page.split("```")[1].removeprefix("text\n").splitlines()
    assert max(map(len, lines)) <= 64
    assert "".join(lines).replace(" ", "") == re.sub("[ \n]", "", error.replace("~~^~~", ""))
    assert [line.startswith(" " * 8) for line in lines[lines.index("Traceback (most recent call last):") :]].count(True) == 2
    assert '  File "/home/ada/my_training.py", line 7, in train_fn' in lines


def test_the_ranks_of_the_attempts_with_links_are_held(store):
    started = [event for it in range(1, 9) for event in (AttemptStarted(claim(it), None), RanksStarted(it, {0: UUID(int=it)}))]
    assert [log.number for log in view_of(store, *started).logs if log.ranks] == [4, 5, 6, 7, 8]


def test_a_link_has_no_login():
    with temporary_settings({PREFECT_UI_URL: "https://user:secret@host/prefect"}):
        assert page_url("flow-run", UUID(int=1)) == f"https://host/prefect/runs/flow-run/{UUID(int=1)}"


def test_links_lead_to_the_newest_attempts_ranks(store):
    ranks = {number: {rank: f"http://ui/{number}-{rank}" for rank in range(20)} for number in range(1, 9)}
    context = SummaryContext("s3://b/run", flow_runs={2: "http://ui/two", 8: "http://ui/eight"}, ranks=ranks)
    page = page_of(view_of(store, AttemptStarted(claim(1), None), commit(1, 0, score=1)), context)
    assert "[flow run](http://ui/eight)" in page
    linked = re.findall(r"\[rank (\d+)\]\(http://ui/(\d)-\d+\)", page)
    assert {number for _, number in linked} == set("45678")
    assert page.count("· 4 more ranks") == 5


@pytest.mark.parametrize("message", ["0.1234, " * 400, "\n".join(f"missing key {number}" for number in range(400))])
def test_of_a_long_error_the_rank_the_class_and_the_frames_are_shown(store, message):
    frame = 'File "train.py", line 7, in step'
    raised = f"RuntimeError: CUDA error: {message}"
    line, _, _ = raised.partition("\n")
    error = f"rank 1 of attempt 1 failed: {line}\nTraceback (most recent call last):\n  {frame}\n{raised} at the end"
    page = page_of(view_of(store, AttemptStarted(claim(1), None), AttemptEnded(Outcome(1, "failed", "a", "user", error))))
    shown = page.partition("```text\n")[2].partition("\n```")[0]
    assert shown.startswith("rank 1 of attempt 1 failed: RuntimeError: CUDA error: ")
    assert frame in shown
    assert "characters left out]" in " ".join(shown.split())
    assert shown.endswith(" at the end")
    assert len(shown) < 2500


def test_a_long_run_has_a_page_of_bounded_size(store):
    view = view_of(store, AttemptStarted(claim(1), None))
    for number in range(1, 301):
        view.record(AttemptStarted(claim(number, number), None), BEGUN_S + number)
        for step in range(5):
            view.record(ReportEvent(record(number, step, number, **{f"m{name}": step for name in range(30)})), BEGUN_S + number)
        write_outcome(store, Outcome(number, "failed"))
        view.record(AttemptEnded(Outcome(number, "failed", "a", "user", "boom " * 100)), BEGUN_S + number)
    page = page_of(view)
    assert "Not shown: 280 earlier attempts." in page
    assert "Not shown: 18 metrics; see" in page
    assert len(page) < 400_000


def test_a_training_that_never_ends_is_noted_in_bounded_memory(store):
    """Every one of ten thousand reports has a checkpoint, and all are kept: memory does not grow with them."""
    view = view_of(store, AttemptStarted(claim(1), None))

    def report(steps):
        for step in steps:
            view.record(ReportEvent(record(1, step, float(step), checkpoint_id(1, step), score=step % 1000)), BEGUN_S + step)
            view.record(commit(1, step, score=step % 1000), BEGUN_S + step)

    report(range(5000))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        report(range(5000, 10_000))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 2_500_000, "an entry for each of 5,000 checkpoints would take more"
    assert (view.checkpoints.num, view.checkpoints.bytes) == (10_000, 70_000)
    (log,) = view.logs
    assert sum(mark.num_reported for mark in log.checkpoints) == 10_000
    assert sum(mark.stall_s for mark in log.checkpoints) == 2500
    assert view.checkpoints.held[-1].step == 9999
    assert max(it.metrics["score"] for it in view.checkpoints.held) == 999
    assert checkpoint_id(1, 7) in log.checkpoints
    assert checkpoint_id(2, 7) not in log.checkpoints


def test_what_happens_now_is_told_even_if_the_past_cannot_be_read(store, tmp_path):
    Attempt(store).session().report({"score": 1}, folder(tmp_path / "c", model="1"))
    away = FaultyStorage(store.storage, crash_at=1, error=StorageError("no answer"))
    view = RunView(replace(store, storage=away), POLICY)
    with pytest.raises(StorageError, match="no answer"):
        view.record(AttemptStarted(claim(2), None), BEGUN_S)
    view.record(ReportEvent(record(2, 3, 10.0, score=1.0)), BEGUN_S)
    assert "**running** · attempt 2 · step 3" in page_of(view)


def test_the_outcomes_of_many_earlier_attempts_are_read_at_once(store):
    class Meeting(WrappedStorage):
        def _do(self, verb, *args, **kwargs):
            if verb == "get_bytes" and args[0].startswith(store.layout.outcomes):
                barrier.wait(30)
            return super()._do(verb, *args, **kwargs)

    barrier = threading.Barrier(32)
    for number in range(1, 33):
        store.records.put(store.layout.attempt(number, f"{number:08x}"), asdict(replace(claim(number), token=f"{number:08x}")))
        write_outcome(store, Outcome(number, "preempted"))
    view = view_of(replace(store, storage=Meeting(store.storage)), AttemptStarted(claim(33), None))
    assert [log.outcome and log.outcome.attempt for log in view.logs] == [*range(1, 33), None]


def leave_night(store, number, ending="completed"):
    claimed = claim_attempt(store, Owner.current(f"night-{number}"), world_size=2)
    assert (claimed.number, claimed.lineage) == (number, number)
    history = HistoryWriter(store, number)
    history.append(record(number, 0, score=number))
    history.close()
    if ending is not None:
        write_outcome(store, Outcome(number, ending))


@pytest.mark.parametrize("num_nights", [25, 50])
def test_a_fresh_start_is_shown_by_itself_whatever_was_trained_before(store, tmp_path, num_nights):
    """As each night by a schedule: every start read the claims, outcomes and reports of all nights, and drew their curves."""
    Attempt(store).session().report({"score": 1}, folder(tmp_path / "c", model="1"))
    store.attach_metrics(store.list()[0].id, {"error": 0.1})
    for number in range(2, num_nights):
        leave_night(store, number)
    leave_night(store, num_nights, ending=None)
    tonight = claim_attempt(store, Owner.current("tonight"), world_size=2)
    counted = CountingStorage(store.storage)
    view = view_of(replace(store, storage=counted), AttemptStarted(tonight, None))
    assert counted.taken()["get_bytes"] == 21 + 19 + 2, "claims, outcomes, the manifest and its evaluation"
    view.record(ReportEvent(record(tonight.number, 0, score=0.5)), BEGUN_S)
    assert [log.number for log in view.logs] == [tonight.number]
    assert [curve.kept(resume_points(view.logs)) for curve in view.curves.sorted(None)] == [[(0, 0.5)]]
    assert [it.id for it in view.checkpoints.held] == [it.id for it in store.list()]
    assert "Best:" not in page_of(view, replace(CONTEXT, first_metric="eval/error"))
    view.record(RanksStarted(tonight.number, {0: UUID(int=1)}), BEGUN_S)
    view.record(AttemptEnded(Outcome(tonight.number, "failed", "tonight", "user", "ValueError: x")), BEGUN_S)
    assert "```\n\nNothing was committed yet.\n" in page_of(view)
    assert [it.owner.flow_run_id for it in view.lost_before] == [f"night-{num_nights}"]


def test_whether_the_processes_of_attempts_that_are_over_live_is_asked_of_no_kernel(store, monkeypatch):
    """A page asked five times per attempt, several times over."""
    for number in (1, 2):
        claim_attempt(store, Owner.current("a"), world_size=2, lineage=1)
        write_outcome(store, Outcome(number, "failed"))
    monkeypatch.setattr(Owner, "is_process_gone", None)
    view = view_of(store, AttemptStarted(replace(claim(4), lineage=1), None))
    assert [log.status.state for log in view.logs] == ["failed", "failed", "running"]
    assert "**running** · attempt 4" in page_of(view)


def test_what_is_left_does_not_depend_on_a_clock_that_is_set(store):
    view = view_of(store, clock=iter([0.0, 10.0]).__next__)
    view.record(AttemptStarted(claim(1), None), BEGUN_S)
    for at_s, share in ((0.0, 0.2), (-600.0, 0.6)):
        view.record(ReportEvent(record(1, 0, score=1.0), share), BEGUN_S + at_s)
    assert view.left_s == pytest.approx(10.0)


def test_the_pace_of_the_newest_attempt_tells_steps_per_second_and_what_is_left(store):
    view = view_of(
        store,
        AttemptStarted(claim(1), None),
        *(ReportEvent(record(1, step, float(step), score=1.0), step / 10) for step in range(3)),
        AttemptStarted(claim(2, 50.0), None),
        ReportEvent(record(2, 2, 52.0, score=1.0), 0.2),
        clock=iter([1.0, 2.0, 3.0, 5.0, 8.0]).__next__,
    )
    assert view.left_s is None
    view.record(ReportEvent(record(2, 6, 54.0, score=3.0), 0.6), BEGUN_S + 8)  # 0.4 in the 3 s since the report before
    page = page_of(view, replace(CONTEXT, first_metric="score"))
    assert "step 6 · 2 steps/s · 60% done · about 3.0 s left" in page
    assert "Best: **score 3** at step 6." in page
    view.record(AttemptEnded(Outcome(2, "completed")), BEGUN_S + 9)
    assert "left" not in page_of(view)


def test_the_setup_and_how_to_use_the_best_checkpoint_are_shown(store):
    view = view_of(store, AttemptStarted(claim(1), None), commit(1, 3, score=1.0))
    use = GpuUse(GpuSample(3, "GPU-3", "NVIDIA H200", 0.93, 2**35, 2**37), 2, 1.5)
    restart = Restart(2, UUID(int=1), "first|one")
    config = {"lr": 0.1, "sizes": (1, 2), "nan": float("nan"), "odd": object, "corpus": "/data/Übungstexte"}
    setup = Setup("s3://bucket/a b", config, "8 CPUs", restart, (use,))
    page = page_of(view, replace(CONTEXT, first_metric="score", setup=setup))
    assert f"Restart 2 of [first\\|one]({restart.url}), which crashed, by an automation." in page
    assert "| 3 | NVIDIA H200 | 93% | 75% | 32.0 GiB of 128.0 GiB |" in page
    assert "2 ranks led from `host`: 8 CPUs" in page
    assert '"lr": 0.1' in page
    assert '"corpus": "/data/Übungstexte"' in page
    assert "\nresult = Result.from_storage('s3://bucket/a b', 'run')\ncheckpoint = result.best_checkpoints[0][0]\n" in page
    assert "$ prefect-torch pull 's3://bucket/a b' run best ./model" in page
    unscored = page_of(view, replace(CONTEXT, setup=setup))
    assert "The latest checkpoint in Python" in unscored
    assert "\nresult = Result.from_storage('s3://bucket/a b', 'run')\ncheckpoint = result.checkpoint\n" in unscored
    assert "$ prefect-torch pull 's3://bucket/a b' run latest ./model" in unscored


def test_a_checkpoint_whose_score_is_nan_is_not_called_the_best(store):
    view = view_of(store, AttemptStarted(claim(1), None), commit(1, 3, score=float("nan")))
    page = page_of(view, replace(CONTEXT, first_metric="score", setup=Setup("/store", None, "8 CPUs")))
    assert "The latest checkpoint in Python" in page
    assert "best" not in page
