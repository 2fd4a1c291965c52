"""The line that a completed training leaves in the list of runs, and what its log warns of."""

import logging
import math
import threading
from io import StringIO
from types import SimpleNamespace

import pytest
from crash_points import open_run
from flipping_storage import FlippingStorage
from prefect.logging.handlers import PrefectConsoleHandler
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.reporting.events import ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.flows import CheckpointConfig, Result, RunConfig, train
from prefect_torch.flows.monitoring import messages, temporary_storage
from prefect_torch.flows.monitoring.messages import LocationObserver
from prefect_torch.flows.monitoring.pages.runs_page import read_runs
from prefect_torch.flows.result import read_result, summarize
from prefect_torch.tasks import run_logs
from prefect_torch.tasks.options.storage import configured_storage
from prefect_torch.tasks.run_logs import library_logs_in_run
from prefect_torch.tasks.training import attempt_leader
from prefect_torch.tasks.training.observers import AttemptEnded, AttemptStarted
from ranks import Attempt as RankAttempt
from ranks import folder

CHECKPOINT = "/store/run/checkpoints/000001-00000009-0a1b2c3d"


def result_of(*reports, attempts=1, logged=None):
    history = [MetricRecord(1, step, metrics, None, "2026-01-01T00:00:00+00:00") for step, metrics in reports]
    if logged is not None:
        history.append(MetricRecord(1, *logged, None, "2026-01-01T00:00:00+00:00", is_logged=True))
    return Result(history[-1].metrics if history else {}, None, [], history, "/store/run", attempts)


LOSSES = [(step, {"epoch": step, "val": {"loss": abs(143 - step) + 0.0013}}) for step in range(150)]


BY_LOSS_ALONE = RetentionPolicy(2, "loss", "min")
BY_HIGHEST_ALONE = RetentionPolicy(2, "loss", "max")
BY_LOSS, BY_HIGHEST = RetentionPolicy(2, "val/loss", "min"), RetentionPolicy(2, "val/loss", "max")
ODD = [(100, {}), (200, {"loss": float("nan")})]


@pytest.mark.parametrize(
    ("result", "policy", "line"),
    [
        (result_of(*LOSSES, attempts=2), BY_LOSS, "150 steps, val/loss 0.0013 (best at 143), 2 attempts"),
        (result_of(*LOSSES), BY_HIGHEST, "150 steps, val/loss 143 (best at 0), 1 attempt"),
        (result_of(*LOSSES), RetentionPolicy(), "150 steps, epoch 149, 1 attempt"),
        (result_of(*LOSSES), RetentionPolicy(1, "missing"), "150 steps, 1 attempt"),
        (
            result_of((0, {"loss": 3}), (1, {"loss": 1}), (1, {"loss": 2})),
            BY_LOSS_ALONE,
            "2 steps, loss 2 (best at 1), 1 attempt",
        ),
        (result_of((0, {"loss": 3}), logged=(500, {"loss": 1})), BY_LOSS_ALONE, "1 step, loss 3 (best at 0), 1 attempt"),
        (result_of(*ODD), RetentionPolicy(1, "loss"), "200 steps, no finite loss, 1 attempt"),
        (result_of((5, {"loss": 1}), *ODD), BY_LOSS_ALONE, "200 steps, loss 1 (best at 5), nan at the end, 1 attempt"),
        (
            result_of((5, {"loss": 1}), (6, {"loss": math.inf})),
            BY_HIGHEST_ALONE,
            "6 steps, loss 1 (best at 5), inf at the end, 1 attempt",
        ),
        (result_of((0, {"done": True})), RetentionPolicy(), "1 step, 1 attempt"),
        (result_of(), RetentionPolicy(), "no report, 1 attempt"),
    ],
)
def test_a_completed_training_is_one_line(result, policy, line):
    assert summarize(result, policy) == line


