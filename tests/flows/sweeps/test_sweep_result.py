"""The best trials of a sweep's result."""

import json
import pickle

import pytest
from prefect_torch.ckpt import MalformedRecordError
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_keys, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.flows import Result, SweepResult, Trial, sweep_result
from prefect_torch.flows.monitoring.sweeps.view import SweepView
from prefect_torch.flows.sweeps.definition import store_definition
from prefect_torch.flows.sweeps.journal.events import Cloned, Source, TrialEnded, TrialReported, TrialResumed, encode_event
from prefect_torch.flows.sweeps.journal.journal import Journal
from prefect_torch.flows.sweeps.journal.stored_trials import events_of, read_trials
from stored_sweeps import events_of_a_sweep, store_sweep


def result(*metrics, states=None, wanted=("loss", "time"), modes=("min", "max")) -> SweepResult:
    states = states or ["completed"] * len(metrics)
    trials = [Trial(number, {}, it, states[number], None, f"s/{number}", "/s") for number, it in enumerate(metrics)]
    return SweepResult("s", "/s/s", trials, list(wanted), list(modes))


def numbers(trials):
    return [trial.number for trial in trials]


def test_the_best_trials_of_several_metrics_are_those_that_none_beats_in_all():
    low, high = {"loss": 1.0, "time": 1.0}, {"loss": 3.0, "time": 9.0}
    beaten, between = {"loss": 3.0, "time": 8.0}, {"loss": 2.0, "time": 5.0}
    assert numbers(result(low, beaten, high, between).best_trials) == [0, 2, 3]
    assert numbers(result(low, dict(low)).best_trials) == [0, 1]


def test_the_best_trials_of_one_metric_are_all_that_have_its_best_value():
    losses = [{"loss": value} for value in (2.0, 1.0, float("nan"), 1.0)]
    assert numbers(result(*losses, wanted=["loss"], modes=["min"]).best_trials) == [1, 3]
    assert result(*losses, wanted=["loss"], modes=["min"]).best.number == 1


@pytest.mark.parametrize(
    ("of", "name", "written"),
    [
        (result({"loss": 1.0}), "get_best_result", ", which is Ray's: write best, or get_best_trial(metric, mode), a trial"),
        (
            result({"loss": 1.0}),
            "best_checkpoint",
            ", which is Ray's: write best.result.get_best_checkpoint(metric, mode); best.checkpoint is the latest",
        ),
        (result({"loss": 1.0}), "num_errors", ", which is Ray's: write len(errors)"),
        (result({"loss": 1.0})[0], "metrics_dataframe", ": write trial.result.metrics_dataframe"),
        (result({"loss": 1.0})[0], "last_result", ": write trial.metrics"),
        (
            Result({}, None, [], [], "/s/s", 1),
            "filesystem",
            ", which is Ray's: write CheckpointStore.open(storage, run).storage",
        ),
        (Result({}, None, [], [], "/s/s", 1), "_repr_latex_", ""),  # notebooks ask for it
    ],
)
def test_an_attribute_of_rays_results_is_answered_with_what_to_write(of, name, written):
    with pytest.raises(AttributeError) as caught:
        getattr(of, name)
    assert str(caught.value).startswith(f"{type(of).__name__!r} object has no attribute {name!r}{written}")
    assert pickle.loads(pickle.dumps(of)) == of


def test_a_trial_that_failed_or_lacks_a_metric_is_not_among_the_best():
    best, other = {"loss": 0.0, "time": 9.0}, {"loss": 1.0, "time": 1.0}
    found = result(best, {"loss": 0.0}, other, {"loss": "low", "time": 9.0}, states=["failed", *["completed"] * 3])
    assert numbers(found.best_trials) == [2]
    assert found.get_best_trial("loss", "min").number == 1
    with pytest.raises(ValueError, match="no trial of sweep 's' has a metric 'accuracy' that is a number"):
        found.get_best_trial("accuracy", "max")


def test_what_is_infinite_is_no_score_and_breaks_no_notebook():
    losses = enumerate((float("-inf"), 3.0, float("inf"), float("nan"), 4.0))
    trials = [
        Trial(number, {"lr": 0.1 * number}, {"loss": loss}, "completed", None, f"s/{number}", "/s") for number, loss in losses
    ]
    for mode, best in (("min", 1), ("max", 4)):
        found = SweepResult("s", "/s/s", trials, ["loss"], [mode])
        assert found.best.number == best
        assert "<img" in found._repr_html_()


def test_it_is_iterated_over_by_trial():
    found = result({"loss": 1.0}, {"loss": 2.0})
    assert (len(found), [trial.number for trial in found], found[1].number, bool(result())) == (2, [0, 1], 1, True)


def test_a_sweep_whose_directory_has_another_name_has_its_trials_there(tmp_path):
    store_sweep(LocalStorage(tmp_path))
    before = SweepResult.from_storage(tmp_path, "digits")
    (tmp_path / "digits").rename(tmp_path / "moved")
    after = SweepResult.from_storage(tmp_path, "moved")
    assert [trial.run for trial in after] == [f"moved/{trial.run.partition('/')[2]}" for trial in before]
    assert [trial.result.metrics for trial in after] == [trial.metrics for trial in before]
    cloned = Cloned("digits/trial-0001-0123abcd", {"run": "digits/x"}, Source(0, "digits/trial-0000-0123abcd", "an-id"))
    entry = encode_event(TrialReported(1, 1, 1.0, None, {}, "running", cloned=cloned))
    (event,), _ = events_of(Run.open(LocalStorage(tmp_path), "moved"), {0: entry})
    assert event.cloned == Cloned(
        "moved/trial-0001-0123abcd", {"run": "digits/x"}, Source(0, "moved/trial-0000-0123abcd", "an-id")
    )


