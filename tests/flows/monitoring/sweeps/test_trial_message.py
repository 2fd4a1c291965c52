"""What the list of runs says of a trial."""

import pytest
from prefect_torch.ckpt.reporting.events import ReportEvent
from prefect_torch.ckpt.runs.attempts import Outcome
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.flows.monitoring.sweeps.trial_message import TrialMessageObserver
from prefect_torch.tasks.training.observers import AttemptEnded

TIME = "2026-01-01T00:00:00+00:00"


def reported(step, **metrics):
    return ReportEvent(MetricRecord(1, step, metrics, None, TIME), None)


def ended(ending):
    return AttemptEnded(Outcome(1, ending))


@pytest.mark.parametrize(
    ("events", "summary"),
    [
        ([], "no report"),
        ([reported(8, loss=0.5), reported(9, loss=0.00130004, size={"mb": 7})], "step 9, loss 0.0013, size/mb 7"),
        ([reported(2, loss=1.0)], "step 2, loss 1"),
        ([reported(3, loss=0.9, size={"mb": 7}), ended("stopped")], "stopped by the sweep at step 3, loss 0.9, size/mb 7"),
        ([reported(3, loss=0.9, size={"mb": 7}), ended("completed")], "step 3, loss 0.9, size/mb 7"),
    ],
)
def test_a_trial_is_one_line_with_its_newest_scores(events, summary):
    observer = TrialMessageObserver(["loss", "size/mb"])
    for event in events:
        observer.observe(event)
    assert observer.message() == summary
