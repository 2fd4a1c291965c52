"""Searches of simulated trials."""

import importlib.util
import logging
import math
import re
import tracemalloc
from random import Random

import numpy as np
import pytest
from prefect_torch.ckpt.reporting.decisions import Verdict, time_of
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows import SearchConfig, SweepFailedError, SweepResult, choice, grid, loguniform, randint, uniform
from prefect_torch.flows.sweeps import trial_retention
from prefect_torch.flows.sweeps.definition import define
from prefect_torch.flows.sweeps.domains import parse_space
from prefect_torch.flows.sweeps.journal.events import (
    Cloned,
    Source,
    TrialEnded,
    TrialReported,
    TrialResumed,
    TrialStarted,
    decode_event,
    encode_event,
)
from prefect_torch.flows.sweeps.journal.history import TrialRecord, beats, history_of, score_of
from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials
from prefect_torch.flows.sweeps.optuna_study.comparison import compared_values
from prefect_torch.flows.sweeps.optuna_study.pruning import OptunaPruning
from prefect_torch.flows.sweeps.optuna_study.samplers import check_sampler
from prefect_torch.flows.sweeps.optuna_study.study import Observation, Study, check_search, grid_points
from prefect_torch.flows.sweeps.schedulers.scheduling import RunToTheEnd
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.trial_end import TrialEnd
from simulated_sweeps import Simulation, follow_schedule


def fall_to_distance(state, config, step):
    """A loss that falls with the steps to the distance of lr from 0.01, in decades."""
    return None, abs(math.log10(config["lr"]) + 2) + 1 / (step + 1)


def configured(**changes) -> SearchConfig:
    return SearchConfig(**{"metric": "loss", "num_trials": 27, "seed": 0, "sampler": "random", "max_concurrent": 4, **changes})


SPACE = {"lr": loguniform(1e-5, 1)}


@pytest.mark.parametrize("scheduler", ["asha", "hyperband"])
def test_halving_spends_few_steps_on_bad_trials_and_completes_the_best(scheduler):
    simulation = Simulation(configured(scheduler=scheduler, max_t=9), SPACE, fall_to_distance, epochs=100)
    search = simulation.lead()
    states = [trial.state for trial in search.trials.values()]
    assert set(states) == {"paused", "completed"}
    assert len(states) == 27
    completed = [trial for trial in search.trials.values() if trial.state == "completed"]
    assert all(trial.reason == "step=9 has reached 9" for trial in completed)
    assert simulation.total < 27 * 9 * (0.5 if scheduler == "asha" else 0.8)
    at_first = sorted(search.trials.values(), key=lambda it: it.reports[0].value)
    assert at_first[0].state == "completed"


def test_the_median_rule_stops_bad_trials():
    simulation = Simulation(configured(scheduler="median", grace_period=2, max_t=9), SPACE, fall_to_distance, epochs=100)
    search = simulation.lead()
    stopped = [trial for trial in search.trials.values() if trial.state == "stopped"]
    assert stopped
    assert {trial.state for trial in search.trials.values()} == {"stopped", "completed"}
    assert min(search.trials.values(), key=lambda it: it.reports[0].value).state == "completed"
    assert min(trial.reports[-1].time for trial in stopped) >= 2


@pytest.mark.parametrize("pruner", ["optuna.pruners:MedianPruner", "optuna.pruners:SuccessiveHalvingPruner"])
def test_a_pruner_of_optunas_stops_bad_trials_also_after_a_kill(pruner):
    config = configured(scheduler="pruner", pruner=pruner, max_t=9, max_concurrent=1)
    simulation = Simulation(config, SPACE, fall_to_distance, epochs=100)
    states = [trial.state for trial in simulation.lead().trials.values()]
    assert set(states) == {"stopped", "completed"}
    assert min(simulation.lead().trials.values(), key=lambda it: it.metrics["loss"]).state == "completed"
    killed = Simulation(config, SPACE, fall_to_distance, epochs=100)
    for stop_after in range(5, simulation.total, 20):
        killed.lead(stop_after)
    assert [trial.state for trial in killed.lead().trials.values()] == states


def test_a_pruner_has_the_same_brackets_after_a_kill():
    def verdicts():
        pruning = OptunaPruning("sweep_trainings:hyperband_pruner", "min")
        return [pruning.report(number, step, number % 7) for number in range(30) for step in (1, 3, 9)]

    assert verdicts() == verdicts()


def test_a_pruner_sees_the_number_of_a_trial_in_the_sweep_whichever_trial_reports_first():
    pruning = OptunaPruning("sweep_trainings:pruner_of_odd_numbers", "min")
    assert {number: pruning.report(number, 1, 0.5) for number in (3, 2, 0, 1)} == {3: True, 2: False, 0: False, 1: True}
    pruning.end(4, "completed")  # without a report


WRONG_NAMES = [
    ({"sampler": "nowhere:f"}, "sampler='nowhere:f' cannot be imported"),
    ({"sampler": "math:pi"}, "not callable"),
    ({"sampler": "builtins:str"}, "returned a str: return an Optuna sampler"),
    ({"scheduler": "pruner", "pruner": "optuna.pruners:NoPruner"}, "pruner='optuna.pruners:NoPruner' cannot be imported"),
    ({"scheduler": "pruner", "pruner": "builtins:dict"}, "returned a dict: return an Optuna pruner"),
    ({"stop": {"loss": math.nan}}, r"stop\.loss\s+Input should be a finite number"),
]


