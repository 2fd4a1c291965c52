"""The page of a sweep, and what it is made from: its view, its curves, the importance of its parameters."""

import base64
import html
import math
import random
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from memory_storage import MemoryStorage
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.parallel import AT_ONCE
from prefect_torch.flows import SweepResult
from prefect_torch.flows.monitoring.sweeps import view as views
from prefect_torch.flows.monitoring.sweeps.coordinates import draw_coordinates
from prefect_torch.flows.monitoring.sweeps.page import SweepContext, write_sweep
from prefect_torch.flows.monitoring.sweeps.parameters import at_equal_steps, importances, parameters_of, varied
from prefect_torch.flows.monitoring.sweeps.summary import summarize_sweep
from prefect_torch.flows.monitoring.sweeps.trial_chart import draw_best
from prefect_torch.flows.monitoring.sweeps.trial_curves import TrialCurve
from prefect_torch.flows.monitoring.sweeps.view import SeenTrial, SweepView, count_states
from prefect_torch.flows.monitoring.text import page_url, shorten
from prefect_torch.flows.sweeps.journal.events import TrialReported
from prefect_torch.flows.sweeps.journal.history import TrialRecord, apply, history_of
from stored_sweeps import FLOW_RUN, events_of_a_sweep, store_sweep, store_trial, trial_run

CONTEXT = SweepContext("./checkpoints", 5, has_rungs=True)


@pytest.fixture
def view():
    run, definition = store_sweep(MemoryStorage())
    made = SweepView(run, definition)
    made.record(history_of(events_of_a_sweep()))
    made.read()
    return made


def pictures(page) -> dict[str, ET.Element]:
    found = re.findall(r"!\[([^\]]*)\]\(data:image/svg\+xml;base64,([^)]*)\)", page)
    return {name: ET.fromstring(base64.b64decode(data)) for name, data in found}


def test_the_table_has_every_trial_the_best_first_with_its_state_rung_and_config(view):
    url = page_url("flow-run", FLOW_RUN)
    page = write_sweep(view, CONTEXT, now_s=0.0)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert rows[0] == "| trial | state | loss | step | rung | lr | net/width |"
    assert rows[2:] == [
        f"| [3]({url}) | completed | 0.5 | 2 | at 1 | 0.0001 | 64 |",
        f"| [4]({url}) | running | 0.9 | 1 |  | 1e-05 | 80 |",
        f"| [0]({url}) | completed | 1 | 2 |  | 0.1 | 16 |",
        f"| [1]({url}) | paused | 2 | 1 | at 1 | 0.01 | 32 |",
        f"| [2]({url}) | failed |  | 0 |  | 0.001 | 48 |",
    ]


def test_below_the_table_is_why_trials_ended_or_wait(view):
    page = write_sweep(view, CONTEXT, now_s=0.0)
    reasons = ["- trial 1 paused: rung 1: 1 of 3 trials go on", r"- trial 2 failed: ValueError: the loss \| is NaN"]
    assert page.endswith("48 |\n\n" + "\n".join(reasons))


def test_a_reason_of_several_trials_is_told_once_whichever_rank_failed():
    failed = [(number, f"rank {number} of attempt 1 on machine a failed: ValueError: NaN") for number in (5, 0, 2)]
    run, definition = store_sweep(MemoryStorage())
    view = SweepView(run, definition)
    view.record({number: TrialRecord(number, f"run-{number}", {}, number, "failed", reason) for number, reason in failed})
    lines = write_sweep(view, CONTEXT, now_s=0.0).splitlines()
    assert [line for line in lines if line.startswith("- ")] == ["- trials 0, 2, 5 failed: ValueError: NaN"]


def test_the_head_counts_the_trials_and_the_best_is_shown_with_the_line_that_loads_it(view):
    page = write_sweep(view, CONTEXT, now_s=0.0)
    assert "**running** · 5 of 5 trials · 1 running · 2 completed · 1 paused · 1 failed" in page
    url = page_url("flow-run", FLOW_RUN)
    assert f"[Trial 3]({url}): **loss 0.5** at step 2, completed, with" in page
    assert "\nresult = SweepResult.from_storage('./checkpoints', 'digits')\ncheckpoint = result.best.checkpoint\n" in page


