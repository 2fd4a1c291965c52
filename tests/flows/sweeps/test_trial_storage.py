"""How the run of a trial has ended, by its storage."""

import numpy as np
import pytest
import torch
from memory_storage import MemoryStorage
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.monitoring.sweeps.trial_curves import read_curve
from prefect_torch.flows.sweeps.trial_end import judge
from prefect_torch.flows.sweeps.trial_storage import end_of_returned


@pytest.fixture
def run():
    storage = MemoryStorage()
    return Run(storage, Layout("run"), StorageSpec(storage.url))


def reported(run, *reports):
    writer = HistoryWriter(run, 1)
    for step, metrics in enumerate(reports):
        writer.append(MetricRecord(1, step, metrics, None, "2026-11-21T00:00:00+00:00"))
    writer.flush()


@pytest.mark.parametrize("last", [{"test_accuracy": 0.9}, {"loss": None, "test_accuracy": 0.9}])
def test_a_metric_counts_that_an_earlier_report_had(run, last):
    reported(run, {"loss": 3.0}, {"loss": 2.0}, last)
    end = judge(end_of_returned(run, None), ["loss", "test_accuracy"])
    assert (end.outcome, end.metrics) == ("completed", {"loss": 2.0, "test_accuracy": 0.9})


@pytest.mark.parametrize("last", [{"loss": {"train": 1.0}}, {"loss": {"val": None, "train": 1.0}}, {"loss": {}}])
def test_a_nested_metric_counts_that_an_earlier_report_had(run, last):
    reported(run, {"loss": {"train": 3.0, "val": 2.0}}, last)
    end = judge(end_of_returned(run, {"loss": {"train": 1.0}}), ["loss/val"])
    assert (end.outcome, end.metrics) == ("completed", {"loss": {"train": 1.0, "val": 2.0}})


def test_a_trial_that_has_reported_nothing_is_told_how(run):
    reason = judge(end_of_returned(run, 3.0), ["loss"]).reason
    assert reason.endswith("; its reports have none at all: call report({'loss': …}), or return such a dict")


def test_what_a_trial_has_instead_of_its_metric_is_text_that_prefect_takes(run):
    reported(run, {"caf\udce9": 3.0})
    assert judge(end_of_returned(run, None), ["loss"]).reason.endswith("; its reports have caf\\udce9")


def test_a_running_trial_has_the_metrics_that_it_would_end_with(run):
    claim_attempt(run, Owner.current(), world_size=1)
    reported(run, {"loss": 3.0}, {"test_accuracy": 0.9})
    assert read_curve(run, "loss").metrics == end_of_returned(run, None).metrics == {"loss": 3.0, "test_accuracy": 0.9}


def test_the_step_of_a_trial_is_that_of_its_reports(run):
    claim_attempt(run, Owner.current(), world_size=1)
    reported(run, {"loss": 3.0}, {"loss": 2.0})
    writer = HistoryWriter(run, 2)
    writer.append(MetricRecord(2, 500, {"lr": 0.1}, None, "2026-11-21T00:00:00+00:00", is_logged=True))
    writer.flush()
    assert read_curve(run, "loss").step == 1


def test_a_returned_dict_is_the_last_report(run):
    reported(run, {"loss": 3.0, "epoch": 1})
    assert end_of_returned(run, {"loss": 1.0}).metrics == {"loss": 1.0, "epoch": 1}
    assert end_of_returned(run, {"loss": None}).metrics == {"loss": 3.0, "epoch": 1}


def test_neither_a_returned_dict_nor_a_logged_metric_is_a_report(run):
    writer = HistoryWriter(run, 1)
    writer.append(MetricRecord(1, 0, {"lr": 0.1}, None, "2026-11-21T00:00:00+00:00", is_logged=True))
    writer.flush()
    assert not end_of_returned(run, {"loss": 1.0}).has_reported
    reported(run, {"loss": 3.0})
    assert end_of_returned(run, None).has_reported


def test_what_is_no_metric_in_a_returned_dict_is_left_out(run):
    reported(run, {"loss": 3.0})
    returned = {"loss": np.float32(0.5), "accuracy": torch.tensor(0.25), "curve": [1.0, 2.0], "model": object(), 3: 4.0}
    assert end_of_returned(run, returned).metrics == {"loss": 0.5, "accuracy": 0.25}
