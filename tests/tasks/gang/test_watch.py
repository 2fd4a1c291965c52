from prefect_torch.tasks.gang.watch import RankWatch


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def watch_for(seconds, *, hang_timeout_s=None, beating=(), reporting=False, look_every_s=1.0):
    """Return what two watched ranks' problem is after `seconds`."""
    clock = Clock()
    watch = RankWatch(range(2), hang_timeout_s, clock)
    problem = None
    while problem is None and clock.now_s < 100 + seconds:
        clock.now_s += look_every_s
        watch.record_heartbeats({rank: int(clock.now_s) if rank in beating else 0 for rank in range(2)})
        if reporting:
            watch.record_report()
        problem = watch.problem([0, 1])
    return problem


def test_ranks_that_give_signs_of_life_have_no_problem():
    assert watch_for(10_000, beating=[0, 1]) is None


def test_a_rank_that_falls_silent_is_lost_after_a_minute():
    problem = watch_for(62, beating=[0])
    assert (problem.rank, problem.kind) == (1, "infrastructure")
    assert "rank 1 is lost" in str(problem)
    assert watch_for(59, beating=[0]) is None


def test_ranks_that_report_do_not_hang():
    assert watch_for(1000, beating=[0, 1], reporting=True, hang_timeout_s=5) is None


def test_ranks_that_do_not_report_hang():
    problem = watch_for(7, beating=[0, 1], hang_timeout_s=5)
    assert (problem.rank, problem.kind) == (None, "infrastructure")
    assert "no report came for 5 s (hang_timeout_s)" in str(problem)
    assert watch_for(4, beating=[0, 1], hang_timeout_s=5) is None


def test_a_leader_that_was_stopped_does_not_blame_its_ranks():
    """As a laptop's lid or SIGSTOP does: hours may pass between two looks."""
    assert watch_for(10_000, look_every_s=3600, hang_timeout_s=5) is None


def test_a_rank_that_has_ended_is_not_watched():
    clock = Clock()
    watch = RankWatch([0], 1, clock)
    clock.now_s += 5
    assert watch.problem([]) is None
