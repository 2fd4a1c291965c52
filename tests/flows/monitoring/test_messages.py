"""The line that a completed training leaves in the list of runs."""

import pytest
from prefect_torch.ckpt import RetentionPolicy
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.flows import Result
from prefect_torch.flows.monitoring.messages import summarize


def result_of(*reports, attempts=1):
    history = [MetricRecord(1, step, metrics, None, "2026-01-01T00:00:00+00:00") for step, metrics in reports]
    return Result(history[-1].metrics if history else {}, None, [], history, "/store/run", attempts)


LOSSES = [(step, {"epoch": step, "val": {"loss": abs(143 - step) + 0.0013}}) for step in range(150)]


BY_LOSS, BY_HIGHEST = RetentionPolicy(2, "val/loss", "min"), RetentionPolicy(2, "val/loss", "max")
ODD = [(100, {}), (200, {"loss": float("nan")})]


@pytest.mark.parametrize(
    ("result", "policy", "line"),
    [
        (result_of(*LOSSES, attempts=2), BY_LOSS, "150 steps, val/loss 0.0013 (best at 143), 2 attempts"),
        (result_of(*LOSSES), BY_HIGHEST, "150 steps, val/loss 143 (best at 0), 1 attempt"),
        (result_of(*LOSSES), RetentionPolicy(), "150 steps, epoch 149, 1 attempt"),
        (result_of(*LOSSES), RetentionPolicy(1, "missing"), "150 steps, 1 attempt"),
        (result_of(*ODD), RetentionPolicy(1, "loss"), "200 steps, loss nan (best at 200), 1 attempt"),
        (result_of((0, {"done": True})), RetentionPolicy(), "1 step, 1 attempt"),
        (result_of(), RetentionPolicy(), "no report, 1 attempt"),
    ],
)
def test_a_completed_training_is_one_line(result, policy, line):
    assert summarize(result, policy) == line