def test_every_trial_is_a_curve_the_stopped_ones_pale_and_the_best_on_top(view):
    curves = pictures(write_sweep(view, CONTEXT, now_s=0.0))["Curves of all trials"]
    lines = curves.findall(".//{*}polyline")
    assert len(lines) == 4  # a single point is a dot
    assert lines[-1].get("stroke-width") == "2.6"
    assert sorted(line.get("stroke-opacity") for line in lines) == ["0.4", "0.75", "0.9", "1"]


def test_the_best_value_falls_over_the_time_of_all_trials(view):
    picture = ET.fromstring(draw_best(view.trials(), "min"))
    (stairs,) = picture.findall(".//{*}polyline")
    places = [tuple(map(float, pair.split(","))) for pair in stairs.get("points").split()]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted(y for _, y in places)  # down the page: a loss only falls
    assert len(picture.findall(".//{*}circle")) == 5  # 3, 2 and 1 of the first trial, 0.7 and 0.5 of the best


@pytest.mark.parametrize(
    ("lasted_s", "unit", "times"),
    [
        (0.5, "seconds", ["0"]),
        (6, "seconds", ["0", "1", "2", "3", "4", "5", "6"]),
        (299, "seconds", ["0", "50", "100", "150", "200", "250"]),
        (300 * 60, "hours", ["0", "1", "2", "3", "4", "5"]),
        (3000 * 3600, "hours", ["0", "500", "1000", "1500", "2000", "2500", "3000"]),
        (3001 * 3600, "hours", ["0", "1000", "2000", "3000"]),
        (60000 * 3600, "hours", ["0", "10k", "20k", "30k", "40k", "50k", "60k"]),
    ],
)
def test_the_best_value_has_a_few_whole_times_beside_it_however_long_the_sweep_is(lasted_s, unit, times):
    """One that is continued for years, with more trials."""
    curve = TrialCurve(((1, 2.0), (2, 1.0)), {1: 0.0, 2: float(lasted_s)})
    picture = ET.fromstring(draw_best([SeenTrial(0, "run-0", "completed", None, {}, {}, 1.0, curve=curve)], "min"))
    texts = picture.findall(".//{*}text")
    assert f"over the {unit} since" in texts[0].text
    assert [it.text for it in texts if it.get("text-anchor") == "middle"] == times


def test_parallel_coordinates_have_an_axis_per_parameter_and_a_line_per_scored_trial(view):
    picture = pictures(write_sweep(view, CONTEXT, now_s=0.0))["Parallel coordinates"]
    names = [it.text for it in picture.findall(".//{*}text") if it.get("font-weight") == "600" and it.get("y") == "13.0"]
    assert names == ["lr", "net/width", "loss"]
    (crossed,) = [it for it in picture.findall("{*}g") if it.get("mask") == "url(#gaps)"]
    assert len(crossed.findall("{*}polyline")) == 4
    labels = [it for it in picture.findall(".//{*}text") if it.get("text-anchor") == "end"]
    gaps = picture.findall("{*}mask/{*}g/{*}rect")
    assert len(labels) == len(gaps) > 4
    for label, gap in zip(labels, gaps, strict=True):
        assert 0 < float(label.get("y")) - float(gap.get("y")) < float(gap.get("height"))
        assert float(gap.get("x")) + float(gap.get("width")) == pytest.approx(float(label.get("x")) + 2)


def test_few_trials_tell_no_importance_and_the_page_says_how_many_it_takes(view):
    page = write_sweep(view, CONTEXT, now_s=0.0)
    assert "It takes eight trials that have ended with a value" in page
    assert "Importance of the parameters" not in pictures(page)


def test_a_sweep_without_a_report_or_a_trial_has_a_page():
    run, definition = store_sweep(MemoryStorage())
    empty = SweepView(run, definition)
    assert "0 of 5 trials" in write_sweep(empty, CONTEXT, now_s=0.0)
    assert write_sweep(empty, replace(CONTEXT, num_trials=None, state="completed"), now_s=0.0).count("0 trials") == 1


