"""What the leader does about ranks that do not end; whole gangs of real processes are in tests/flows."""

import logging
import socket
import threading
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect import tags
from prefect.context import TagsContext
from prefect.exceptions import TerminationSignal
from prefect.states import Completed
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.tasks.gang import gang, gang_run
from prefect_torch.tasks.gang.gang import Gang
from prefect_torch.tasks.gang.gang_run import GangRun
from prefect_torch.tasks.gang.starting import start_gang
from prefect_torch.tasks.gang.termination import TerminatedError, Termination
from prefect_torch.tasks.rank.errors import RankFailedError
from rank_specs import rank_spec


class Supervisor:
    """Stands for the task run of a rank whose process the kernel does not let go of: SIGKILL waits for a disk, say."""

    def __init__(self):
        self.done = []
        self.task_run_id = uuid4()

    def submit(self, spec, machine, log, stop):
        self.stop = stop
        self.tags = TagsContext.get().current_tags
        return self

    def add_done_callback(self, done):
        self.done.append(done)


@pytest.fixture
def supervisor(monkeypatch):
    supervisor = Supervisor()
    monkeypatch.setattr(gang, "train_rank", supervisor)
    for module in (gang, gang_run):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("gang"))
        monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(gang, "_STOP_WARNING_S", 0.01)
    return supervisor


def started(specs):
    ranks = Gang(specs, None)
    ranks.start()
    return ranks


