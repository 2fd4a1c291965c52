"""Pages are published ever more seldom: what bounds the requests of a training, by a clock that no test waits for."""

from itertools import pairwise

from prefect_torch.flows.monitoring.pages.pace import Pace


def published_within(seconds, asked_every_s=0.1):
    now_s = [0.0]
    pace = Pace(clock=lambda: now_s[0])
    times = []
    while now_s[0] < seconds:
        if pace.wait_s() == 0:
            pace.take()
            times.append(now_s[0])
        now_s[0] += asked_every_s
    return times


def test_a_hundred_seconds_of_news_publish_at_most_sixteen_times():
    times = published_within(100)
    assert times[0] == 0
    assert 14 <= len(times) <= 16
    assert times[1] < 2.2


def test_in_the_long_run_it_is_twice_a_minute():
    times = [at_s for at_s in published_within(7200, 1.0) if at_s >= 3600]
    assert len(times) <= 121
    assert max(later - at_s for at_s, later in pairwise(times)) <= 31


def test_it_tells_how_long_to_wait():
    now_s = [5.0]
    pace = Pace(first_s=2.0, clock=lambda: now_s[0])
    assert pace.wait_s() == 0
    pace.take()
    now_s[0] = 6.5
    assert pace.wait_s() == 0.5