def test_the_line_of_a_fresh_start_is_of_that_alone(run):
    """What a night had not reached was that of the nights before, and so was its best value."""
    policy = CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order="min")
    run = run.model_copy(update={"resume": "never"})
    train("trainings:train_epochs", {"epochs": 4}, run=run, checkpoint=policy)
    state = train("trainings:train_epochs", {"epochs": 2}, run=run, checkpoint=policy, return_state=True)
    assert state.message == "2 steps, loss 0.5 (best at 1), 1 attempt"
    result = Result.from_storage(run.storage, run.name)
    assert [(it.attempt, it.step) for it in result.history] == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    assert (result.attempts, result.first_attempt) == (2, 2)
    assert ">run</b>" in result._repr_html_()
    assert "completed, 1 attempt, 2 reports up to step 1</p>" in result._repr_html_()
    (row,), _ = read_runs(configured_storage(run.storage))
    assert (row.step, row.best, row.points) == (1, 0.5, ((0, 1.0), (1, 0.5)))


def test_the_line_of_a_fresh_start_takes_no_evaluation_of_what_came_before(tmp_path):
    store, anew = CheckpointStore.open(tmp_path, "run"), []
    for value in (0.1, 0.3):
        attempt = RankAttempt(store)
        attempt.session().report({"loss": 1}, folder(tmp_path / f"c{value}", model="1"))
        store.attach_metrics(store.list()[-1].id, {"error": value})
        anew.append(summarize(read_result(store), RetentionPolicy(2, "eval/error", "min")))
    assert anew == ["1 step, eval/error 0.1 (best at 0), 1 attempt", "1 step, eval/error 0.3 (best at 1), 1 attempt"]


@pytest.mark.parametrize(
    ("resumed_from", "reports", "ending", "warnings"),
    [
        (CHECKPOINT, 0, "completed", 1),
        (CHECKPOINT, 1, "completed", 0),
        (None, 0, "completed", 0),
        (CHECKPOINT, 0, "preempted", 0),
    ],
)
def test_a_resumed_training_that_reports_nothing_is_warned_of(
    tmp_path, monkeypatch, caplog, resumed_from, reports, ending, warnings
):
    monkeypatch.setattr(messages, "get_run_logger", lambda: logging.getLogger("of-a-run"))
    attempt = Attempt(2, "token", Owner.current(), 1, resumed_from, 1, "2026-01-01T00:00:00+00:00")
    record = MetricRecord(2, 10, {}, None, "2026-01-01T00:00:00+00:00")
    observer = LocationObserver(job_in(tmp_path))
    for event in (AttemptStarted(attempt, resumed_from), *[ReportEvent(record)] * reports, AttemptEnded(Outcome(2, ending))):
        observer.observe(event)
    told = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    assert len(told) == warnings
    assert all(it.startswith("attempt 2 resumed from step 9 and completed without a report: ") for it in told)


@pytest.mark.parametrize(
    ("folder", "warnings"),
    [
        ("tmpc1rqd3_8prefect/code-main/checkpoints", 1),
        ("prefect-flow-run-c1rqd3_8/code-main/checkpoints", 1),
        ("tmpc1rqd3_8/checkpoints", 0),
        ("prefect-flow-runs/checkpoints", 0),
    ],
)
def test_a_storage_that_prefect_deletes_with_the_flow_run_is_warned_of(tmp_path, monkeypatch, caplog, folder, warnings):
    for module in (messages, temporary_storage):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("of-a-run"))
    observer = LocationObserver(job_in(tmp_path / folder))
    for number in (1, 2):
        observer.observe(
            AttemptStarted(Attempt(number, "token", Owner.current(), 1, None, 1, "2026-01-01T00:00:00+00:00"), None)
        )
    told = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
    assert [line.startswith(f"{tmp_path / folder}/run is in a temporary directory") for line in told] == [True] * warnings


def job_in(storage):
    store = CheckpointStore.open(storage, "run")
    return SimpleNamespace(run="run", run_config=RunConfig(storage=str(storage)), store=store)