@pytest.mark.parametrize(("changes", "problem"), WRONG_NAMES, ids=range(len(WRONG_NAMES)))
def test_what_is_no_sampler_pruner_or_limit_is_said_by_its_name(changes, problem):
    with pytest.raises((ValueError, TypeError), match=problem):
        Search(configured(**changes), parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")


def test_a_sampler_of_ones_own_by_its_import_path_and_conditional_domains_of_two_metrics():
    space = {"x": uniform(0, 1), "how": choice([{"name": "a", "y": uniform(0, 1)}, {"name": "b", "z": randint(1, 4)}])}
    for sampler in ("nsga2", "optuna.samplers:RandomSampler"):
        config = configured(metric=["loss", "size"], mode=["min", "max"], sampler=sampler, num_trials=60)
        search = Search(config, parse_space(space), 0, RecordedTrials([], [].append), "sweep")
        while (trial := search.next_trial()) is not None:
            how = trial.config["how"]
            assert set(how) == ({"name", "y"} if how["name"] == "a" else {"name", "z"})
            size = how.get("y", how.get("z"))
            search.end(trial.number, TrialEnd("completed", None, {"loss": trial.config["x"], "size": size}))
        assert {trial.state for trial in search.trials.values()} == {"completed"}
        assert len(search.trials) == 60


def lead(config, space, entries, number=None):
    """Start `number` trials, or all, of a search that goes on from `entries`, and let each complete."""
    events = [event for entry in entries if (event := decode_event(entry, "test")) is not None]
    search = Search(config, parse_space(space), 0, RecordedTrials(events, entries.append), "sweep")
    found = []
    while (number is None or len(found) < number) and (trial := search.next_trial()) is not None:
        found.append(trial.config)
        search.end(trial.number, TrialEnd("completed", None, {"loss": 1.0}))
    return found


def test_a_grid_is_tried_whole_with_initial_points_too():
    config = configured(num_trials=None, sampler=None, initial_points=[{"a": 3}])
    assert [it["a"] for it in lead(config, {"a": grid([1, 2, 3])}, [])] == [3, 1, 2]
    many = lead(config, {"a": grid([1, 2, 3]), "b": grid(list(range(5)))}, [])
    assert len(many) == len({(it["a"], it["b"]) for it in many}) == 15


def test_more_trials_than_a_grid_has_combinations_repeat_these_in_turn_after_a_kill_too():
    config, space, entries = configured(num_trials=8, sampler=None, initial_points=[{"a": 3}]), {"a": grid([1, 2, 3])}, []
    assert [it["a"] for it in lead(config, space, entries, 5)] == [3, 1, 2, 1, 2]
    assert [it["a"] for it in lead(config, space, entries)] == [3, 1, 2]


def test_the_combinations_of_a_grid_are_repeated_one_by_one():
    config, space = configured(num_trials=10**6, sampler=None), parse_space({"a": grid([1, 2, 3])})
    Study([], config, space, 0, [])  # imports what it needs
    tracemalloc.start()
    try:
        study = Study([], config, space, 0, grid_points(config, space))
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert [study.suggest(number).chosen["a"] for number in range(7)] == [1, 2, 3, 1, 2, 3, 1]


def test_initial_points_that_a_sweep_gets_later_come_next_and_no_combination_is_lost_or_repeated():
    entries, space = [], {"a": grid([10, 20, 30, 40])}
    assert [it["a"] for it in lead(configured(num_trials=4, sampler=None), space, entries, 2)] == [10, 20]
    later = configured(num_trials=4, sampler=None, initial_points=[{"a": 40}])
    assert [it["a"] for it in lead(later, space, entries)] == [40, 30]


def test_initial_points_are_all_tried_and_fewer_trials_than_points_are_refused():
    points = [{"lr": 0.01 * it} for it in range(1, 13)]
    assert lead(configured(num_trials=None, initial_points=points), SPACE, []) == points
    assert len(lead(configured(num_trials=None, initial_points=points[:2]), SPACE, [])) == 10
    with pytest.raises(ValueError, match="num_trials=11 leaves some of the 12 initial_points untried: give as many trials"):
        configured(num_trials=11, initial_points=points)


def test_a_part_of_a_config_that_was_tried_is_not_tried_again_after_a_kill():
    entries, space = [], {"x": uniform(0, 1), "y": uniform(0, 1)}
    config = configured(num_trials=3, initial_points=[{"x": 0.5}])
    assert [it["x"] for it in lead(config, space, entries, 1)] == [0.5]
    assert 0.5 not in [it["x"] for it in lead(config, space, entries)]


def test_a_point_whose_trial_paused_and_went_on_is_not_tried_again_after_a_kill():
    study = Study([], configured(), parse_space(SPACE), 0, [{"lr": 0.1}])
    number = study.suggest(0).study_number
    study.observe(number, Observation("pruned", intermediate=((1, 2.0),)))
    study.observe(number, Observation("complete", (1.0,)))
    again = Study(study.take_operations(), configured(), parse_space(SPACE), 0, [{"lr": 0.1}])
    assert again.suggest(1).chosen["lr"] != 0.1


def test_a_point_that_is_given_twice_is_tried_twice_also_after_a_kill():
    entries, config = [], configured(num_trials=3, initial_points=[{"lr": 0.1}, {"lr": 0.1}])
    assert [it["lr"] for it in lead(config, SPACE, entries, 1)] == [0.1]
    second, third = lead(config, SPACE, entries)
    assert second["lr"] == 0.1 != third["lr"]


@pytest.mark.parametrize("changes", [{"max_failed_trials": 0}, {"num_trials": 9}])
def test_failed_trials_get_another_chance_whatever_ended_the_sweep(changes):
    config, entries = configured(**changes), []
    reason = {} if "num_trials" in changes else {"reason": "an error"}
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep")
    for _ in range(3 if "num_trials" in changes else 1):
        end = TrialEnd("failed", **reason) if reason else TrialEnd("completed", None, {"other": 1.0})
        search.end(search.next_trial().number, end)
    with pytest.raises(SweepFailedError):
        search.next_trial()
    events = [event for entry in entries if (event := decode_event(entry, "test")) is not None]
    again = Search(
        config.model_copy(update={"restart_errored": True}), parse_space(SPACE), 0, RecordedTrials(events, [].append), "sweep"
    )
    again.raise_if_failed()
    assert again.next_trial().number == 0
    again.end(0, TrialEnd("failed", "an error"))
    if reason:
        with pytest.raises(SweepFailedError, match="1 trial of sweep 'sweep' failed, and max_failed_trials=0"):
            again.next_trial()


@pytest.mark.parametrize("times", [(0.25, 0.5, 0.75), (1, math.nan, math.inf)])
def test_a_pruner_sees_each_report_of_a_trial_whose_time_is_a_metric(times):
    config = configured(scheduler="pruner", pruner="sweep_trainings:threshold_pruner", time_attr="epoch", grace_period=0.5)
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
    number = search.next_trial().number
    verdicts = [
        search.decide(number, DecisionRequest(0, count, count, {"loss": loss, "epoch": time}, f"id-{count}")).goes_on
        for count, (time, loss) in enumerate(zip(times, (1.0, 2.0, 99.0), strict=True))
    ]
    assert verdicts == [True, True, not math.isfinite(times[-1])]  # without a time there is no grace period to be over


def test_a_pruner_sees_a_metric_of_which_a_high_value_is_good_as_it_is():
    config = configured(mode="max", scheduler="pruner", pruner="sweep_trainings:threshold_pruner")
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
    number = search.next_trial().number
    reports = enumerate((-20.0, 9.0, 11.0), 1)  # its bound is 10
    verdicts = [search.decide(number, DecisionRequest(0, step, step, {"loss": it}, None)).goes_on for step, it in reports]
    assert verdicts == [True, True, False]


def test_a_pruner_judges_failed_trials_that_are_started_again_one_after_the_other():
    config, entries = configured(scheduler="pruner", pruner="sweep_trainings:threshold_pruner", num_trials=2), []
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep")

    def report(number, step, loss=1.0):
        return search.decide(number, DecisionRequest(0, step, step, {"loss": loss}, f"id-{number}-{step}")).goes_on

    for number in (0, 1):
        assert search.next_trial().number == number
        assert report(number, 1)
        search.end(number, TrialEnd("failed", "an error"))
    events = [event for entry in entries if (event := decode_event(entry, "test")) is not None]
    config = config.model_copy(update={"restart_errored": True})
    search = Search(config, parse_space(SPACE), 0, RecordedTrials(events, entries.append), "sweep")
    for number in (0, 1):
        assert search.next_trial().number == number
        assert report(number, 2)
        assert not report(number, 3, 99.0)


def test_reports_that_are_trained_again_after_a_restart_replace_the_former_ones():
    def reports_at(*times):
        return [TrialReported(0, it, 9.0, None, {}, "running", num_reports=number) for number, it in enumerate(times, 1)]

    start = TrialStarted(0, "sweep/trial-0000-00000000", {}, 0)
    history = history_of([start, *reports_at(1, 2, math.nan, 3, 3, 4), *reports_at(3, 3, 4, 5)])
    found = [(it.time, it.num_reports) for it in history[0].reports if not math.isnan(it.time)]
    assert found == [(1, 1), (2, 2), (3, 1), (3, 2), (4, 3), (5, 4)]
    assert len(history[0].reports) == 7


def test_the_median_of_trials_that_were_restarted_is_that_of_undisturbed_ones():
    def last_verdict(*, is_restarted):
        search = Search(configured(scheduler="median"), parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
        for number in range(3):
            search.next_trial()
            for step in (1, 2, 3, 4, *((2, 3, 4, 5) if is_restarted else (5,))):
                search.decide(number, DecisionRequest(0, step, step, {"loss": 1.0 if step in (1, 5) else 9.0}, None))
        search.next_trial()
        return search.decide(3, DecisionRequest(0, 5, 5, {"loss": 6.0}, None)).goes_on

    assert not last_verdict(is_restarted=False)
    assert not last_verdict(is_restarted=True)


@pytest.mark.parametrize("time_attr", ["step", "epoch"])
def test_a_pruner_sees_a_report_that_is_trained_again_once_at_its_former_number(time_attr):
    config, entries = configured(scheduler="pruner", pruner="sweep_trainings:late_threshold_pruner", time_attr=time_attr), []

    def goes_on(search, epoch, loss):
        return search.decide(0, DecisionRequest(0, epoch, epoch, {"loss": loss, "epoch": float(epoch)}, None)).goes_on

    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep")
    search.next_trial()
    for _ in range(2):  # the trial fails, and begins again
        assert all(goes_on(search, epoch, loss) for epoch, loss in enumerate([99.0] * 3 + [1.0] * 3, 1))
    events = [event for entry in entries if (event := decode_event(entry, "test")) is not None]
    for one in (search, Search(config, parse_space(SPACE), 0, RecordedTrials(events, [].append), "sweep")):
        assert goes_on(one, 7, 1.0)
        assert not goes_on(one, 8, 99.0)


@pytest.mark.parametrize("sampler", ["TPESampler", "GPSampler", "NSGAIISampler", "RandomSampler"])
def test_a_sampler_of_optunas_by_its_import_path_gets_the_seed(sampler):
    suggested = []
    for _ in range(2):
        search = Search(
            configured(sampler=f"optuna.samplers:{sampler}"), parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep"
        )
        suggested.append([search.next_trial().config for _ in range(3)])
    assert suggested[0] == suggested[1]


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
def test_a_sampler_that_has_tried_everything_ends_the_search_also_after_a_kill_and_another_sampler_goes_on():
    entries, config, space = [], configured(sampler="optuna.samplers:BruteForceSampler", num_trials=5), {"a": choice([1, 2, 3])}
    assert len(lead(config, space, entries, 1)) == 1
    assert len(lead(config, space, entries)) == 2
    assert lead(config, space, entries) == []
    assert sum(entry["kind"] == "TrialStarted" for entry in entries) == 3
    assert len(lead(configured(num_trials=5), space, entries)) == 2


@pytest.mark.filterwarnings("ignore:BruteForceSampler is experimental")
@pytest.mark.parametrize("scheduler", ["asha", "pbt"])
def test_a_scheduler_waits_for_no_more_trials_once_a_sampler_has_tried_everything(scheduler):
    chosen = {"asha": {"max_t": 9}, "pbt": {"perturbation_interval": 3, "max_t": 9}}[scheduler]
    config = configured(sampler="optuna.samplers:BruteForceSampler", num_trials=5, scheduler=scheduler, **chosen)
    search = Search(config, parse_space({"a": choice([1, 2])}), 0, RecordedTrials([], [].append), "sweep")
    while (trial := search.next_trial()) is not None:
        step, goes_on = int(trial.reports[-1].time) if trial.reports else 0, True
        while goes_on:
            step += 1
            request = DecisionRequest(step, step, step, {"loss": trial.number}, f"id-{step}")
            goes_on = search.decide(trial.number, request).goes_on
    assert [it.state for it in search.trials.values()] == ["completed", "paused" if scheduler == "asha" else "completed"]
    assert search.num_trials == 2


def test_a_sampler_keeps_what_it_knows_of_a_trial_that_paused_and_went_on():
    study = Study([], configured(sampler="nsga2"), parse_space(SPACE), 0, [])
    number = study.suggest(0).study_number
    study.observe(number, Observation("pruned", intermediate=((1, 2.0),)))
    known = study._study.trials[0].system_attrs
    study.observe(number, Observation("complete", (1.0,)))
    (seen,) = study._study.trials
    assert (seen.values, seen.system_attrs) == ([1.0], known)
    assert any("generation" in name for name in known)


def test_optuna_logs_nothing_of_a_study_that_goes_on(caplog):
    entries = []
    Search(configured(), parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep").next_trial()
    events = [decode_event(entry, "the journal") for entry in entries]
    logger = logging.getLogger("optuna")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, "optuna"):
        again = Search(configured(), parse_space(SPACE), 0, RecordedTrials(events, entries.append), "sweep")
        assert again.next_trial().number == 1
    logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_the_population_goes_on_from_its_best_and_pins_what_it_takes():
    config = configured(scheduler="pbt", perturbation_interval=2, num_trials=12, max_t=40)
    simulation = Simulation(config, {"rate": loguniform(0.001, 1)}, follow_schedule, epochs=100)
    search = simulation.lead()
    assert {trial.state for trial in search.trials.values()} == {"completed"}
    cloned = [trial for trial in search.trials.values() if trial.is_cloned]
    assert cloned
    assert {(source.run, source.checkpoint) for source, _ in search.recorded.take_released()} == simulation.pinned
    fixed = Simulation(configured(num_trials=12, max_t=40), {"rate": loguniform(0.001, 1)}, follow_schedule, epochs=100)
    assert simulation.best(search) < fixed.best(fixed.lead())


@pytest.mark.parametrize("worst", range(8))
@pytest.mark.parametrize("kills", [False, True])
def test_exactly_the_worst_quarter_of_a_population_takes_over_a_checkpoint_though_one_trial_runs_at_a_time(worst, kills):
    losses = {worst: 9.0, (worst + 3) % 8: 8.0}
    config = configured(
        scheduler="pbt",
        perturbation_interval=2,
        max_t=3,
        num_trials=8,
        max_concurrent=1,
        initial_points=[{"n": number} for number in range(8)],
    )
    simulation = Simulation(config, {"n": randint(0, 8)}, lambda *it: (None, losses.get(it[1]["n"], it[1]["n"] / 10)), epochs=9)
    for stop_after in range(1, 24, 4) if kills else ():
        simulation.lead(stop_after)
    trials = simulation.lead().trials.values()
    assert {trial.number for trial in trials if trial.is_cloned} == losses.keys()
    assert simulation.total == 24, "nobody has trained an interval in vain"
    assert {trial.state for trial in trials} == {"completed"}


@pytest.mark.parametrize(("places", "waits"), [(8, False), (4, True)])
def test_a_population_whose_trials_have_a_place_each_waits_for_none_of_them(places, waits):
    config = configured(scheduler="pbt", perturbation_interval=2, num_trials=8, max_t=12, max_concurrent=places)
    simulation = Simulation(config, {"rate": loguniform(0.001, 1)}, follow_schedule, epochs=100)
    assert any(trial.is_cloned for trial in simulation.lead().trials.values())
    paused = [entry for entry in simulation.entries if entry.get("state") == "paused"]
    assert any(entry["cloned"] is None for entry in paused) == waits


@pytest.mark.parametrize("kills", [False, True])
def test_runs_that_a_population_has_left_keep_no_checkpoints_where_each_trial_keeps_few(kills):
    config = configured(scheduler="pbt", perturbation_interval=2, num_trials=8, max_t=12)
    space = {"rate": loguniform(0.001, 1)}
    expected = Simulation(config, space, follow_schedule, epochs=100)
    trials = expected.lead().trials.values()
    left = {run for trial in trials for run in trial.earlier_runs}
    assert left <= {run for run, _ in expected.states}
    simulation = Simulation(config, space, follow_schedule, epochs=100, keeps_left_runs=False)
    for stop_after in range(5, expected.total, 20) if kills else ():
        simulation.lead(stop_after)
    search = simulation.lead()
    assert {run for run, _ in simulation.states} == {trial.run for trial in search.trials.values()}
    assert len(simulation.deleted) == len(left)
    assert kills or [trial.metrics for trial in search.trials.values()] == [trial.metrics for trial in trials]


class Killed(BaseException):
    pass


class KillingJournal(list):
    """A journal after whose entry of a number its process is killed."""

    kill_after = -1

    def append(self, entry):
        super().append(entry)
        if len(self) == self.kill_after:
            raise Killed


def test_a_trial_with_nothing_left_to_train_after_a_takeover_has_completed_as_before_it_wherever_a_kill_comes():
    config = configured(
        scheduler="pbt", perturbation_interval=3, num_trials=8, max_concurrent=1, max_failed_trials=0, keep_best_trials=2
    )

    def outcome(search):
        reports = {it.number: [(one.time, one.value) for one in it.reports] for it in search.trials.values()}
        return [(it.state, it.reason, it.config, it.metrics, reports[it.number]) for it in search.trials.values()]

    undisturbed = Simulation(config, SPACE, fall_to_distance, epochs=6)
    search = undisturbed.lead()
    expected = outcome(search)
    assert {trial.state for trial in search.trials.values()} == {"completed"}
    taken_back = [trial for trial in search.trials.values() if trial.reason is not None]
    assert taken_back
    for trial in taken_back:
        assert re.fullmatch(r"no report has 'loss' since it went on from trial [0-7], which is undone", trial.reason)
        assert trial.metrics == undisturbed.newest[trial.run] == {"loss": fall_to_distance(None, trial.config, 5)[1]}
        assert trial.earlier_runs[-1] not in undisturbed.newest
    assert [it.state.name for it in search._study._study.trials].count("COMPLETE") == sum(
        not trial.is_cloned for trial in search.trials.values()
    )
    assert {run for run, _ in undisturbed.states} == {trial.run for trial in best_of(search, 2)}
    for kill_after in range(1, len(undisturbed.entries)):
        killed = Simulation(config, SPACE, fall_to_distance, epochs=6, entries=KillingJournal())
        killed.entries.kill_after = kill_after
        with pytest.raises(Killed):
            killed.lead()
        again = killed.lead()
        assert outcome(again) == expected
        assert {(source.run, source.checkpoint) for source, _ in again.recorded.take_released()} == killed.pinned
        assert {run for run, _ in killed.states} == {trial.run for trial in best_of(again, 2)}


def test_what_a_function_returns_after_a_takeover_is_no_score_of_its_new_config_unless_it_has_reported():
    for has_reported in (False, True):
        config = configured(scheduler="pbt", perturbation_interval=2, num_trials=2)
        search = Search(config, parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep", lambda *_: ("good", 2))
        before = [search.next_trial() for _ in range(2)][1]
        assert search.decide(0, DecisionRequest(0, 2, 2, {"loss": 0.1}, "good")).goes_on
        assert not search.decide(1, DecisionRequest(0, 2, 2, {"loss": 9.0}, "bad", {"loss": 9.0})).goes_on
        taken = search.next_trial()
        ended = search.end(1, TrialEnd("completed", None, {"loss": 0.1}, has_reported))
        assert (ended.state, ended.metrics) == ("completed", {"loss": 0.1 if has_reported else 9.0})
        assert (ended.run, ended.config) == ((taken.run, taken.config) if has_reported else (before.run, before.config))


def test_a_takeover_is_undone_though_the_trial_failed_and_was_restarted_and_not_once_it_was_decided_on():
    def after(*more):
        started = [TrialStarted(number, f"run-{number}", {"lr": number}, number) for number in range(2)]
        cloned = Cloned("clone", {"lr": 3}, Source(1, "run-1", "good"))
        taken = TrialReported(0, 1, 9.0, "bad", {"loss": 9.0}, "paused", cloned=cloned)
        return history_of([*started, taken, TrialResumed(0), *more])[0]

    failed, ended = TrialEnded(0, "failed", "OSError"), TrialEnded(0, "completed", metrics={"loss": 9.0}, undoes_clone=True)
    restarted = after(failed, TrialResumed(0), ended)
    assert (restarted.run, restarted.config, restarted.earlier_runs) == ("run-0", {"lr": 0}, ("clone",))
    assert not restarted.is_cloned
    decided = after(TrialReported(0, 2, 1.0, "better", {"loss": 1.0}, "running"))
    assert (decided.run, decided.former) == ("clone", None)


def test_a_resume_in_a_journal_from_before_takeovers_is_from_the_trials_own_checkpoint():
    assert decode_event({"kind": "TrialResumed", "used_s": 1.0, "trial": 0, "milestone": 3}, "test") == TrialResumed(
        0, 3, used_s=1.0
    )


def test_a_paused_trial_that_takes_over_a_checkpoint_when_it_is_resumed_is_as_before_it_once_that_is_undone():
    started = [TrialStarted(number, f"run-{number}", {"lr": number}, number) for number in range(2)]
    waiting = TrialReported(0, 1, 9.0, "bad", {"loss": 9.0}, "paused", milestone=2, reason="waits")
    resumed = TrialResumed(0, 3, Cloned("clone", {"lr": 3}, Source(1, "run-1", "good"), reports_before=5))
    assert decode_event(encode_event(resumed), "test") == resumed
    before, taken = history_of([*started, waiting])[0], history_of([*started, waiting, resumed])[0]
    assert (taken.state, taken.milestone, taken.run, taken.config, taken.reports_before) == (
        "running",
        3,
        "clone",
        {"lr": 3},
        5,
    )
    assert (taken.reports, taken.own_reports) == (before.reports, ())
    assert before.own_reports == before.reports
    undone = history_of([*started, waiting, resumed, TrialEnded(0, "completed", metrics={"loss": 9.0}, undoes_clone=True)])[0]
    assert (undone.run, undone.config, undone.own_reports, undone.earlier_runs) == (
        "run-0",
        {"lr": 0},
        before.reports,
        ("clone",),
    )


@pytest.mark.parametrize(
    "changes",
    [{"sampler": "tpe"}, {"scheduler": "asha", "max_t": 9}, {"scheduler": "pbt", "perturbation_interval": 3, "max_t": 9}],
)
def test_a_search_killed_at_any_step_ends_as_an_undisturbed_one(changes):
    config = configured(max_concurrent=1, num_trials=12, **changes)

    def outcome(search):
        return [(it.state, it.config, it.metrics, [(r.time, r.value) for r in it.reports]) for it in search.trials.values()]

    undisturbed = Simulation(config, SPACE, fall_to_distance, epochs=5)
    expected = outcome(undisturbed.lead())
    killed = Simulation(config, SPACE, fall_to_distance, epochs=5)
    for stop_after in range(1, undisturbed.total, 3):
        killed.lead(stop_after)
    assert outcome(killed.lead()) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduler": "asha", "max_t": 9},
        {"scheduler": "hyperband", "max_t": 9},
        {"scheduler": "median", "max_t": 9},
        {"scheduler": "pbt", "perturbation_interval": 2, "max_t": 12},
        {},
    ],
    ids=lambda changes: changes.get("scheduler", "none"),
)
def test_the_best_trials_alone_keep_checkpoints_and_none_that_goes_on_misses_its_own(changes):
    undisturbed = Simulation(configured(**changes), SPACE, fall_to_distance, epochs=9)
    expected = undisturbed.lead()
    simulation = Simulation(configured(keep_best_trials=3, **changes), SPACE, fall_to_distance, epochs=9)
    killed = Simulation(configured(keep_best_trials=3, **changes), SPACE, fall_to_distance, epochs=9)
    for stop_after in range(1, undisturbed.total, 5):
        killed.lead(stop_after)
    for one in (simulation, killed):
        search = one.lead()
        assert {run for run, _ in one.states} == {trial.run for trial in best_of(search, 3)}
        assert len(one.deleted) == len(set(one.deleted))
    assert [it.metrics for it in simulation.lead().trials.values()] == [it.metrics for it in expected.trials.values()]
    assert simulation.total == undisturbed.total


@pytest.mark.parametrize(("keep", "kept"), [(1, [0, 1, 2]), (2, [0, 1, 2]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 6])])
def test_of_several_metrics_all_trials_that_none_beats_keep_their_checkpoints(keep, kept):
    scores = [(1.0, 9.0), (2.0, 8.0), (3.0, 1.0), (2.5, 9.0), (0.1, math.inf), (3.0, 9.0), (2.5, 9.5)]
    search = searched(metric=["loss", "size"], mode="min", keep_best_trials=keep)
    for loss, size in scores:
        search.end(search.next_trial().number, TrialEnd("completed", None, {"loss": loss, "size": size}))
    excess = dict(search.take_excess(is_over=True))
    assert sorted(search.trials.keys() - excess.keys()) == kept
    result = SweepResult.of(
        Run.open("memory://", "sweep"), define("", SPACE, {}, configured(metric=["loss", "size"])), search.trials
    )
    assert [trial.number for trial in result.best_trials] == [0, 1, 2]