def test_a_trial_that_waits_to_continue_from_another_ones_checkpoint_has_the_config_of_its_metrics(tmp_path):
    """So it stays if the time budget of the sweep is used up by then."""
    run, definition = store_sweep(LocalStorage(tmp_path))
    before = SweepResult.from_storage(tmp_path, "digits")[4]
    cloned = Cloned("digits/trial-0004-0123abcd", {"lr": 7}, Source(3, before.run, "another-id"))
    taken = TrialReported(4, 1, 0.1, None, {"loss": 0.1}, "paused", cloned=cloned)
    Journal(run, *claim_keys(run), len(events_of_a_sweep())).append(encode_event(taken))
    shown = SweepResult.from_storage(tmp_path, "digits").best
    assert (shown.number, shown.state, shown.metrics) == (4, "paused", {"loss": 0.1})
    assert (shown.run, shown.config) == (before.run, before.config)
    view = SweepView(run, definition)
    view.record(read_trials(run))
    assert [(it.run, it.parameters["lr"]) for it in view.trials() if it.number == 4] == [(before.run, before.config["lr"])]


def test_a_trial_that_goes_on_from_another_ones_checkpoint_has_the_config_of_its_metrics_until_it_has_new_ones(tmp_path):
    run, definition = store_sweep(LocalStorage(tmp_path))
    before, view = SweepResult.from_storage(tmp_path, "digits")[4], SweepView(run, definition)

    def shown():
        view.record(read_trials(run))
        of_page = [(it.run, it.parameters["lr"], it.metrics) for it in view.trials() if it.number == 4]
        view.read()
        of_page += [(it.run, it.parameters["lr"], it.metrics) for it in view.trials() if it.number == 4]
        found = SweepResult.from_storage(tmp_path, "digits")[4]
        return {found.state}, [(found.run, found.config["lr"], found.metrics), *of_page]

    shown()
    cloned = Cloned("digits/trial-0004-0000000b", {"lr": 7}, Source(3, before.run, "another-id"))
    taken = TrialReported(4, 1, 0.9, None, before.metrics, "paused", cloned=cloned)
    journal = Journal(run, *claim_keys(run), len(events_of_a_sweep()))
    for event in (taken, TrialResumed(4)):
        journal.append(encode_event(event))
    assert shown() == ({"running"}, [(before.run, before.config["lr"], before.metrics)] * 3)
    begun = Run.open(LocalStorage(tmp_path), "digits/trial-0004-0000000b")
    history = HistoryWriter(begun, claim_attempt(begun, Owner.current(), world_size=1).number)
    assert shown() == ({"running"}, [(before.run, before.config["lr"], before.metrics)] * 3)
    history.append(MetricRecord(1, 2, {"loss": 0.2}, None, "2026-01-02T00:00:00+00:00"))
    history.flush()
    shown()
    assert shown() == ({"running"}, [("digits/trial-0004-0000000b", 7, {"loss": 0.2})] * 3)


def test_a_journal_that_lacks_ends_of_a_completed_sweep_is_told(tmp_path, caplog):
    store_sweep(LocalStorage(tmp_path), ending="failed")
    assert SweepResult.from_storage(tmp_path, "digits")[4].state == "running"
    assert not caplog.records
    write_outcome(Run.open(LocalStorage(tmp_path), "digits"), Outcome(1, "completed"))
    SweepResult.from_storage(tmp_path, "digits")
    assert "sweep 'digits' has completed, but trial 4 is running in its journal, whose last entries are lost" in caplog.text


def test_a_sweep_that_completes_while_it_is_read_is_read_whole(tmp_path, monkeypatch, caplog):
    run, _ = store_sweep(LocalStorage(tmp_path))
    read_status = sweep_result.read_status

    def completes(run):
        Journal(run, *claim_keys(run), len(events_of_a_sweep())).append(
            encode_event(TrialEnded(4, "completed", None, {"loss": 0.4}))
        )
        write_outcome(run, Outcome(1, "completed"))
        return read_status(run)

    monkeypatch.setattr(sweep_result, "read_status", completes)
    assert [SweepResult.from_storage(tmp_path, run.name)[4].state, *caplog.records] == ["completed"]


def test_what_a_sweep_searches_is_not_believed_with_one_changed_digit(tmp_path):
    run, definition = store_sweep(LocalStorage(tmp_path))
    stored = run.storage.get_bytes(run.layout.sweep)
    run.storage.put_bytes(run.layout.sweep, stored.replace(b'"min"', b'"max"'))
    with pytest.raises(MalformedRecordError, match=r"sweep\.json cannot be read.*start the sweep again as before"):
        SweepResult.from_storage(tmp_path, "digits")
    store_definition(run, definition)
    assert SweepResult.from_storage(tmp_path, "digits").best.metrics == {"loss": 0.5}
    run.records.put_json(run.layout.sweep, {name: value for name, value in json.loads(stored).items() if name != "digest"})
    assert SweepResult.from_storage(tmp_path, "digits").best.metrics == {"loss": 0.5}  # an older version wrote it
    with pytest.raises(FileNotFoundError, match="there is no sweep 'other'"):
        SweepResult.from_storage(tmp_path, "other")
