"""Properties of the schedulers, as functions from a history to a decision."""

import math
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.flows import choice, loguniform, randint, uniform
from prefect_torch.flows.sweeps.domains import parse_space
from prefect_torch.flows.sweeps.journal.events import Source
from prefect_torch.flows.sweeps.journal.history import RungReport, TrialRecord
from prefect_torch.flows.sweeps.schedulers.asha import Asha, hyperband
from prefect_torch.flows.sweeps.schedulers.median import Median
from prefect_torch.flows.sweeps.schedulers.pbt import PopulationBased
from prefect_torch.flows.sweeps.schedulers.pruner import PrunedTrials
from prefect_torch.flows.sweeps.schedulers.scheduling import Clone, Decision, Promotion

SPACE = parse_space(
    {
        "lr": loguniform(1e-3, 1),
        "x": uniform(0.1, 0.7, 0.2),  # in binary, the last step is above the bound
        "n": randint(1, 9, 2),
        "net": choice([{"width": randint(1, 4)}, "no"]),
    }
)
VALUES = st.one_of(st.floats(-100, 100), st.just(math.nan), st.integers(0, 3).map(float))


@dataclass
class Played:
    """A sweep without trainings: in any order a trial starts, is resumed, or comes to its milestone.

    Args:
        scheduler: What decides.
        data: Draws the order and the values.
        most: How many trials there are.
        concurrent: How many run at once.
        fails: Whether trials may fail.
        max_t: The time at which a trial is complete, whatever the scheduler says; None for none.
        every: Trials report at the multiples of this time.

    """

    scheduler: object
    data: st.DataObject
    most: int
    concurrent: int
    fails: bool = False
    max_t: float | None = None
    every: int = 1
    trials: dict = field(default_factory=dict)
    decisions: list = field(default_factory=list)
    promotions: list = field(default_factory=list)
    takeovers: list = field(default_factory=list)
    begins: dict = field(default_factory=dict)  # the time of each trial's newest checkpoint

    def play(self, check=lambda: None) -> "Played":
        while True:
            running = [number for number, it in self.trials.items() if it.state == "running"]
            if len(running) < self.concurrent and self._start():
                continue
            if not running:
                return self
            number = self.data.draw(st.sampled_from(running))
            if self.fails and self.data.draw(st.integers(0, 9)) == 0:
                self.trials[number] = replace(self.trials[number], state="failed")
            else:
                self._report(number)
            check()

    def _start(self) -> bool:
        promoted = self.scheduler.promote(self.trials)
        number = len(self.trials)
        if promoted is not None and (self.scheduler.promotes_first or number >= self.most):
            trial = self.trials[promoted.number]
            assert trial.state == "paused"
            self.promotions.append((promoted.number, dict(self.trials)))
            if promoted.clone is not None:
                trial = self._take_over(self.trials, trial, promoted.clone, promoted.milestone)
            assert promoted.milestone is None or promoted.milestone > self.begins[promoted.number]
            self.trials[promoted.number] = replace(trial, state="running", milestone=promoted.milestone)
        elif number < self.most:
            config = SPACE.suggest("", Drawn(self.data))
            self.trials[number] = TrialRecord(
                number, f"run-{number}", config, number, milestone=self.scheduler.first_milestone(number)
            )
        else:
            return False
        return True

    def _report(self, number: int) -> None:
        trial = self.trials[number]
        after = self.begins.get(number, 0) + 1
        time = self.begins[number] = math.ceil(max(after, trial.milestone) / self.every) * self.every
        report = RungReport(time, self.data.draw(VALUES), f"{trial.run}/{time}", run=trial.run)
        before = {**self.trials, number: replace(trial, source=None, reports=(*trial.reports, report))}
        decided = Decision("completed")
        if self.max_t is None or time < self.max_t:
            decided = self.scheduler.decide(before, number)
            assert decided == self.scheduler.decide(dict(reversed(before.items())), number)
            self.decisions.append((number, before, decided))
        changed = replace(before[number], state=decided.state, milestone=decided.milestone)
        if decided.clone is not None:
            changed = self._take_over(before, changed, decided.clone, decided.milestone)
        self.trials[number] = changed

    def _take_over(self, history: dict, trial: TrialRecord, clone: Clone, milestone: float) -> TrialRecord:
        self.takeovers.append((trial.number, dict(history), clone, milestone))
        of = history[clone.source]
        self.begins[trial.number] = of.reports[-1].time
        source = Source(of.number, of.run, of.reports[-1].checkpoint)
        return replace(trial, run=f"{trial.run}+", config=dict(clone.config), source=source)