@pytest.mark.parametrize("metrics", [["a", "b"], ["a", "b", "c"]])
def test_the_fronts_are_those_of_the_definition(metrics):
    chance = Random(0)
    scores = [{name: chance.choice([chance.randint(0, 4), chance.random() * 4]) for name in metrics} for _ in range(80)]
    expected, left = {}, set(range(80))
    while left:
        known = {number: [scores[number][name] for name in metrics] for number in left}
        best = {it for it in left if not any(beats(other, known[it]) for other in known.values())}
        expected |= dict.fromkeys(best, len(set(expected.values())))
        left -= best
    trials = [TrialRecord(number, "run", {}, number, state="completed", metrics=it) for number, it in enumerate(scores)]
    trials.append(TrialRecord(80, "run", {}, 80, state="completed", metrics={"a": 0.0}))
    assert trial_retention._fronts(trials, metrics, ["min"] * len(metrics)) == {**expected, 80: math.inf}


@pytest.mark.parametrize("is_front", [True, False])
def test_many_trials_of_two_metrics_are_not_compared_each_with_each(monkeypatch, is_front):
    compared = []
    monkeypatch.setattr(trial_retention, "beats", lambda one, other: compared.append(one) or beats(one, other))
    chance = Random(0)
    losses = [chance.random() for _ in range(1000)]
    metrics = [{"a": loss, "b": 1 - loss if is_front else chance.random()} for loss in losses]
    history = {
        number: TrialRecord(number, f"run-{number}", {}, number, state="completed", metrics=it)
        for number, it in enumerate(metrics)
    }
    trial_retention.find_excess(history, frozenset(), 5, ["a", "b"], ["min", "min"])
    assert 999 <= len(compared) < 10_000


