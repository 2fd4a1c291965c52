"""How the run of a trial has ended, by its storage, and the deletion of its checkpoints."""

import numpy as np
import pytest
import torch
from crash_points import crash_points, open_run
from memory_storage import MemoryStorage
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows.monitoring.sweeps.trial_curves import read_curve
from prefect_torch.flows.sweeps.trial_end import judge
from prefect_torch.flows.sweeps.trial_storage import delete_all, end_of_returned
from ranks import Attempt, folder


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


def test_the_checkpoint_of_an_ended_trial_that_is_read_in_place_is_deleted_by_the_next_call(store, tmp_path):
    session = Attempt(store).session()
    for score in (1, 2):
        session.report({"score": score}, folder(tmp_path / "c", model=str(score)))
    newest = store.latest()
    with store.checkpoint(newest).as_directory():
        assert delete_all(store) == {newest.id}
        assert store.keys(store.layout.checkpoints) == [store.layout.data(newest.id, "model")]
        assert delete_all(store) == {newest.id}
    assert delete_all(store) == set()
    assert store.keys(store.layout.checkpoints) == []


def test_a_crash_at_any_operation_of_the_deletion_of_an_ended_trial_leaves_nothing_to_the_next_call(tmp_path):
    def prepare(number, after):
        storage = MemoryStorage()
        session = Attempt(open_run(storage)).session()
        for score in (1, 2):
            session.report({"score": score}, folder(tmp_path / f"{number}-{after}", model=str(score)))
        store = open_run(storage)
        store.attach_metrics(store.latest().id, {"score": 3})
        return storage

    fired = 0
    for faulty in crash_points(prepare, lambda faulty: delete_all(open_run(faulty))):
        fired += faulty.fired
        assert delete_all(open_run(faulty.inner)) == set()
        left = {key.split("/")[1] for key in (info.key for info in faulty.inner.list("run/"))}
        assert left.isdisjoint({"checkpoints", "manifests", "metadata"})
    assert fired > 5