class Drawn:
    """Draws the values of a space."""

    def __init__(self, data):
        self._data = data

    def real(self, name, low, high, *, step, log):
        return low if step is None else min(high, low + step * self._data.draw(st.integers(0, round((high - low) / step))))

    def integer(self, name, low, high, *, step, log):
        return low + step * self._data.draw(st.integers(0, (high - low) // step))

    def category(self, name, labels):
        return self._data.draw(st.sampled_from(labels))


ASHAS = st.builds(
    lambda make, grace, eta, factor, most: make(grace, eta, grace * factor, most),
    st.sampled_from([Asha, hyperband]),
    st.integers(1, 3),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([2, 5, 9, 16]),
    st.integers(1, 12),
)


def at_rung(trial, time):
    """Return a trial's first report at or after the time of a rung; None if it has not come that far."""
    return next((report for report in trial.reports if report.time >= time), None)


@given(ASHAS, st.data(), st.integers(1, 4), st.sampled_from([1, 4, 7]))
def test_halving_resumes_only_the_best_of_those_that_have_reached_a_rung(asha, data, concurrent, every):
    played = Played(asha, data, asha.population, concurrent, fails=True, every=every).play()
    assert {it.state for it in played.trials.values()} <= {"paused", "completed", "failed"}
    for number, history in played.promotions:
        rung = max(time for time in asha.rungs(asha.bracket_of(number)) if at_rung(history[number], time))
        value = at_rung(history[number], rung).value
        assert not math.isnan(value)
        reached = [
            it
            for it in history.values()
            if asha.bracket_of(it.number) == asha.bracket_of(number) and at_rung(it, rung) and it.state != "failed"
        ]
        better = [it for it in reached if at_rung(it, rung).value < value]
        is_last_call = len(history) == asha.population and all(it.state != "running" for it in history.values())
        assert len(better) < max(len(reached) / asha.reduction_factor, is_last_call)
    usable = [
        it for it in played.trials.values() if it.state != "failed" and it.reports and not math.isnan(it.reports[0].value)
    ]
    numbers = [report.value for trial in usable for report in trial.reports]
    if usable and not any(map(math.isnan, numbers)) and not any(it.state == "failed" for it in played.trials.values()):
        assert any(it.state == "completed" for it in usable)


@given(ASHAS, st.data(), st.integers(1, 4), st.sampled_from([1, 4, 7]))
def test_a_trial_that_halving_has_lost_is_never_resumed(asha, data, concurrent, every):
    lost = set()
    played = Played(asha, data, asha.population, concurrent, every=every)

    def check():
        now = asha.lost(played.trials)
        assert lost <= now
        lost.update(now)

    played.play(check)
    assert all(played.trials[number].state == "paused" for number in lost)


@given(ASHAS, st.integers(0, 300))
def test_the_sizes_of_brackets_are_counted_without_a_look_at_each_trial(asha, num_trials):
    brackets = [asha.bracket_of(number) for number in range(num_trials)]
    assert asha.sizes(num_trials) == [brackets.count(bracket) for bracket in range(len(asha.brackets))]


def test_a_billion_trials_cost_no_more_than_a_few(monkeypatch):
    looked = []
    monkeypatch.setattr(Asha, "bracket_of", lambda _, number: looked.append(number))
    assert hyperband(1, 3, 81, 10**5).lost({}) == frozenset()
    assert looked == []
    assert sum(hyperband(1, 3, 10**6, 1).sizes(10**9)) == 10**9


@given(ASHAS, st.data(), st.integers(1, 4))
def test_halving_looks_at_the_order_of_values_alone(asha, data, concurrent):
    played = Played(asha, data, asha.population, concurrent).play()
    for number, before, decided in played.decisions:
        scaled = {
            it.number: replace(it, reports=tuple(replace(one, value=one.value * 2 + 1000) for one in it.reports))
            for it in before.values()
        }
        values = {one.value for it in before.values() for one in it.reports}
        if len({value * 2 + 1000 for value in values}) == len(values):  # no two became equal by rounding
            assert asha.decide(scaled, number) == decided


@pytest.mark.parametrize("max_t", [81, 100, 242])
def test_the_brackets_of_hyperband_have_as_many_trials_and_rungs_as_in_the_paper(max_t):
    """Those of its table 1; the last bracket has no rung before `max_t`."""
    brackets = hyperband(1, 3, max_t, 143)
    assert brackets.brackets == (81, 34, 15, 8, 5)
    rungs = [[1, 3, 9, 27], [3, 9, 27], [9, 27], [27], []]
    assert [brackets.rungs(bracket) for bracket in range(5)] == [[*times, max_t] for times in rungs]


@pytest.mark.parametrize(("max_t", "trials"), [(9, 7), (81, 10), (81, 50), (81, 143), (10_000, 200)])
def test_of_a_few_trials_in_a_row_each_bracket_of_hyperband_has_about_its_share(max_t, trials):
    scheduler = hyperband(1, 3, max_t, trials)
    used = [scheduler.bracket_of(number) for number in range(trials)]
    for bracket, size in enumerate(scheduler.brackets):
        assert used.count(bracket) == pytest.approx(trials * size / sum(scheduler.brackets), abs=2)
    assert len(set(used)) > 2


@pytest.mark.parametrize("times", ["at the rungs", "later", "fractions"])
def test_a_model_compares_trials_at_the_highest_rung_that_ten_have_reached(times):
    asha = Asha(0.25 if times == "fractions" else 100, 2, 3200, 100)

    def trial(number, far, **changes):
        late = number * 7 % 13 if times == "later" else 0
        reports = (RungReport(time + late, 10 * rung + number % 5) for rung, time in enumerate(asha.rungs(0)[:far]))
        return replace(TrialRecord(number, f"run-{number}", {}, number, "paused", reports=tuple(reports)), **changes)

    history = {number: trial(number, 4 if number < 5 else 3 if number < 12 else 1) for number in range(30)}
    at_rung = {number: 20 + number % 5 for number in range(12)}
    assert asha.compared(history, with_behind=False) == at_rung | dict.fromkeys(range(12, 30))
    assert asha.compared(history, with_behind=True) == at_rung | dict.fromkeys(range(12, 30), 24)

    history[0] = trial(0, 3, state="failed")
    history[1] = trial(1, 3, is_cloned=True)
    history[12] = trial(12, 1, state="completed")  # before the others' rung
    history[13] = trial(13, 1, reports=(RungReport(100, math.nan),))
    found = asha.compared(history, with_behind=False)
    assert not found.keys() & {0, 1, 12}
    assert found[13] == 24
    assert asha.compared(dict(list(history.items())[2:11]), with_behind=True) == {}


def test_a_model_does_not_compare_trials_of_brackets_that_begin_later():
    scheduler = hyperband(1, 3, 9, 100)
    first = {number: scheduler.first_milestone(number) for number in range(20)}
    assert set(first.values()) == {1, 3, 9}
    history = {
        number: TrialRecord(number, f"run-{number}", {}, number, "paused", reports=(RungReport(time, number),))
        for number, time in first.items()
    }
    expected = {number: number if time == 1 else None for number, time in first.items()}
    assert scheduler.compared(history, with_behind=True) == expected


def test_a_trial_that_reports_past_several_rungs_is_judged_at_the_highest_of_them():
    asha = Asha(1, 3, 10_000, 27)
    history = {
        number: TrialRecord(number, f"run-{number}", {}, number, "paused", reports=(RungReport(500, number, "an-id"),))
        for number in range(3)
    }
    assert asha.decide(history, 1).reason == "waits at rung 6 (at 243)"
    assert asha.promote(history) == Promotion(0, 729)


def test_asha_has_every_rung_before_its_end():
    """As Ray's, whose last one may be close to it."""
    assert Asha(1, 3, 81, 9).rungs(0) == [1, 3, 9, 27, 81]
    assert Asha(1, 3, 100, 9).rungs(0) == [1, 3, 9, 27, 81, 100]


@given(st.data(), st.integers(1, 8), st.integers(1, 4), st.sampled_from([6, 8]))
def test_the_median_rule_never_stops_the_best_nor_before_the_grace_period(data, most, concurrent, max_t):
    played = Played(Median(2), data, most, concurrent, fails=True, max_t=max_t).play()
    for number, history, decided in played.decisions:
        trial = history[number]
        assert decided.state in ("running", "stopped")
        if decided.state == "stopped":
            assert trial.reports[-1].time >= 2
            assert best_of([trial]) > best_of([it for it in history.values() if it is not trial])


def test_the_median_is_of_the_trials_that_have_come_as_far():
    def trial(number, state, *values):
        reports = tuple(RungReport(time, value) for time, value in enumerate(values, 1))
        return TrialRecord(number, f"run-{number}", {}, number, state=state, reports=reports)

    good = [trial(number, "completed", 1.0, 0.4) for number in range(3)]
    bad = [trial(number, "stopped", 9.0) for number in range(3, 9)]
    history = {it.number: it for it in (*good, *bad, trial(9, "running", 2.0, 2.0))}
    assert Median(1).decide(history, 9).reason == "worse than the median of 3 trials at 2"
    assert Median(1).decide({number: it for number, it in history.items() if number != 0}, 9).state == "running"
    infinite = trial(10, "completed", math.inf, -math.inf)
    assert Median(1).decide({**history, 10: infinite}, 9).reason == "worse than the median of 3 trials at 2"
    diverged = trial(10, "completed", 1.7e308, 1.7e308)  # their sum is larger than any float
    assert Median(1).decide({**history, 10: diverged}, 9).reason == "worse than the median of 4 trials at 2"


def test_an_infinitely_good_value_is_no_score():
    values = (-math.inf, 0.5, 0.7, 0.9)
    reports = [(RungReport(1, value, f"at-{value}", run=f"run-{it}"),) for it, value in enumerate(values)]
    trials = [TrialRecord(it, f"run-{it}", {"a": 0.5}, it, state="paused", reports=one) for it, one in enumerate(reports)]
    history = {it.number: it for it in trials}
    assert Asha(1, 3, 9, 4).promote(history).number == 1
    assert 0 in Asha(1, 3, 9, 4).lost(history)
    assert Median(1).decide(history, 0).state == "stopped"
    taken = PopulationBased(parse_space({"a": uniform(0, 1)}), 1, 4, 0).promote(history)
    assert taken.clone.source == 1


def test_halving_resumes_no_trial_whose_value_is_infinite():
    values = (math.inf, math.nan, math.inf, -math.inf)
    history = {
        number: TrialRecord(number, f"run-{number}", {}, number, state="paused", reports=(RungReport(1, value, "an-id"),))
        for number, value in enumerate(values)
    }
    assert Asha(1, 3, 9, 4).promote(history) is None
    assert Asha(1, 3, 9, 4).lost(history) == {0, 1, 2, 3}


class Pruning:
    """Prunes nothing, and remembers what it is told."""

    def __init__(self):
        self.seen = []

    def report(self, number, step, value):
        self.seen.append((number, step, value))
        return False

    def end(self, number, state):
        raise AssertionError


def test_a_pruner_sees_no_report_of_an_earlier_start_without_a_time():
    pruning = Pruning()
    reports = (RungReport(math.nan, 0.5), RungReport(3, 0.7))
    trial = TrialRecord(0, "run-0", {}, 0, reports=reports)
    assert PrunedTrials(pruning, 1, counts_reports=False).decide({0: trial}, 0).state == "running"
    assert pruning.seen == [(0, 3, 0.7)]


@pytest.mark.parametrize("counts_reports", [False, True])
def test_a_pruner_looks_at_new_reports_not_at_thousands_of_a_trial(counts_reports):
    looked, pruning = [], Pruning()

    class Reports(tuple):
        __slots__ = ()

        def __getitem__(self, place):
            looked.append(place)
            return super().__getitem__(place)

        def __iter__(self):
            return (self[place] for place in range(len(self)))

    reports = Reports(RungReport(time, 0.5) for time in range(1, 1002))
    trials = {it: TrialRecord(it, f"run-{it}", {}, it, reports=Reports(reports[:1000])) for it in range(2)}
    pruned = PrunedTrials(pruning, 1, counts_reports=counts_reports)
    assert pruned.decide(trials, 0).state == "running"
    assert pruning.seen == [(number, step, 0.5) for number in (1, 0) for step in range(1, 1001)]
    looked.clear()
    pruning.seen.clear()
    assert pruned.decide({**trials, 0: replace(trials[0], reports=reports)}, 0).state == "running"
    assert pruning.seen == [(0, 1001, 0.5)]
    assert 0 < len(looked) < 10


def best_of(trials) -> float:
    values = [one.value for trial in trials for one in trial.reports]
    return min((value for value in values if not math.isnan(value)), default=math.inf)


@given(st.data(), st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_a_population_takes_over_only_from_its_best_and_stays_in_the_space(data, most, concurrent, interval, seed):
    pbt = PopulationBased(SPACE, interval, most, seed, concurrent)
    played = Played(pbt, data, most, concurrent, fails=True, max_t=5 * interval).play()
    assert {it.state for it in played.trials.values()} <= {"completed", "failed"}
    for number, history, clone, milestone in played.takeovers:
        trial, source = history[number], history[clone.source]
        assert source.number != number
        assert source.reports[-1].checkpoint is not None
        assert source.own_reports
        assert source.state in ("running", "paused")  # else there would be nothing left to train
        assert source.reports[-1].time < milestone <= source.reports[-1].time + interval
        common = min(trial.reports[-1].time, source.reports[-1].time) // interval
        theirs, own = (value_in(it.own_reports, common, interval) for it in (source, trial))
        assert math.isnan(own) or theirs <= own
        newest = source.reports[-1]  # what is taken over
        own = value_in(trial.own_reports, newest.time // interval, interval)
        assert math.isfinite(newest.value)
        assert math.isnan(own) or newest.value <= own
        SPACE.parameters("", clone.config)  # raises for a value outside of the space


def value_in(reports, interval, length):
    """Return the value of the last of `reports` in an interval of that number, or before."""
    return [report.value for report in reports if report.time // length <= interval][-1]


def test_what_a_population_perturbs_stays_in_the_space_where_binary_does_not_hold_its_steps():
    space = parse_space({"opt": choice([{"momentum": uniform(0.1, 0.7, 0.2)}, "no"])})
    pbt = PopulationBased(space, 1, 4, 0)
    for seed in range(20):
        space.parameters("", pbt.space_perturbed({"opt": {"momentum": 0.7}}, Random(seed)))


@pytest.mark.parametrize(
    ("domain", "value", "expected"),
    [
        (randint(16, 257, 16), 32, {16, 48}),
        (randint(16, 257, 16), 16, {16, 32}),
        (uniform(0, 0.5, 0.1), 0.2, {0.1, 0.3}),
        (uniform(-0.5, 0, 0.1), -0.2, {-0.3, -0.1}),
        (uniform(0, 0.5, 0.1), 0.0, {0.0, 0.1}),
        (randint(1, 5), 1, {1, 2}),
        (randint(1, 5), 2, {1, 3}),
        (randint(1, 5), 4, {3, 4}),
        (randint(1, 10001, log=True), 3, {2, 4}),
        (randint(1, 101), 50, {40, 60}),
    ],
    ids=str,
)
def test_a_population_perturbs_a_small_value_by_a_step_at_least(domain, value, expected):
    pbt = PopulationBased(parse_space({"a": domain}), 1, 4, 0, resample_probability=0)
    found = {pbt.space_perturbed({"a": value}, Random(seed))["a"] for seed in range(40)}
    assert sorted(found) == pytest.approx(sorted(expected))


def test_a_population_perturbs_a_space_with_constants_that_are_not_a_number():
    space = parse_space({"opt": choice([{"clip": [math.nan], "rate": uniform(0, 1)}, math.nan]), "seed": math.nan})
    for seed in range(20):
        for opt in ({"clip": [math.nan], "rate": 0.5}, math.nan):
            changed = PopulationBased(space, 1, 4, 0).space_perturbed({"opt": opt, "seed": math.nan}, Random(seed))
            space.parameters("", changed)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ([{"steps": randint(1, 100)}, {}], {}),
        ([{"lr": uniform(0, 1), "momentum": uniform(0, 1)}, {"lr": uniform(0, 1)}], {"lr": 0.5}),
    ],
    ids=str,
)
def test_a_population_perturbs_an_option_that_has_a_part_of_the_keys_of_another_one(options, value):
    space = parse_space({"a": choice(options)})
    for seed in range(20):
        space.parameters("", PopulationBased(space, 1, 4, 0).space_perturbed({"a": value}, Random(seed)))
    kept = PopulationBased(space, 1, 4, 0, resample_probability=0).space_perturbed({"a": value}, Random(0))
    assert kept["a"].keys() == value.keys()


def population(*values_of_each, completed=()):
    """Return trials with a report at each interval of ten, of which some have completed."""
    return {
        number: TrialRecord(
            number,
            f"run-{number}",
            {"lr": 0.1, "x": 0.1, "n": 1, "net": "no"},
            number,
            state="completed" if number in completed else "running",
            milestone=10.0 * (len(values) + 1),
            reports=tuple(RungReport(10.0 * it, value, f"id-{it}", run=f"run-{number}") for it, value in enumerate(values, 1)),
        )
        for number, values in enumerate(values_of_each)
    }


def test_a_trial_that_takes_over_a_checkpoint_is_decided_on_one_interval_after_that():
    pbt = PopulationBased(SPACE, 10, 4, 0)
    history = population([5.0], [1.0, 0.8, 0.5], [2.0], [3.0])
    decided = pbt.decide(history, 0)
    assert (decided.clone.source, decided.milestone) == (1, 40)
    history[0] = replace(history[0], state="paused", milestone=decided.milestone, source=Source(1, "run-1", "id-3"))
    assert pbt.promote(history).milestone == 40
    assert pbt.decide(history, 2).state == "running", "it waits for no trial that is ahead"
    history[0] = replace(
        history[0],
        run="run-0+",
        source=None,
        state="running",
        reports=(*history[0].reports, RungReport(40, 0.1, "id-4", run="run-0+")),
    )
    assert pbt.decide(population([5.0], [1.0, 0.8], [2.0], [3.0]) | {0: history[0]}, 1).clone is None, "at 20, it had 5.0"


@pytest.mark.parametrize("worst", range(4))
def test_a_population_is_compared_in_each_interval_however_late_in_it_each_trial_reports(worst):
    """Times in seconds: of trials that run at the same time, the one that decides has come the farthest."""
    pbt = PopulationBased(SPACE, 10, 4, 0)
    history = population(*([9.0 if number == worst else 1.0 + number] for number in range(4)))
    for number, trial in history.items():
        late = 9.9 if number == worst else number
        history[number] = replace(trial, reports=tuple(replace(it, time=it.time + late) for it in trial.reports))
    decided = pbt.decide(history, worst)
    assert (decided.clone.source, decided.milestone) == (1 if worst == 0 else 0, 20)


def test_trials_that_have_come_to_an_end_do_not_fill_the_best_of_a_population():
    history = population([5.0], [1.0, 0.8, 0.5], [2.0], [3.0], completed=[1])
    assert PopulationBased(SPACE, 10, 4, 0).decide(history, 0).clone.source == 2


def test_a_trial_that_has_come_farther_than_all_others_is_judged_by_the_interval_that_they_have_finished():
    taken = PopulationBased(SPACE, 10, 4, 0).decide(population([5.0, 4.0], [1.0], [2.0], [3.0]), 0)
    assert (taken.clone.source, taken.milestone) == (1, 20)


@pytest.mark.parametrize("number", range(4))
def test_a_trial_that_waits_is_judged_when_it_is_resumed(number):
    history = population(*([9.0 if it == number else 1.0 + it] for it in range(4)))
    waiting = {it: replace(trial, state="paused" if it == number else "running") for it, trial in history.items()}
    promoted = PopulationBased(SPACE, 10, 4, 0).promote(waiting)
    assert (promoted.number, promoted.milestone, promoted.clone.source) == (number, 20, 1 if number == 0 else 0)


def test_the_second_of_eight_to_report_is_not_known_to_be_among_the_worst():
    history = population([1.0], [1.1], *([] for _ in range(6)))
    assert PopulationBased(SPACE, 10, 8, 0).decide(history, 1).clone is None


def test_a_trial_is_not_judged_by_what_it_reported_before_it_took_over_a_checkpoint():
    history = population([9.0, 0.1], [1.0, 0.9], [2.0, 1.9], [3.0, 2.9])
    first, second = history[0].reports
    history[0] = replace(history[0], reports=(replace(first, run="run-before"), replace(second, time=30.0)))
    assert PopulationBased(SPACE, 10, 4, 0).decide(history, 0).clone is None


def test_a_trial_that_completes_before_the_others_go_on_still_counts_among_the_better_ones():
    history = population([4.0], [3.0], [2.0], [1.0], completed=[3])
    assert PopulationBased(SPACE, 10, 4, 0).decide(history, 1).clone is None, "the last but one of four"
    assert PopulationBased(SPACE, 10, 4, 0).decide(history, 0).clone.source == 2


@pytest.mark.parametrize("newest", [math.nan, math.inf, -math.inf, 7.0])
def test_a_population_takes_nothing_over_from_a_trial_that_has_diverged_since(newest):
    history = population([0.1, 0.1, newest], [0.5], [0.6], [0.9])
    assert PopulationBased(SPACE, 10, 4, 0).decide(history, 3).clone.source == 1, "the next best one"
    history = population([0.1, 0.1, newest], [0.5], [0.6], [0.9], completed=[1, 2])
    assert PopulationBased(SPACE, 10, 4, 0).decide(history, 3).clone is None


def test_a_trial_waits_for_no_trial_that_has_come_as_far_nor_for_one_that_has_a_place():
    history = population([5.0], [1.0], [2.0], [3.0])
    taken = PopulationBased(SPACE, 10, 4, 0).decide(history, 0)
    assert (taken.state, taken.milestone) == ("paused", 20)
    history[0] = replace(history[0], state="paused", milestone=20.0, run="run-0+")
    assert PopulationBased(SPACE, 10, 4, 0).decide(history, 2).state == "running"
    history[2] = replace(history[2], reports=(*history[2].reports, RungReport(20, 1.5, "id-2", run="run-2")))
    states = [PopulationBased(SPACE, 10, 4, 0, places).decide(history, 2).state for places in (1, 3, 4)]
    assert states == ["paused", "paused", "running"]


def test_a_trial_waits_for_trials_that_have_not_begun_unless_they_have_places():
    history = population([1.0], [])
    assert [PopulationBased(SPACE, 10, 4, 0, it).decide(history, 0).state for it in (2, 3, 4)] == [
        "paused",
        "paused",
        "running",
    ]
