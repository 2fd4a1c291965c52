"""What the list of runs says of a trial."""

import pytest
from prefect_torch.ckpt.reporting.events import ReportEvent
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.flows.monitoring.sweeps.trial_message import TrialMessageObserver

TIME = "2026-01-01T00:00:00+00:00"


def reported(step, **metrics):
    return ReportEvent(MetricRecord(1, step, metrics, None, TIME), None)


@pytest.mark.parametrize(
    ("reports", "state", "message"),
    [
        ([], "running", "no report"),
        ([reported(8, loss=0.5), reported(9, loss=0.00130004, size={"mb": 7})], "running", "step 9, loss 0.0013, size/mb 7"),
        ([reported(2, loss=1.0)], "running", "step 2, loss 1"),
        ([reported(8, size={"mb": 7}), reported(9, loss=1.0, size={"gb": 0})], "running", "step 9, loss 1, size/mb 7"),
        ([reported(3, loss=0.9)], "paused", "paused at step 3, loss 0.9"),
        ([reported(3, loss=0.9)], "stopped", "stopped at step 3, loss 0.9"),
        ([reported(9, loss=0.9)], "completed", "step 9, loss 0.9"),
    ],
)
def test_a_trial_is_one_line_with_its_newest_scores(reports, state, message):
    observer = TrialMessageObserver(["loss", "size/mb"])
    for event in reports:
        observer.observe(event)
    assert observer.message(state) == message


def test_what_a_function_returns_counts_as_its_last_report():
    observer = TrialMessageObserver(["loss", "size/mb"])
    assert observer.message("running", {"loss": 0.5, "curve": [1.0]}) == "loss 0.5"
    observer.observe(reported(9, loss=0.9, size={"mb": 7}))
    assert observer.message("running", {"loss": 0.5}) == "step 9, loss 0.5, size/mb 7"
    assert observer.message("running", "a text") == "step 9, loss 0.9, size/mb 7"