def test_only_runs_that_changed_are_read_again(view, monkeypatch):
    read = []
    real = views.read_curve
    monkeypatch.setattr(views, "read_curve", lambda run, metric: read.append(run.name) or real(run, metric))
    view.read()
    assert read == [trial_run(4)]  # it runs


def test_reports_that_a_trial_stores_after_the_decision_that_ended_it_are_read():
    run, definition = store_sweep(MemoryStorage())
    history = store_trial_from(run, trial_run(9), [(1, 0.7)])
    view = SweepView(run, definition)
    view.record({9: TrialRecord(9, trial_run(9), {}, 9, "stopped", metrics={"loss": 0.6})})
    view.read()
    history.append(MetricRecord(1, 2, {"loss": 0.6}, None, "2026-01-02T00:00:00+00:00"))
    history.flush()
    write_outcome(Run.open(run.storage, trial_run(9)), Outcome(1, "stopped"))
    view.read()
    assert view.trials()[0].curve.points == ((1, 0.7), (2, 0.6))


def test_a_slow_storage_ends_a_look_and_the_next_one_goes_on():
    run, definition = store_sweep(MemoryStorage())
    times = iter([0.0, 0.0, 11.0, 20.0, 20.0, 20.0, 20.0])
    slow = SweepView(run, definition, clock=lambda: next(times))
    records = history_of(events_of_a_sweep())
    slow.record({**records, **{number: TrialRecord(number, trial_run(0), {}, number) for number in range(5, 40)}})
    slow.read()
    assert sum(bool(trial.curve.points) for trial in slow.trials()) == AT_ONCE < 40
    slow.read()
    assert all(trial.curve.points for trial in slow.trials())


def test_of_very_many_trials_the_best_the_newest_and_the_running_have_curves():
    view, records = SweepView(*store_sweep(MemoryStorage()), max_curves=4), history_of(events_of_a_sweep())
    view.record({it.number: replace(it, state="running" if it.number == 1 else it.state) for it in records.values()})
    view.read()
    assert [trial.number for trial in view.trials() if trial.curve.points] == [0, 1, 3, 4]


def test_a_trial_that_goes_on_in_another_run_keeps_its_curve_up_to_there():
    run, definition = store_sweep(MemoryStorage())
    view, records = SweepView(run, definition), history_of(events_of_a_sweep())
    view.record(records)
    view.read()
    store_trial_from(run, trial_run(9), [(2, 0.3), (3, 0.2)])
    moved = replace(records[0], run=trial_run(9), earlier_runs=(trial_run(0),), is_cloned=True, state="running")
    later = SweepView(run, definition)  # the sweep was started again
    for one in (view, view, later, later):
        one.record({**records, 0: moved})
        one.read()
        assert one.trials()[0].curve.points == ((0, 3.0), (1, 2.0), (2, 0.3), (3, 0.2))


def test_a_trial_that_has_returned_to_the_run_before_has_the_curve_of_that_one():
    run, definition = store_sweep(MemoryStorage())
    records = history_of(events_of_a_sweep())
    store_trial_from(run, trial_run(9), [])
    moved = replace(records[0], run=trial_run(9), earlier_runs=(trial_run(0),), is_cloned=True, state="running")
    returned = replace(records[0], earlier_runs=(trial_run(9),))
    view = SweepView(run, definition)
    for one in (moved, returned, returned):
        view.record({**records, 0: one})
        view.read()
        assert view.trials()[0].curve.points == ((0, 3.0), (1, 2.0), (2, 1.0))
    assert view._earlier[0][1].points == ()


def store_trial_from(sweep, name, points):
    run = Run.open(sweep.storage, name)
    attempt = claim_attempt(run, Owner.current(), world_size=1)
    history = HistoryWriter(run, attempt.number)
    for step, loss in points:
        history.append(MetricRecord(attempt.number, step, {"loss": loss}, None, "2026-01-02T00:00:00+00:00"))
    history.flush()
    return history


