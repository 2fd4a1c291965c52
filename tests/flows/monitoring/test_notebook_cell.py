"""The progress of a training below the cell of a notebook."""

import xml.etree.ElementTree as ET

from prefect_torch.ckpt.reporting.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.flows.monitoring.notebook_cell import notebook_progress, progress_html
from prefect_torch.flows.monitoring.progress import TrainingProgress
from prefect_torch.tasks.training.observers import AttemptEnded, AttemptStarted

ID = "000001-00000012-0123abcd"


def report(step, share, **metrics):
    return ReportEvent(MetricRecord(1, step, metrics, None, "2026-01-01T00:00:00+00:00"), share)


def recorded(*events):
    times = iter(range(0, 1000, 10))
    progress = TrainingProgress("digits", clock=lambda: float(next(times)))
    for event in events:
        progress.record(event)
    return progress


def test_a_cell_has_a_bar_the_time_left_the_newest_metrics_and_the_newest_checkpoint():
    html = progress_html(recorded(report(1, 0.25, loss=2.0), report(2, 0.5, loss=1.0), CommitEvent(ID, 2, {}, 2048, 0.5)))
    root = ET.fromstring(html)  # well-formed
    assert root.find(".//progress").get("value") == "0.5000"
    head, metrics, checkpoint = ["".join(line.itertext()) for line in root]
    assert " ".join(head.split()) == "digits 50% · step 2 · 2 reports · 30 s · 20 s left"
    assert metrics == "loss 1"
    assert checkpoint == f"checkpoint {ID}  step 2  2.0 KiB in 0.5 s  (1 committed)"


def test_a_training_that_tells_no_progress_has_no_bar():
    assert "<progress" not in progress_html(recorded(report(1, None, loss=2.0)))


def test_what_is_reported_is_escaped_and_a_failure_is_red():
    failed = AttemptEnded(Outcome(1, "failed", None, "user", "ValueError: <b>\n\nTraceback"))
    begun = AttemptStarted(Attempt(2, "t", Owner.current(), 1, None, 1, "2026-01-01T00:00:00+00:00"), f"a/{ID}")
    root = ET.fromstring(progress_html(recorded(report(1, None, **{"<i>": 1.0}), failed, begun)))
    texts = {"".join(line.itertext()): line.get("style") for line in root}
    assert "<i> 1" in texts
    assert texts["attempt 1 failed: ValueError: <b>"] == "color:#e0457b"
    assert texts[f"attempt 2 resumes from {ID}"] == "color:#16a34a"


def test_there_is_none_outside_of_a_notebook():
    assert notebook_progress("digits") == ()