def test_trials_that_run_at_once_each_have_the_lines_about_their_checkpoints(monkeypatch, caplog):
    """The level of a logger, which is WARNING here, is one for all threads."""
    monkeypatch.setattr(run_logs, "get_run_logger", lambda: logging.getLogger(f"of-{threading.current_thread().name}"))
    library, restore = logging.getLogger("prefect_torch.ckpt"), logging.getLogger("prefect_torch.ckpt.restore")
    for logger, level in (("", logging.WARNING), ("of-first", logging.INFO), ("of-second", logging.INFO)):
        caplog.set_level(level, logger)
    is_first_within, are_both_within, is_first_over = (threading.Event() for _ in range(3))

    def run_first():
        with library_logs_in_run():
            is_first_within.set()
            are_both_within.wait(60)
            restore.info("verified")
        is_first_over.set()

    def run_second():
        is_first_within.wait(60)
        with library_logs_in_run():
            are_both_within.set()
            is_first_over.wait(60)
            restore.info("verified")

    trials = [threading.Thread(target=run, name=name) for run, name in ((run_first, "first"), (run_second, "second"))]
    for trial in trials:
        trial.start()
    for trial in trials:
        trial.join()
    assert [it.name for it in caplog.records if it.name.startswith("of-")] == ["of-first", "of-second"]
    assert library.level == logging.NOTSET
    assert not library.handlers


def test_a_line_about_checkpoints_is_shown_once(monkeypatch):
    """Prefect's console is on the root logger, too, and showed each warning twice."""
    console = PrefectConsoleHandler(stream=StringIO())
    root, quarantine = logging.getLogger(), logging.getLogger("prefect_torch.ckpt.runs.quarantine")
    monkeypatch.setattr(run_logs, "get_run_logger", lambda: logging.getLogger("of-a-run"))
    root.addHandler(console)
    try:
        with library_logs_in_run():
            quarantine.warning("damaged")
            other = threading.Thread(target=quarantine.warning, args=["of another thread"])
            other.start()
            other.join()
        quarantine.warning("of no run")
    finally:
        root.removeHandler(console)
    shown = console.console.file.getvalue()
    assert [shown.count(text) for text in ("damaged", "of another thread", "of no run")] == [1, 1, 1]


def test_what_is_said_of_checkpoints_before_and_after_the_ranks_is_told_in_the_runs_log(monkeypatch, caplog, tmp_path):
    """Such as the output of a failing sync tool, or what a start leaves out: it was in the output of the process alone."""

    def tell(name):
        call = getattr(attempt_leader, name)

        def telling(*args):
            logging.getLogger("prefect_torch.ckpt.storage").warning("during %s", name)
            return call(*args)

        monkeypatch.setattr(attempt_leader, name, telling)

    for name in ("claim", "RunRecorder", "record_outcome"):
        tell(name)
    train("trainings:train_epochs", {"epochs": 1}, run=RunConfig(name="run", storage=str(tmp_path)))
    told = [it.getMessage() for it in caplog.records if it.name in ("prefect.task_runs", "prefect.flow_runs")]
    assert [line for line in told if line.startswith("during ")] == [
        "during claim",
        "during RunRecorder",
        "during record_outcome",
    ]


def test_a_bit_that_flips_as_several_files_are_verified_is_told_in_the_runs_log(monkeypatch, caplog, tmp_path):
    """Each file is verified in a thread of its own."""
    monkeypatch.setattr(run_logs, "get_run_logger", lambda: logging.getLogger("of-a-run"))
    store = open_run(LocalStorage(tmp_path / "store"))
    RankAttempt(store).session().report({}, folder(tmp_path / "c", a=b"first", b=b"second"))
    (manifest,) = store.list()
    flipping = FlippingStorage(store.storage, None)
    with library_logs_in_run():
        open_run(flipping).verify(manifest)
    told = [it.getMessage() for it in caplog.records if it.name == "of-a-run"]
    assert len([line for line in told if line.endswith("a connection or a memory here flips bits")]) == flipping.fired > 1