def test_a_nan_and_a_failed_trial_have_no_value(view):
    records = history_of(events_of_a_sweep())
    reported = TrialReported(1, 2, math.nan, None, {"loss": math.nan}, "stopped", reason="worse than the median")
    apply(records, reported)
    view.record(records)
    assert {trial.number: trial.value for trial in view.trials()} == {0: 1.0, 1: None, 2: None, 3: 0.5, 4: 0.9}
    assert dict(count_states(view.trials()))["stopped"] == 1


def test_values_beside_an_axis_are_whole_and_lie_upon_no_other():
    tried = [(0.40853, 3.1604e-05), (0.011097, 11.777), (0.0013917, 12.424)]
    trials = [SeenTrial(i, f"{i}", "completed", None, {"lr": lr}, {}, loss) for i, (lr, loss) in enumerate(tried)]
    texts = [it for it in ET.fromstring(draw_coordinates(trials, "loss", "min", [])).iter() if it.get("text-anchor") == "end"]
    assert [it.text for it in texts] == ["0.0013917", "0.011097", "0.40853", "3.16e-5", "12.424"]  # 11.777 is where 12.424 is
    assert all(float(it.get("x")) >= 7 * len(it.text) for it in texts)  # pixels of a bold digit


def test_a_line_does_not_strike_out_the_value_to_which_it_leads():
    trials = [SeenTrial(i, f"{i}", "completed", None, {"a": it, "b": it}, {}, i) for i, it in enumerate(["adam", "sgd"])]
    picture = ET.fromstring(draw_coordinates(trials, "loss", "min", []))
    levels = [
        float(point.split(",")[1]) for line in picture.iter() if line.get("points") for point in line.get("points").split()[:2]
    ]
    texts = [float(it.get("y")) for it in picture.iter() if it.text in {"adam", "sgd"}]
    assert all(min(abs(baseline - level) for level in levels) == 4 for baseline in texts)  # below it, and clear of its letters
    assert all(min(level - baseline for level in levels if level > baseline) == 4 for baseline in texts)


@pytest.mark.parametrize("others", [{}, {"lr": 0.1}], ids=["alone", "beside another"])
def test_a_parameter_with_the_name_of_the_metric_has_an_axis_of_its_own(others):
    tried = [(1, 10.0), (2, 20.0)]
    trials = [
        SeenTrial(i, f"{i}", "completed", None, {"x": x, **{name: it * x for name, it in others.items()}}, {}, score)
        for i, (x, score) in enumerate(tried)
    ]
    texts = [it for it in ET.fromstring(draw_coordinates(trials, "x", "max", [])).iter() if it.get("text-anchor")]
    assert [it.text for it in texts if it.get("y") == "13.0"] == ["x", *others, "x"]
    assert {"1", "2", "10", "20"} <= {it.text for it in texts if it.get("text-anchor") == "end"}


@pytest.mark.parametrize("odd", [math.inf, math.nan, 10**400], ids=str)
def test_a_parameter_that_is_no_finite_number_in_a_trial_is_drawn_by_its_words(odd):
    """A choice of limits, of which one is none."""
    tried = [0.5, 1.0, odd, odd, 0.5, 1.0, odd, odd]
    trials = [SeenTrial(i, f"{i}", "completed", None, {"clip": clip}, {}, 1.0 + i) for i, clip in enumerate(tried)]
    texts = [it.text for it in ET.fromstring(draw_coordinates(trials, "loss", "min", [])).iter() if it.get("x") == "70.0"]
    assert texts == ["0.5", "1", shorten(str(odd), 12)]
    assert importances([it.parameters for it in trials], [it.value for it in trials]).keys() == {"clip"}


def test_the_state_of_the_flow_run_says_the_best_value_and_its_trial():
    _, definition = store_sweep(MemoryStorage())
    assert summarize_sweep(definition, history_of(events_of_a_sweep())) == "5 trials, loss 0.5 (best of trial 3), 1 failed"
    assert summarize_sweep(definition, {}) == "0 trials"


