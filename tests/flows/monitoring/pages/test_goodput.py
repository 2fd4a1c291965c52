"""Where the time of a run went, from stories whose seconds one can count."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.flows.monitoring.pages.attempt_log import END, CommitMarks, resume_points
from prefect_torch.flows.monitoring.pages.goodput import TimeSpent, time_spent
from run_stories import BEGUN_S, checkpoint_id, told


def spent(*logs, now_s=1000.0):
    found = time_spent(logs, BEGUN_S + now_s)
    parts = {name: getattr(found, name) for name in TimeSpent.__dataclass_fields__}
    return {name: round(seconds, 3) for name, seconds in parts.items() if round(seconds, 3)}


def every_ten(first, last, begun_s):
    return {step: begun_s + 10.0 * (step - first + 1) for step in range(first, last + 1)}


def test_the_first_step_begins_one_mean_interval_before_the_first_report():
    assert spent(told(1, 0, every_ten(0, 9, 5), 107, "completed")) == {"restarting": 5, "training": 102}


def test_checkpoints_are_counted_apart_and_those_nobody_measured_by_the_mean():
    for unmeasured in ((), (3,)):
        log = told(1, 0, every_ten(0, 9, 5), 105, "completed", saved=(3, 6, 9), stall_s=2.0, unmeasured=unmeasured)
        assert spent(log) == {"restarting": 5, "checkpointing": 6, "training": 94}


def test_what_was_done_after_the_restored_checkpoint_is_lost_and_the_pause_is_restarting():
    first = told(1, 0, every_ten(0, 9, 5), 112, "failed", saved=(3, 6))
    second = told(2, 115, every_ten(7, 9, 120), 150, "completed", resumed_from=f"/s/run/checkpoints/{checkpoint_id(1, 6)}")
    assert spent(first, second) == {"restarting": 5 + 3 + 5, "training": 70 + 30, "lost": 112 - 75}


def test_a_damaged_checkpoint_throws_a_run_back_behind_an_attempt():
    first = told(1, 0, every_ten(0, 4, 0), 50, "failed", saved=(1, 3))
    second = told(2, 50, every_ten(4, 8, 50), 100, "failed", saved=(5, 7), resumed_from=checkpoint_id(1, 3))
    third = told(3, 100, every_ten(2, 8, 100), 170, "completed", resumed_from=checkpoint_id(1, 1))
    assert spent(first, second, third) == {"training": 20 + 70, "lost": 30 + 50}
    assert resume_points([first, second, third])[2] == (1, 1)


def test_the_origin_of_an_attempt_is_sought_only_in_the_attempt_that_wrote_it(monkeypatch):
    asked = []
    monkeypatch.setattr(CommitMarks, "__contains__", lambda self, key: asked.append(self) or key in self._marks)
    logs = [told(1, 0, {0: BEGUN_S + 10.0}, 20, "preempted", saved=(0,))]
    for number in range(2, 31):
        begun_s, origin = number * 20.0, checkpoint_id(number - 1, number - 2)
        logs.append(told(number, begun_s, {number - 1: begun_s + 10.0}, 20, "preempted", (number - 1,), resumed_from=origin))
    assert resume_points(logs) == {**{log.number: (log.number, log.number - 1) for log in logs}, 30: END}
    assert len(asked) == 29


def test_a_run_that_begins_anew_or_from_another_run_has_lost_all_before():
    first = told(1, 0, every_ten(0, 4, 0), 50, "failed", saved=(3,))
    for origin in (None, f"/s/other/checkpoints/{checkpoint_id(7, 3)}"):
        again = told(2, 50, every_ten(0, 4, 50), 100, "completed", resumed_from=origin)
        assert spent(first, again) == {"training": 50, "lost": 50}


def test_time_between_flow_runs_does_not_count():
    first = told(1, 0, every_ten(0, 4, 0), 50, "completed", saved=(4,))
    later = told(2, 5000, every_ten(5, 9, 5000), 5050, "completed", resumed_from=checkpoint_id(1, 4), flow_run="b")
    assert spent(first, later) == {"training": 100, "away": 4950}
    assert time_spent([first, later], BEGUN_S + 9999).goodput == 1.0


def test_a_training_that_gave_up_has_lost_what_came_after_its_newest_commit():
    assert spent(told(1, 0, every_ten(0, 4, 0), 53, "failed", saved=(1,))) == {"training": 20, "lost": 33}
    assert spent(told(1, 0, every_ten(0, 4, 0), 53, "failed")) == {"lost": 53}


def test_a_trial_that_a_decision_has_stopped_has_lost_nothing():
    assert spent(told(1, 0, every_ten(0, 4, 0), 53, "stopped")) == {"training": 53}


def test_a_running_attempt_has_lost_nothing_yet_and_ends_now():
    assert spent(told(1, 0, every_ten(0, 4, 0)), now_s=57.0) == {"training": 57}


def test_before_the_first_report_everything_is_starting():
    assert spent(told(1, 0, {}), now_s=9.0) == {"restarting": 9}
    assert time_spent([], BEGUN_S).goodput is None


def test_a_single_report_does_not_tell_when_its_step_began():
    assert spent(told(1, 0, {0: 60.0}, 60, "completed")) == {"training": 60}


def test_an_attempt_that_was_overtaken_counts_until_its_successor_claims():
    first = told(1, 0, every_ten(0, 4, 0), 80, "failed", saved=(3,))
    second = told(2, 45, every_ten(4, 5, 45), 65, "completed", resumed_from=checkpoint_id(1, 3), flow_run="b")
    assert spent(first, second) == {"training": 40 + 20, "lost": 5}


times = st.floats(0, 1000)


@given(st.lists(st.tuples(times, st.lists(times, max_size=6), times, st.booleans(), times), min_size=1, max_size=5))
def test_every_second_is_counted_once_whatever_clocks_say(attempts):
    logs = []
    for number, (claimed_s, reports, ended_s, completed, stall_s) in enumerate(attempts, 1):
        ending = "completed" if completed else "failed"
        logs.append(told(number, claimed_s, dict(enumerate(reports)), ended_s, ending, saved=(1, 3), stall_s=stall_s))
    found = time_spent(logs, BEGUN_S + 1000)
    parts = [getattr(found, name) for name in TimeSpent.__dataclass_fields__]
    assert min(parts) >= 0
    assert sum(parts) <= 1000.001
    in_order = [log.claimed_s for log in logs] == sorted(log.claimed_s for log in logs)
    if in_order:
        ended_s = max(log.claimed_s for log in logs)
        ended_s = max(ended_s, logs[-1].ended_s)
        assert sum(parts) == pytest.approx(ended_s - logs[0].claimed_s, abs=1e-3)