def test_of_a_single_metric_no_more_trials_than_asked_for_keep_their_checkpoints():
    search = searched(keep_best_trials=2)
    for _ in range(4):
        search.end(search.next_trial().number, TrialEnd("completed", None, {"loss": 0.0}))
    assert [number for number, _ in search.take_excess(is_over=True)] == [2, 3]


def searched(**changes) -> Search:
    return Search(configured(**changes), parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")


def best_of(search, count):
    return sorted(search.trials.values(), key=lambda it: (it.metrics["loss"], it.number))[:count]


def test_halving_gives_up_a_trial_as_soon_as_it_cannot_be_resumed():
    config = configured(scheduler="asha", max_t=9, keep_best_trials=1)
    simulation = Simulation(config, SPACE, fall_to_distance, epochs=9)
    search = simulation.lead(stop_after=35)
    assert len(search.trials) < 27
    assert simulation.deleted
    states = {it.state for it in simulation.lead().trials.values()}
    assert states == {"stopped", "completed"}


@pytest.mark.parametrize("before", [{"scheduler": "median"}, {"scheduler": "asha", "grace_period": 1}], ids=str)
def test_halving_after_another_scheduler_or_with_other_rungs_compares_trials_at_its_own(before):
    simulation = Simulation(configured(**before, max_t=9), SPACE, fall_to_distance, epochs=100)
    simulation.lead(stop_after=60)
    simulation.config = configured(scheduler="asha", grace_period=3, max_t=9)
    search = simulation.lead()
    steps = {trial.state: set() for trial in search.trials.values()}
    for trial in search.trials.values():
        steps[trial.state].add(simulation.steps[trial.run])
    assert steps["completed"] == {9}
    assert min(steps["paused"]) >= 3
    assert "running" not in steps


def test_a_trial_whose_score_is_nan_is_never_promoted():
    def sometimes_nan(state, config, step):
        return None, float("nan") if config["lr"] > 1e-3 else config["lr"]

    simulation = Simulation(configured(scheduler="asha", max_t=9), SPACE, sometimes_nan, epochs=100)
    search = simulation.lead()
    assert {len(it.reports) for it in search.trials.values() if it.config["lr"] > 1e-3} == {1}
    assert any(it.state == "completed" for it in search.trials.values())


def test_a_metric_that_never_appears_ends_the_search_after_three_trials():
    entries = []
    search = Search(configured(metric="val_loss"), parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep")
    for _ in range(3):
        trial = search.next_trial()
        search.end(trial.number, TrialEnd("completed", None, {"loss": 1.0, "accuracy": 0.5}))
    assert {it.state for it in search.trials.values()} == {"failed"}
    with pytest.raises(SweepFailedError, match=r"3 trials .* has the metric 'val_loss'; its reports have accuracy, loss"):
        search.next_trial()


def test_a_metric_that_is_text_is_told_from_one_that_never_appears():
    search = Search(configured(metric="loss"), parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
    number = search.next_trial().number
    search.end(number, TrialEnd("completed", None, {"loss": "low"}))
    assert search.trials[number].reason == "no report of the trial has the metric 'loss' as a number: it is 'low', of type str"


@pytest.mark.parametrize("scheduler", ["asha", "hyperband", "median"])
def test_with_a_scheduler_too_a_metric_that_never_appears_ends_the_search(scheduler):
    config = configured(metric="val_loss", scheduler=scheduler, max_t=3, max_concurrent=1)
    simulation = Simulation(config, SPACE, fall_to_distance, epochs=9)
    with pytest.raises(SweepFailedError, match=r"3 trials .* has the metric 'val_loss'; its reports have loss"):
        simulation.lead()
    assert simulation.total == 3 * 3


@pytest.mark.parametrize("state", ["running", "paused"])
def test_trials_without_the_metric_end_no_search_in_which_a_report_has_it(state):
    config, entries = configured(scheduler="asha", max_t=9, max_failed_trials=3), []
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep")
    for number, loss in enumerate((0.3, 0.2, 0.1) if state == "running" else (0.3,)):  # the best of three goes on
        search.next_trial()
        search.decide(number, DecisionRequest(0, 1, 1, {"loss": loss}, f"id-{number}"))
    assert state in {trial.state for trial in search.trials.values()}
    for _ in range(3):
        search.end(search.next_trial().number, TrialEnd("completed"))
    events = [event for entry in entries if (event := decode_event(entry, "test")) is not None]
    for one in (search, Search(config, parse_space(SPACE), 0, RecordedTrials(events, [].append), "sweep")):
        assert one.next_trial() is not None
    search.end(search.next_trial().number, TrialEnd("completed"))
    with pytest.raises(SweepFailedError, match="4 trials of sweep 'sweep' failed, and max_failed_trials=3"):
        search.raise_if_failed()


@pytest.mark.parametrize("scheduler", ["asha", "hyperband", "median"])
def test_a_time_that_never_appears_ends_the_search_instead_of_its_scheduler(scheduler):
    search = Search(
        configured(scheduler=scheduler, max_t=3, time_attr="epoch"),
        parse_space(SPACE),
        0,
        RecordedTrials([], [].append),
        "sweep",
    )
    for number in range(3):
        trial = search.next_trial()
        if scheduler == "median":  # asks at every report
            assert search.decide(number, DecisionRequest(0, 1, 1, {"loss": 1.0}, "a")).goes_on
        search.end(trial.number, TrialEnd("completed", None, {"loss": 1.0}))
    with pytest.raises(SweepFailedError, match=r"3 trials .* has the metric 'epoch'; its reports have loss"):
        search.next_trial()


def test_a_metric_that_only_some_reports_have_is_decided_by_those():
    entries = []
    config = configured(scheduler="asha", max_t=9, num_trials=3)
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep")
    number = search.next_trial().number
    recorded = len(entries)
    assert search.decide(number, DecisionRequest(0, 1, 1, {"other": 1}, "a")) == Verdict(True, 1)
    assert len(entries) == recorded
    search.decide(number, DecisionRequest(1, 2, 2, {"loss": 0.5}, "b"))
    assert [(report.time, report.value) for report in search.trials[number].reports] == [(2, 0.5)]
    search.decide(number, DecisionRequest(2, 9, 9, {"other": 1}, "c"))
    assert (search.trials[number].state, search.trials[number].reason) == ("completed", "step=9 has reached 9")


@pytest.mark.parametrize("scheduler", [None, "median"])
def test_a_trial_that_a_limit_ends_has_the_newest_value_of_each_metric_or_has_failed_without_its_own(scheduler):
    config = configured(scheduler=scheduler, stop={"training_iteration": 3}, **({"grace_period": 9} if scheduler else {}))
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
    for earlier in ({"loss": 0.5, "size": 1}, {"size": 1}):
        number = search.next_trial().number
        assert not search.decide(number, DecisionRequest(0, 1, 3, {"size": 2, "loss": None}, "a", earlier)).goes_on
    assert [trial.state for trial in search.trials.values()] == ["completed", "failed"]
    assert search.trials[0].metrics == {"loss": 0.5, "size": 2}
    assert search.trials[1].reason.startswith("no report of the trial has the metric 'loss'")


def test_an_initial_point_may_have_a_tuple_of_the_space_and_numbers_of_numpy():
    space = {"betas": choice([(0.9, 0.99), (0.8, 0.9)]), "layers": randint(1, 8), "lr": loguniform(1e-5, 1)}
    point = {"betas": (0.8, 0.9), "layers": np.int64(3), "lr": np.float32(0.5)}
    search = Search(configured(initial_points=[point]), parse_space(space), 0, RecordedTrials([], [].append), "sweep")
    assert search.next_trial().config == {"betas": [0.8, 0.9], "layers": 3, "lr": 0.5}
    with pytest.raises(ValueError, match=r"initial_points\[0\]: Object of type set is not JSON"):
        check_search(configured(initial_points=[{"betas": {0.8, 0.9}}]), parse_space(space))


def test_a_limit_ends_trials_of_several_metrics():
    config = configured(metric=["loss", "size"], mode=["min", "max"], sampler="nsga2", stop={"step": 3})
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
    for metrics in ({"loss": 0.5, "size": 1}, {"loss": 0.5}):
        assert not search.decide(search.next_trial().number, DecisionRequest(0, 3, 1, metrics, "a")).goes_on
    assert [trial.state for trial in search.trials.values()] == ["completed", "failed"]
    assert search.trials[1].reason == "no report of the trial has the metric 'size'; its reports have loss"


def test_a_sampler_whose_package_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"sampler='cmaes' needs the package cmaes: pip install 'prefect-torch\[sweep\]'"):
        check_sampler(configured(sampler="cmaes"), parse_space(SPACE))


def test_no_trial_starts_or_goes_on_after_the_time_budget_and_none_loses_its_checkpoint():
    now_s, entries = [0.0], []
    config = configured(scheduler="asha", max_t=9, time_budget_s=60, keep_best_trials=1)
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep", clock=lambda: now_s[0])
    for number in range(3):
        assert search.next_trial().number == number
        assert not search.decide(number, DecisionRequest(0, 1, 1, {"loss": float(number)}, f"checkpoint-{number}")).goes_on
    now_s[0] = 60.0
    assert search.next_trial() is None
    assert search.take_excess(is_over=True) == ()
    assert {trial.state for trial in search.trials.values()} == {"paused"}


def test_a_clone_counts_its_reports_from_those_of_its_source():
    config = configured(scheduler="pbt", perturbation_interval=2, num_trials=2, stop={"training_iteration": 4})
    for counted, expected in ((0, 2), (3, 3)):  # of a newer checkpoint, the storage knows
        recorded, pinned = RecordedTrials([], [].append), ("a-checkpoint", counted)
        search = Search(config, parse_space(SPACE), 0, recorded, "sweep", lambda *_, pinned=pinned: pinned)
        assert [search.next_trial().number for _ in range(2)] == [0, 1]
        assert search.decide(0, DecisionRequest(0, 5, 2, {"loss": 0.1}, "a-checkpoint")).goes_on
        assert not search.decide(1, DecisionRequest(0, 5, 2, {"loss": 9.0}, "another")).goes_on
        assert search.trials[1].source.trial == 0
        assert search.trials[1].reports_before == expected
        assert search.points(1, lambda: 1).reports_before == expected + 1


def test_an_integer_that_no_float_can_hold_is_an_infinite_score():
    entries = []
    search = Search(configured(scheduler="median"), parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep")
    number = search.next_trial().number
    assert search.decide(number, DecisionRequest(0, 1, 1, {"loss": -(10**400)}, "a")).goes_on
    search.end(number, TrialEnd("completed", None, {"loss": 10**400}))
    assert [report.value for report in search.trials[number].reports] == [-math.inf]
    assert score_of(search.trials[number], "loss", "min") is None
    assert time_of("loss", 0, 1, {"loss": 10**400}) == math.inf


@pytest.mark.parametrize(("loss", "state"), [(-math.inf, "FAIL"), (math.inf, "COMPLETE")])
def test_a_sampler_sees_no_infinitely_good_value(loss, state):
    search = Search(configured(), parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
    search.end(search.next_trial().number, TrialEnd("completed", None, {"loss": loss}))
    assert [it.state.name for it in search._study._study.trials] == [state]


@pytest.mark.parametrize(
    ("epoch", "changes"),
    [
        (math.inf, {"scheduler": "pbt", "perturbation_interval": 2}),
        (-1.0, {"scheduler": "median", "stop": {"step": 1}}),
    ],
)
def test_a_time_that_is_infinite_or_negative_ends_no_sweep(epoch, changes):
    config = configured(time_attr="epoch", num_trials=2, **changes)
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
    for number in range(2):
        search.next_trial()
        search.decide(number, DecisionRequest(0, 1, 1, {"loss": 1.0, "epoch": epoch}, "a-checkpoint"))
    assert {trial.state for trial in search.trials.values()} <= {"running", "paused", "completed"}


def test_another_report_of_a_step_without_a_checkpoint_is_decided_on_and_a_repeated_question_is_not():
    entries = []
    config = configured(scheduler="median", stop={"acc": 0.9})
    search = Search(config, parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep")
    number = search.next_trial().number
    first = DecisionRequest(0, 5, 1, {"loss": 0.5}, None)
    second = DecisionRequest(1, 5, 2, {"loss": 0.5, "acc": 0.95}, None)
    verdicts = [search.decide(number, request).goes_on for request in (first, first, second, second)]
    assert verdicts == [True, True, False, False]
    assert [entry["num_reports"] for entry in entries if entry["kind"] == "TrialReported"] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "milestone"),
    [
        ({"scheduler": "asha", "grace_period": 2}, 2),
        ({"scheduler": "median", "grace_period": 3}, 3),
        ({"scheduler": "pbt", "perturbation_interval": 4}, 4),
        ({"scheduler": "pruner", "pruner": "optuna.pruners:MedianPruner"}, 0),
    ],
)
def test_a_scheduler_that_a_later_start_gives_decides_on_the_trials_that_run(changes, milestone):
    entries = []
    search = Search(configured(max_t=9), parse_space(SPACE), 0, RecordedTrials([], entries.append), "sweep")
    number = search.next_trial().number
    events = [event for entry in entries if (event := decode_event(entry, "test")) is not None]
    search = Search(configured(max_t=9, **changes), parse_space(SPACE), 0, RecordedTrials(events, entries.append), "sweep")
    assert search.points(number, lambda: 0).milestone == milestone
    without_metric = DecisionRequest(0, milestone, 1, {"other": 1.0}, "an-id")
    assert search.decide(number, without_metric) == Verdict(goes_on=True, milestone=milestone)
    search.decide(number, DecisionRequest(1, milestone, 2, {"loss": 1.0}, "another-id"))
    assert [report.time for report in search.trials[number].reports] == [milestone]


def test_the_lower_of_two_limits_for_the_same_time_counts():
    for stop in ({"step": 5}, {"step": 50}):
        search = Search(configured(max_t=9, stop=stop), parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
        assert search.decide(search.next_trial().number, DecisionRequest(0, 4, 1, {"loss": 1.0}, "a")).goes_on
        assert not search.decide(0, DecisionRequest(0, 9, 2, {"loss": 1.0}, "b")).goes_on
        assert search.trials[0].reason == f"step=9 has reached {min(9, stop['step'])}"


def test_the_time_of_earlier_starts_counts_against_the_time_budget():
    def started_again(budget_s):
        events = [decode_event(entry, "the journal") for entry in entries]
        config = configured(time_budget_s=budget_s)
        return Search(config, parse_space(SPACE), 0, RecordedTrials(events, entries.append), "sweep", clock=lambda: now_s[0])

    now_s, entries = [0.0], []
    first = started_again(60)
    assert first.next_trial().number == 0
    now_s[0] = 50.0
    first.end(0, TrialEnd("completed", None, {"loss": 1.0}))
    now_s[0] = 1000.0  # nobody led the sweep since
    again = started_again(60)
    assert again.next_trial().number == 1
    now_s[0] = 1010.0
    assert again.budget.is_used_up
    assert again.next_trial() is None
    again.end(1, TrialEnd("completed", None, {"loss": 1.0}))
    assert started_again(60).next_trial() is None
    assert started_again(61).next_trial().number == 2
    again.lead(2, is_fresh=True)
    assert started_again(60).next_trial().number == 0


def test_a_kill_loses_little_of_the_time_budget_though_no_trial_has_an_event():
    now_s, entries = [0.0], []

    def started(budget_s):
        recorded = RecordedTrials([decode_event(entry, "the journal") for entry in entries], entries.append)
        return Search(configured(time_budget_s=budget_s), parse_space(SPACE), 0, recorded, "sweep", clock=lambda: now_s[0])

    first = started(7200)
    first.lead(1, {"y": 1})
    first.use_config()
    first.next_trial()
    known = len(entries)
    for second in range(0, 7200, 5):
        now_s[0] = second
        first.record_time()
    assert len(entries) == known + 7195 // 75
    again = started(7200)
    assert again.recorded.used_s == pytest.approx(7195, abs=75)
    assert [(trial.state, trial.common) for trial in again.trials.values()] == [("running", {"y": 1})]
    now_s[0] += 75
    assert again.budget.is_used_up
    started(None).record_time()
    assert len(entries) == known + 7195 // 75, "without a budget"


def test_more_failures_than_allowed_end_the_search_and_the_error_says_how_they_are_tried_again():
    search = Search(configured(max_failed_trials=1), parse_space(SPACE), 0, RecordedTrials([], [].append), "sweep")
    for _ in range(2):
        search.end(search.next_trial().number, TrialEnd("failed", "boom", {}))
    told = r"2 trials .* failed, and max_failed_trials=1; the first, trial 0: boom; SearchConfig\(restart_errored=True\) starts"
    with pytest.raises(SweepFailedError, match=told):
        search.next_trial()


@pytest.mark.parametrize("sampler", ["tpe", "gp", "cmaes", "nsga2", "qmc", "random"])
def test_every_sampler_suggests_the_same_after_a_kill(sampler):
    def suggested(kills):
        entries, search, space = [], None, {"x": uniform(0, 1), "y": uniform(0, 1)}
        for number in range(14):
            if search is None or number in kills:
                events = [event for entry in entries if (event := decode_event(entry, "test")) is not None]
                search = Search(
                    configured(sampler=sampler), parse_space(space), 3, RecordedTrials(events, entries.append), "sweep"
                )
            trial = search.next_trial()
            search.end(trial.number, TrialEnd("completed", None, {"loss": (trial.config["x"] - 0.3) ** 2 + trial.config["y"]}))
        return [trial.config for trial in search.trials.values()]

    assert suggested({3, 7, 12}) == suggested(set())


def test_a_sampler_sees_a_trial_that_paused_and_went_on_once():
    def next_suggestion(pauses):
        study = Study([], configured(sampler="tpe"), parse_space(SPACE), 0, [])
        for number in range(12):
            suggested = study.suggest(number)
            loss = abs(math.log10(suggested.chosen["lr"]) + 2)
            on_the_way = ((1, loss + 1), (3, loss + 0.5))
            for count in range(1, 1 + pauses):
                study.observe(suggested.study_number, Observation("pruned", intermediate=on_the_way[:count]))
            study.observe(suggested.study_number, Observation("complete", (loss,), on_the_way))
        return study.suggest(12).chosen

    assert next_suggestion(pauses=2) == next_suggestion(pauses=0)


@pytest.mark.parametrize(("sampler", "sees_those_behind"), [("tpe", False), ("gp", True)])
def test_a_model_is_fitted_to_the_highest_rung_that_enough_trials_have_reached(sampler, sees_those_behind):
    points, space = [{"x": (number * 0.618) % 1} for number in range(40)], {"x": uniform(0, 1)}

    def loss(x, rung):  # the best at one rung is bad at the others
        return (x - 0.8) ** 2 if rung == 1 else x

    config = configured(sampler=sampler, scheduler="asha", max_t=81, num_trials=41, initial_points=points)
    search = Search(config, parse_space(space), 0, RecordedTrials([], [].append), "sweep")
    while (trial := search.next_trial()).number < 40 or trial.reports:
        goes_on = True
        while goes_on:
            rung = len(search.trials[trial.number].reports)
            request = DecisionRequest(0, 3**rung, 0, {"loss": loss(trial.config["x"], rung)}, f"{trial.number}-{rung}")
            goes_on = search.decide(trial.number, request).goes_on

    at_rung = {it.number: it.reports[1].value for it in search.trials.values() if len(it.reports) > 1}
    assert 10 <= len(at_rung) < 20
    assert sum(len(it.reports) > 2 for it in search.trials.values()) < 10
    behind = dict.fromkeys(range(40), max(at_rung.values())) if sees_those_behind else {}
    seen = sorted((behind | at_rung).items())
    study = Study([], configured(sampler=sampler), parse_space(space), 0, [points[number] for number, _ in seen])
    for number, value in seen:
        study.observe(study.suggest(number).study_number, Observation("complete", (value,)))
    assert trial.config["x"] == pytest.approx(study.suggest(40).chosen["x"], rel=1e-9)


@pytest.mark.parametrize("loss", [5.0, math.nan, math.inf])
def test_a_model_does_not_suggest_a_config_again_and_again_that_halving_has_paused(loss):
    config = configured(sampler="gp", scheduler="asha", max_t=81, num_trials=30)
    search = Search(config, parse_space({"x": uniform(0, 1)}), 0, RecordedTrials([], [].append), "sweep")
    while (trial := search.next_trial()) is not None:
        x, goes_on = trial.config["x"], True
        while goes_on:
            rung = len(search.trials[trial.number].reports)
            metrics = {"loss": loss if x > 0.6 else (x - 0.2) ** 2 + 3**-rung}
            goes_on = search.decide(trial.number, DecisionRequest(0, 3**rung, 0, metrics, f"{trial.number}-{rung}")).goes_on
    suggested = [round(it.config["x"], 1) for it in search.trials.values()]
    assert suggested.count(1.0) < 4
    assert suggested.count(0.2) > 4


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
@pytest.mark.parametrize(("metric", "mode"), [("loss", "min"), (["loss", "size"], ["min", "max"])])
def test_a_model_avoids_configs_of_trials_that_failed(sampler, metric, mode):
    config = configured(sampler=sampler, metric=metric, mode=mode)
    search = Search(config, parse_space({"x": uniform(0, 1)}), 0, RecordedTrials([], [].append), "sweep")
    while (trial := search.next_trial()) is not None:
        x = trial.config["x"]
        metrics = {"loss": abs(x - 0.2), "size": -abs(x - 0.4)}
        end = TrialEnd("failed", "out of memory") if x > 0.6 else TrialEnd("completed", None, metrics)
        search.end(trial.number, end)
    later = [it.state for it in search.trials.values() if it.number >= 12]
    assert later.count("failed") < 9


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_completed_trial_without_a_score_is_as_bad_as_the_worst_for_a_model(mode):
    config = configured(mode=mode)
    search = searched(mode=mode)
    for loss in (0.5, 0.7, math.nan, math.inf, -math.inf):
        search.end(search.next_trial().number, TrialEnd("completed", None, {"loss": loss}))
    worst = 0.7 if mode == "min" else 0.5
    for sampler in ("tpe", "gp"):
        assert compared_values(search.trials, RunToTheEnd(), config, sampler) == {number: [worst] for number in (2, 3, 4)}


def test_a_model_avoids_configs_of_trials_that_a_scheduler_stopped():
    config = configured(sampler="gp", scheduler="pruner", pruner="optuna.pruners:MedianPruner", max_t=5, num_trials=40)
    search = Search(config, parse_space({"x": uniform(0, 1)}), 0, RecordedTrials([], [].append), "sweep")
    while (trial := search.next_trial()) is not None:
        x, goes_on, step = trial.config["x"], True, 0
        while goes_on:
            step += 1
            metrics = {"loss": 5 if x > 0.6 else abs(x - 0.2) + 1 / step}
            goes_on = search.decide(trial.number, DecisionRequest(0, step, step, metrics, f"{trial.number}-{step}")).goes_on
    stopped = [round(it.config["x"], 2) for it in search.trials.values() if it.state == "stopped"]
    assert max(map(stopped.count, stopped)) < 8