def test_the_state_of_a_sweep_without_a_number_says_that_it_has_no_best_trial():
    _, definition = store_sweep(MemoryStorage())
    records = history_of(events_of_a_sweep())
    for number in (0, 1, 3, 4):
        apply(records, TrialReported(number, 2, math.nan, None, {"loss": math.nan}, "stopped", reason="worse than the median"))
    assert summarize_sweep(definition, records) == "5 trials, no best one: loss was never a number, 1 failed"


def test_a_parameter_that_decides_is_important_and_one_that_does_not_matter_is_not():
    draw = random.Random(0)
    configs = [
        {"lr": 10 ** draw.uniform(-4, -1), "width": draw.choice([16, 32]), "name": draw.choice("ab")} for _ in range(200)
    ]
    decided = [abs(math.log10(config["lr"]) + 1) + draw.gauss(0, 0.05) for config in configs]
    found = importances(configs, decided)
    assert next(iter(found)) == "lr"
    assert found["lr"] > 0.8
    assert max(found["width"], found["name"]) < 0.05
    by_name = importances(configs, [config["name"] == "a" for config in configs])
    assert by_name["name"] == pytest.approx(1)


def test_parameters_that_cannot_explain_anything_have_no_importance():
    assert importances([{"a": 1}] * 8, range(8)) == {}
    assert importances([{"a": number} for number in range(7)], range(7)) == {}  # too few
    assert importances([{"a": number} for number in range(8)], [1.0] * 8) == {"a": 0.0}
    assert importances([{"a": str(number)} for number in range(8)], range(8)) == {"a": 0.0}  # each its own group


def test_a_conditional_parameter_is_grouped_with_its_absence():
    configs = [{"opt": "sgd", "momentum": number / 20} if number % 2 else {"opt": "adam"} for number in range(40)]
    found = importances(configs, [float(number % 2) for number in range(40)])
    assert found["momentum"] == pytest.approx(found["opt"], abs=0.1)


def test_trials_are_compared_at_the_last_step_that_all_have_reached():
    assert at_equal_steps([[(0, 5.0), (4, 1.0)], [(0, 4.0), (3, 2.0)]]) == (3, [5.0, 2.0])
    assert at_equal_steps([[(0, 5.0)], []]) is None
    assert at_equal_steps([]) is None


def test_parameters_are_flat_and_only_those_that_differ_are_shown():
    assert parameters_of({"a": {"b": 1, "c": [1, "größer"]}, "d": None}) == {"a/b": 1, "a/c": '[1, "größer"]', "d": None}
    assert varied([{"a": 1, "b": 1}, {"a": 1, "b": True}, {"a": 1, "b": 1, "c": 2}]) == ["b", "c"]


def test_the_curve_of_a_trial_that_was_trained_again_has_each_step_once(view):
    store_trial(view.run, 4)  # another attempt of it reports the same steps
    view.read()
    assert [step for step, _ in view.trials()[4].curve.points] == [0, 1]
    assert view.trials()[4].curve.attempts == 2


def test_a_notebook_shows_the_best_trials_and_the_line_that_loads_a_checkpoint(tmp_path):
    store_sweep(tmp_path)
    shown = SweepResult.from_storage(tmp_path, "digits")._repr_html_()
    rows = ET.fromstring(shown).findall(".//tbody/tr")
    assert [row.find("td").text for row in rows] == ["3", "4", "0", "1", "2"]  # the failed one last
    assert "1 running, 2 completed, 1 paused, 1 failed" in shown
    assert "ValueError: the loss | is NaN" in shown
    assert "data:image/svg+xml" in shown
    assert f"SweepResult.from_storage({str(tmp_path)!r}, 'digits').best.checkpoint" in html.unescape(shown)


def test_a_notebook_shows_a_sweep_without_a_value(tmp_path):
    empty = SweepResult("a<b", f"{tmp_path}/a<b", [], ["loss"], ["min"])
    assert "<b>a&lt;b</b>" in empty._repr_html_()
    assert "no trial yet" in empty._repr_html_()
