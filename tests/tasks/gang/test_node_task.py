"""Ranks that share a task run: their machine is simulated, the store they meet at is real."""

import errno
import logging
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Timer

import pytest
from prefect_torch.ckpt.reporting.exchange.exits import RankExit, announce_exit, read_exits
from prefect_torch.tasks.gang import node_task, rank_logs
from prefect_torch.tasks.gang.machine.remote_rank import RemoteRank
from prefect_torch.tasks.gang.node_task import train_node
from prefect_torch.tasks.gang.rank_groups import RankGroup, group_ranks
from prefect_torch.tasks.gang.rank_task import Heartbeat, run_rank
from prefect_torch.tasks.gang.stop_order import StopOrder
from prefect_torch.tasks.rank.rendezvous import Rendezvous
from prefect_torch.tasks.rank.spec import MOST_TASK_RUNS, RankResult, on_machines
from rank_specs import rank_spec

FIRST = rank_spec()


def test_few_ranks_have_a_task_run_each():
    for num_ranks in ((MOST_TASK_RUNS,), (MOST_TASK_RUNS // 2,) * 2):
        groups = group_ranks(on_machines(FIRST, num_ranks))
        assert [str(group) for group in groups] == [str(rank) for rank in range(MOST_TASK_RUNS)]


def test_a_thousand_ranks_on_125_machines_have_126_task_runs():
    groups = group_ranks(on_machines(FIRST, (8,) * 125))
    assert [str(group) for group in groups[:3]] == ["0", "1-7", "8-15"]
    assert [group.node for group in groups] == [0, *range(125)]
    assert [spec.rank for group in groups for spec in group.specs] == list(range(1000))
    assert len(groups) == 126


class PlayedRank:
    """A rank that ends when it is told how, or terminated."""

    def __init__(self):
        self.told = queue.SimpleQueue()
        self.result = RankResult(kind="infrastructure", error="killed")

    def lines(self, poll_s):
        while True:
            yield ["a line"]
            if (result := self.told.get()) is not None:
                self.result = result
                return

    def wake(self):
        self.told.put(None)

    def terminate(self):
        self.told.put(RankResult(kind="preemption", error="terminated"))

    def write_stack_traces(self):
        return False

    def kill(self):
        pass

    def finish(self):
        return self.result


class PlayedMachine:
    """Ranks, by number; a rank whose number is in `broken` cannot be started."""

    def __init__(self, ranks, broken=(), error=None):
        self.ranks, self.broken, self.error = {rank: PlayedRank() for rank in ranks}, broken, error

    def start(self, spec):
        if spec.rank in self.broken:
            raise self.error
        return self.ranks[spec.rank]


@pytest.fixture
def group(monkeypatch):
    """Ranks 1, 2 and 3 of a machine, with the leader's store."""
    monkeypatch.setattr(rank_logs, "get_run_logger", lambda: logging.getLogger("ranks"))
    rendezvous = Rendezvous()
    key_value = rendezvous.serve()
    specs = on_machines(replace(FIRST, rendezvous=rendezvous.address), (4,), ("b",))[1:]
    return RankGroup(range(1, 4), tuple(specs)), key_value


def test_ranks_that_return_complete_their_task_run_and_their_lines_bear_their_numbers(group, caplog):
    group, key_value = group
    machine = PlayedMachine(group.ranks)
    for rank in machine.ranks.values():
        rank.told.put(RankResult())
    with caplog.at_level(logging.INFO, "ranks"):
        assert train_node.fn(group, machine, None, StopOrder()) is None
    assert sorted(record.getMessage() for record in caplog.records) == [f"rank {rank}: a line" for rank in group.ranks]
    assert read_exits(key_value) == []


def test_the_cause_of_several_failures_is_that_of_the_task_run(group):
    group, key_value = group
    machine = PlayedMachine(group.ranks)
    machine.ranks[1].told.put(RankResult(kind="peer", error="rank 3 is gone"))
    machine.ranks[2].told.put(RankResult())
    machine.ranks[3].told.put(RankResult(kind="user", error="boom"))
    state = train_node.fn(group, machine, None, StopOrder())
    assert state.is_failed()
    assert (state.data.rank, state.message) == (3, "rank 3 of attempt 1 on machine b failed: boom")
    assert {end.rank for end in read_exits(key_value)} == {1, 3}


def test_a_rank_that_had_returned_when_it_is_stopped_has_completed(group):
    """It has its last threads to wait for, or what is registered for its exit."""
    group, key_value = group
    machine, stop = PlayedMachine(group.ranks), StopOrder()
    for rank in machine.ranks.values():
        rank.terminate = partial(rank.told.put, RankResult())
    stop.give("the attempt is over")
    assert train_node.fn(group, machine, None, stop) is None
    assert read_exits(key_value) == []


def test_ranks_that_are_stopped_cancel_their_task_run(group):
    group, _ = group
    stop = StopOrder()
    stop.give("another rank failed")
    stop.give("the attempt is over")
    state = train_node.fn(group, PlayedMachine(group.ranks), None, stop)
    assert state.is_cancelled()
    assert state.message == "another rank failed"


def test_a_rank_that_is_on_its_way_out_when_all_are_stopped_is_still_the_cause(group):
    """On a busy machine, the process of a rank that has announced its failure may take longer to exit than the leader waits.

    A SIGTERM meanwhile would leave "preemption" as all that is known.
    """
    group, key_value = group
    machine, stop = PlayedMachine(group.ranks), StopOrder()
    announce_exit(key_value, RankExit(2, 1, "failed", "boom"))
    stop.give("another rank failed")
    leaving = Timer(0.5, machine.ranks[2].told.put, [RankResult(kind="user", error="boom")])
    leaving.start()
    state = train_node.fn(group, machine, None, stop)
    leaving.join()
    assert state.is_failed()
    assert (state.data.rank, state.data.kind) == (2, "user")


def test_a_rank_that_cannot_be_started_does_not_keep_its_neighbours_waiting(group):
    """The leader learns of it, and stops them."""
    group, key_value = group
    stop = StopOrder()

    class Machine(PlayedMachine):
        def start(self, spec):
            try:
                return super().start(spec)
            finally:
                if spec.rank in self.broken:
                    stop.give("the leader has seen it")

    with pytest.raises(ValueError, match="no such file"):
        train_node.fn(group, Machine(group.ranks, [2], ValueError("no such file")), None, stop)
    assert "no such file" in next(end.detail for end in read_exits(key_value) if end.rank == 2)


@pytest.mark.timeout(60)
def test_a_rank_for_which_no_thread_can_be_started_does_not_keep_its_neighbours_waiting(group, monkeypatch):
    """For a store that this task run never connects to."""
    group, _ = group

    class Pool(ThreadPoolExecutor):
        def submit(self, *arguments):
            if self._threads:
                raise RuntimeError("can't start new thread")
            return super().submit(*arguments)

    monkeypatch.setattr(node_task, "ThreadPoolExecutor", Pool)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        train_node.fn(group, PlayedMachine(group.ranks), None, StopOrder())


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")])
def test_a_rank_for_which_this_machine_has_no_room_for_the_moment_counts_as_lost(group, error):
    """Of descriptors, processes or threads: the next attempt may find some."""
    group, key_value = group
    spec = group.specs[1]
    heartbeat = Heartbeat(lambda: key_value, spec.rank)
    state = run_rank(spec, PlayedMachine([], [spec.rank], error), StopOrder(), heartbeat, rank_logs.RankLog(spec.rank))
    assert (state.data.rank, state.data.kind) == (spec.rank, "infrastructure")
    (announced,) = read_exits(key_value)
    assert announced.detail == f"its process cannot be started: {error}"


def test_a_rank_elsewhere_is_stopped_at_once_though_its_output_is_awaited_for_seconds():
    orders, stop = [], StopOrder()
    rank = RemoteRank(orders.append, "machine", RankResult, records_collectives=False)
    stop.follow(rank.wake)
    lines = rank.lines(0.01)
    rank.record({"type": "lines", "lines": ["a line"]})
    assert next(lines) == ["a line"]
    stop.give("over")
    assert next(lines) == []  # it was woken
    assert next(lines) == []  # and looks often now
    late = RemoteRank(orders.append, "machine", RankResult, records_collectives=False)
    stop.follow(late.wake)
    assert next(late.lines(0.01)) == []