def test_a_rank_that_cannot_be_stopped_is_named_and_no_attempt_starts_beside_it(supervisor, monkeypatch, caplog):
    now_s = [0.0]

    def sleep(seconds):
        now_s[0] += seconds

    monkeypatch.setattr(gang, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    for name, seconds in (("POLL_S", 1.0), ("_STOP_WARNING_S", 30.0), ("_MOST_STOP_WAITS", 3)):
        monkeypatch.setattr(gang, name, seconds)
    ranks = started([None, None])
    supervisor.done[0](None)
    for _ in range(2):  # the second time, it does not wait as long again
        with pytest.raises(RankFailedError, match=r"rank 1 could not be stopped within 90 s") as caught:
            ranks.stop("over")
        assert caught.value.kind == "final"
        assert now_s == [90.0]
    assert supervisor.stop.reason == "over"
    assert caplog.text.count("rank 1 was killed and has not exited yet") == 2


def test_a_machine_whose_rank_does_not_exit_is_given_up_after_a_minute_and_its_rank_with_it(supervisor, monkeypatch, caplog):
    """As one whose GPU hangs, or whose disk is gone: fencing refuses what its rank writes, and others need not wait for it."""
    now_s, given_up = [0.0], []

    def sleep(seconds):
        now_s[0] += seconds

    def machine(name):
        return SimpleNamespace(name=name, release=lambda reason: given_up.append((name, now_s[0])) or supervisor.done[1](None))

    monkeypatch.setattr(gang, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    for name, seconds in (("POLL_S", 1.0), ("_STOP_WARNING_S", 30.0)):
        monkeypatch.setattr(gang, name, seconds)
    ranks = Gang([rank_spec(node_rank=node) for node in range(2)], None, [machine("a"), machine("b")])
    ranks.start()
    supervisor.done[0](None)
    ranks.stop("over")
    assert given_up == [("b", 60.0)]
    assert ranks.has_exited()
    assert "machine b is given up" in caplog.text


def test_ranks_that_were_frozen_with_their_leader_have_time_to_end(supervisor, monkeypatch):
    """As in a container that is paused for half an hour at that moment: they die as soon as they may."""
    sleeps, now_s = [], [0.0]

    def sleep(seconds):
        sleeps.append(seconds)
        now_s[0] += seconds if len(sleeps) > 1 else 1800.0
        if len(sleeps) == 3:
            supervisor.done[0](None)

    monkeypatch.setattr(gang, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    started([None]).stop("over")
    assert len(sleeps) == 3


def test_a_rank_does_not_wait_for_the_slot_of_a_tag_that_its_attempt_has(supervisor):
    with tags("limited"):
        started([None])
    assert supervisor.tags == set()


def test_a_hang_that_is_found_while_ranks_that_have_returned_end_is_none(supervisor):
    """Their last threads may take seconds; they are stopped, and what they returned is known."""
    ranks = started([None])
    supervisor.state, supervisor.result = Completed(), lambda raise_on_failure: 7
    supervisor.done[0](None)
    run = GangRun(ranks, MemoryKeyValue(), None, Termination(0.0))
    assert run._result(RankFailedError("the training hangs", None, "infrastructure"), None) == 7


@pytest.mark.parametrize("failing", ["a rank", "the store"])
def test_a_start_that_fails_stops_the_ranks_that_were_started_and_waits_for_them(supervisor, monkeypatch, caplog, failing):
    class TooMany:
        def submit(self, spec, *arguments):
            if spec.rank == 1 and failing == "a rank":
                fail()
            return supervisor.submit(spec, *arguments)

    class EndAtTheFirstWarning(logging.Filter):
        def filter(self, record):
            for done in supervisor.done:
                done(None)
            return True

    def fail(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(gang, "train_rank", TooMany())
    monkeypatch.setattr(logging.getLogger("gang"), "filters", [EndAtTheFirstWarning()])
    if failing == "the store":
        monkeypatch.setattr("prefect_torch.tasks.rank.rendezvous._tcp_store", fail)
    listening = []

    def first_rank_at(address):
        listening.append(address)
        return rank_spec(world_size=2, rendezvous=address)

    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_gang(first_rank_at, None, Termination(0.0))
    assert "not every rank could be started" in supervisor.stop.reason
    running = "rank 0 was" if failing == "a rank" else "rank 0, 1 was"
    assert caplog.text.count(f"{running} killed and has not exited yet") == 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((listening[0].host, listening[0].port), 5)


def test_a_termination_stops_ranks_at_once_that_start_while_the_leader_imports_torch(supervisor, monkeypatch):
    termination, may_import, imported = Termination(3600.0), threading.Event(), threading.Event()

    def import_torch():
        termination.request(KeyboardInterrupt())
        supervisor.done[0](None)
        if may_import.wait(60):
            imported.set()

    monkeypatch.setattr("prefect_torch.tasks.gang.starting.import_torch", import_torch)
    with pytest.raises(TerminatedError):
        start_gang(lambda address: rank_spec(rendezvous=address), None, termination)
    assert supervisor.stop.reason == "stopped: terminated (KeyboardInterrupt)"
    assert not imported.is_set()
    may_import.set()
    assert imported.wait(60)


def test_stopping_waits_for_a_rank_that_takes_longer_than_the_first_warning(supervisor, monkeypatch, caplog):
    class EndAtTheSecondWarning(logging.Filter):
        def filter(self, record):
            if caplog.text.count("has not exited yet") == 1:
                supervisor.done[0](None)
            return True

    ranks = started([None])
    monkeypatch.setattr(logging.getLogger("gang"), "filters", [EndAtTheSecondWarning()])
    ranks.stop("over")
    assert caplog.text.count("rank 0 was killed and has not exited yet") == 2


def test_ranks_keep_their_grace_when_the_flow_is_terminated_while_they_leave_a_machine(supervisor):
    """As at the time limit of a Slurm job, where agents and flow get SIGTERM at the same time."""
    termination = Termination(20.0)
    supervisor.result = lambda raise_on_failure: None

    class Store(MemoryKeyValue):
        def set(self, key, value):
            if termination.is_requested:
                supervisor.done[0](None)  # the rank ends with its last checkpoint
            termination.request(TerminationSignal(15))

    ranks = started([None])
    ranks.machines = [SimpleNamespace(name="a", is_terminated=True)]
    with pytest.raises(TerminatedError):
        GangRun(ranks, Store(), None, termination).run()
    assert ranks.has_exited()
