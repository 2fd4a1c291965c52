import threading

import pytest
from prefect_torch.ckpt import CheckpointError
from prefect_torch.ckpt.reporting import checkpoint_requests
from prefect_torch.ckpt.reporting.background import BackgroundCommits
from prefect_torch.ckpt.reporting.checkpoint_requests import CheckpointRequests
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from prefect_torch.ckpt.reporting.overhead import CommitCosts, OverheadBudget
from prefect_torch.ckpt.reporting.rounds import Rounds
from ranks import Attempt, folder


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_without_a_target_none_is_ever_due():
    assert not OverheadBudget(None, CommitCosts()).is_due()


def test_stalls_take_the_share_of_time_that_was_asked_for():
    clock = Clock()
    costs = CommitCosts()
    budget = OverheadBudget(0.01, costs, clock)
    stalled_s = 0.0
    while clock.now_s < 2000:
        if budget.is_due():
            costs.begun_s = clock.now_s
            clock.now_s += 0.3
            stalled_s += 0.3
            costs.stall_s = 0.3
        clock.now_s += 0.1
    assert 0.009 < stalled_s / 1000 <= 0.0103


def test_the_next_waits_for_the_one_under_way_and_a_failed_one_tells_nothing():
    clock = Clock()
    costs = CommitCosts(num_begun=1, begun_s=clock.now_s)
    budget = OverheadBudget(0.5, costs, clock)
    clock.now_s += 100
    assert not budget.is_due()
    costs.num_ended += 1
    assert budget.is_due()


def test_every_rank_gets_the_same_answers_and_they_leave_nothing_behind(store, tmp_path):
    answers = {}
    attempt = Attempt(store, 3, target_overhead=0.5)

    def train(session, rank):
        answers[rank] = []
        for step in range(200):
            answers[rank].append(session.context.should_checkpoint())
            if answers[rank][-1]:
                session.report({"step": step}, folder(tmp_path / str(rank), **{f"m{rank}": str(step)}), upload="async")
        session.report({})

    assert attempt.run(train) == [None] * 3
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0]
    assert len(store.list()) == sum(answers[0])
    assert not [key for key in attempt.key_value._values if key.startswith("checkpoint now")]


@pytest.mark.parametrize("nodes", [(), (2, 1), (1,)])
def test_answers_without_a_report_for_days_are_deleted(store, monkeypatch, nodes):
    monkeypatch.setattr(checkpoint_requests, "_BLOCK", 8)
    attempt = Attempt(store, sum(nodes) or 3, nodes)
    together, most = threading.Barrier(attempt.world_size), [0]
    stores = [attempt.key_value, *(node.key_value for node in attempt.nodes)]

    def train(session, rank):
        for _ in range(300):
            for _ in range(20):
                session.context.should_checkpoint()
            together.wait(30)
            if rank == 0:
                most[0] = max([most[0], *(len(it._values) for it in stores)])
            together.wait(30)
        session.report({})
        session.context.should_checkpoint()

    assert attempt.run(train) == [None] * attempt.world_size
    assert most[0] < 150
    assert not [key for it in stores for key in it._values if key.startswith("checkpoint now")]


def test_the_end_from_outside_is_seen_in_the_same_call_on_every_rank(store):
    attempt = Attempt(store, 2)
    calls = {}

    def train(session, rank):
        calls[rank] = 1
        while not session.context.should_checkpoint():
            calls[rank] += 1
            attempt.ends_soon |= calls[0] > 50

    assert attempt.run(train) == [None, None]
    assert calls[0] == calls[1] > 50


def test_the_end_is_told_from_a_pace_that_is_due(store):
    attempt = Attempt(store, 2, target_overhead=0.5)
    told = {}

    def train(session, rank):
        told[rank] = [(session.context.should_checkpoint(), session.context.ends_soon())]
        session.report({})
        attempt.ends_soon = True
        told[rank].append((session.context.should_checkpoint(), session.context.ends_soon()))

    assert attempt.run(train) == [None, None]
    assert told[0] == told[1] == [(True, False), (True, True)]


class AskingRank:
    """Rank 0, who asks in a loop of steps that take as long as one says."""

    def __init__(self):
        self.clock = Clock()
        self.key_value = MemoryKeyValue()
        self.ends_soon = False
        peers = Peers(self.key_value, 0, 2)
        rounds = Rounds(peers, 1, BackgroundCommits())
        budget = OverheadBudget(None, CommitCosts(), self.clock)
        self.requests = CheckpointRequests(peers, rounds, budget, lambda: self.ends_soon, self.clock)

    def messages_of(self, steps, step_s):
        before = len(self.key_value._values)
        for _ in range(steps):
            self.clock.now_s += step_s
            self.requests.should_checkpoint()
        return len(self.key_value._values) - before


@pytest.mark.parametrize(("step_s", "most"), [(0.6, 160), (0.1, 40), (0.005, 10), (0.0001, 10)])
def test_quick_steps_share_a_message(step_s, most):
    rank = AskingRank()
    rank.messages_of(20, step_s)  # to learn how quick they are
    assert most - 1 <= rank.messages_of(160, step_s) <= most + 1


def test_an_answer_that_all_have_read_is_deleted_once(monkeypatch):
    rank = AskingRank()
    deleted = []
    monkeypatch.setattr(rank.key_value, "delete", deleted.append)
    for _ in range(2):
        rank.messages_of(3, 1.0)
        rank.requests.forget_answers()
    assert deleted == [f"checkpoint now {number}" for number in range(6)]


def test_the_end_is_seen_within_sixteen_quick_steps_also_when_they_become_slow():
    rank = AskingRank()
    rank.messages_of(100, 0.0001)
    rank.ends_soon = True
    asked = 0
    while not rank.requests.should_checkpoint():
        asked += 1
        rank.clock.now_s += 10
    assert asked <= 16
    assert rank.requests.stop_requested


def test_a_rank_that_asks_after_rank_0_has_left_is_told(store):
    left = threading.Event()

    def train(session, rank):
        if rank == 0:
            left.set()
            raise ZeroDivisionError
        assert left.wait(10)
        session.context.should_checkpoint()

    errors = Attempt(store, 2).run(train)
    assert isinstance(errors[1], CheckpointError)


@pytest.mark.parametrize("asks_less", [0, 1])
def test_ranks_that_do_not_ask_equally_often_are_told_instead_of_waiting_for_ever(store, asks_less):
    def train(session, rank):
        for step in range(3):
            if rank != asks_less or step != 1:
                session.context.should_checkpoint()
            session.report({}, step=step)

    errors = Attempt(store, 2).run(train)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert any("equally often on every rank" in str(error) for error in errors)


def test_rank_0_may_ask_alone(store):
    def train(session, rank):
        for _ in range(3):
            if rank == 0:
                session.context.should_checkpoint()
            session.report({})

    assert Attempt(store, 2).run(train) == [None, None]
