"""Which machines the next attempt of a training has."""

import logging
import os
import re
import resource
import shlex
import signal
import sys
import time
from contextlib import closing, nullcontext, suppress
from types import SimpleNamespace
from typing import ClassVar, Literal

import pytest
from agents import agents
from prefect_servers import wait_until
from prefect_torch.tasks import Hosts
from prefect_torch.tasks.gang.engines import kubernetes_job
from prefect_torch.tasks.gang.engines.agent_process import AGENT
from prefect_torch.tasks.gang.engines.cluster import Cluster, MachineRequest
from prefect_torch.tasks.gang.machine import avoided, gathering, lending
from prefect_torch.tasks.gang.machine.lending import Machines
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError, RankFailedError
from pretended_gpus import pretended_machine

# An agent that is told of its end as soon as the leader knows of it.
TERMINATED_AT_ONCE = """
import os, signal, sys
from prefect_torch.tasks.gang.machine import agent
from prefect_torch.tasks.gang.machine.link import Link

send = Link.send

def send_and_be_terminated(self, header, *more):
    send(self, header, *more)
    if header["type"] == "hello":
        os.kill(os.getpid(), signal.SIGTERM)

Link.send = send_and_be_terminated
sys.exit(agent.main(sys.argv[4:]))
"""
# An agent whose machine needs ten minutes for the list of its GPUs, and has one.
SLOW_GPUS = """
import sys, time, types
from prefect_torch.tasks.gang.machine import agent

monotonic = time.monotonic

def take(most, leader):
    time.monotonic = lambda: monotonic() + 600
    return types.SimpleNamespace(locks=(0,), environment={})

agent._take_gpus = take
sys.exit(agent.main(sys.argv[4:]))
"""
HERE = {"command": "exec {agent}", "ranks_per_host": 1, "leader_address": "127.0.0.1", "wait_s": 0}


@pytest.fixture(autouse=True)
def agents_prepare_nothing(monkeypatch):
    """Have agents import no torch for ranks, which nobody starts here."""
    monkeypatch.setenv("PREFECT_INTEGRATIONS_TORCH_FORK_RANKS", "false")


def lent_until(machines, failure=None):
    """Return the machine of an attempt that ends with `failure`, or well."""
    with suppress(RankFailedError), machines.lend(lambda: None) as lease:
        if failure is not None:
            raise RankFailedError("rank 0 failed", 0, failure)
    return lease.machines[0]


def test_machines_are_kept_while_they_are_not_the_likely_cause():
    with closing(Machines(Hosts(["a"], **HERE), 1, 1, use_gpu=False)) as machines:
        first = lent_until(machines, "user")
        kept = [lent_until(machines, kind) for kind in ("infrastructure", "out_of_memory", "infrastructure", "infrastructure")]
        assert kept == [first] * 4
        assert first.lost is not None, "after two in a row"
        ended = []
        for failure in ("preemption", "communication", "final", None):
            ended.append(lent_until(machines, failure))
            assert ended[-1].lost is not None
        last = lent_until(machines, "infrastructure")  # counted anew, on machines that are lent anew
        assert last.lost is None
        assert len({first, *ended, last}) == 6
    assert last.lost is not None


def test_no_machine_is_asked_for_by_a_process_without_descriptors_for_its_ranks(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with (
        closing(Machines(Hosts(["a"], **HERE), 2000, 2000, use_gpu=False)) as machines,
        pytest.raises(OSError, match="may have 1024 files and sockets open, too few for a training of 2000 ranks"),
        machines.lend(lambda: None),
    ):
        pass


def test_fewer_machines_than_there_may_be_are_given_back():
    with closing(Machines(Hosts(["a"], **HERE), 1, 2, use_gpu=False)) as machines:
        assert lent_until(machines, "user").lost is not None


def test_a_kept_machine_that_is_going_to_be_taken_away_is_avoided():
    with closing(Machines(Hosts(["a", "b"], **HERE), 1, 1, use_gpu=False)) as machines:
        kept = lent_until(machines, "user")
        assert kept.lost is None
        (agent,) = [process for process, words in agents().items() if words[-4:-2] == ["--name", kept.name]]
        os.kill(agent.pid, signal.SIGTERM)
        wait_until(lambda: kept.is_terminated, "the agent tells")
        assert {kept.name, lent_until(machines).name} == {"a", "b"}
        assert kept.lost is not None


def test_a_machine_tells_of_its_end_from_the_moment_on_at_which_it_is_known_and_is_not_lent(tmp_path):
    """Its death would be a failure, of which a training has only so many."""
    (tmp_path / "agent.py").write_text(TERMINATED_AT_ONCE)
    cluster = Hosts(["a"], **{**HERE, "command": f"exec {sys.executable} {tmp_path / 'agent.py'} {{agent}}"})
    with gathering.gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())) as gathered:
        wait_until(gathered.reasons, "the agent tells", 30)
        assert gathered.reasons() == {"a": "it is about to be taken away (SIGTERM to its agent)"}
        assert not gathered.wait(lambda: None)


def test_a_machine_whose_gpus_are_listed_late_is_not_lost(tmp_path):
    """Until its agent says hello, the leader sends it no heartbeats."""
    (tmp_path / "agent.py").write_text(SLOW_GPUS)
    cluster = Hosts(["a"], **{**HERE, "command": f"exec {sys.executable} {tmp_path / 'agent.py'} {{agent}}"})
    with closing(Machines(cluster, 1, 1, use_gpu=True)) as machines, machines.lend(lambda: None) as lease:
        (machine,) = lease.machines
        (agent,) = agents()
        os.kill(agent.pid, signal.SIGTERM)
        wait_until(lambda: machine.lost or machine.is_terminated, "the agent tells")
        assert machine.lost is None


def test_a_request_leaves_gpus_that_no_rank_needs_to_others(monkeypatch):
    """Of a machine with two, as trials of one rank use it that begin together."""
    cluster = Hosts(["a"], **{**HERE, "ranks_per_host": None})
    requests = [Machines(cluster, 1, 1, use_gpu=True) for _ in range(2)]
    with (
        pretended_machine(monkeypatch, 2),
        requests[0].lend(lambda: None) as first,
        requests[1].lend(lambda: None) as second,
    ):
        assert [lease.machines[0].slots for lease in (first, second)] == [1, 1]


def test_of_two_machines_that_lost_each_other_the_next_attempt_has_one():
    with closing(Machines(Hosts(["a", "b", "c"], **HERE), 2, 2, use_gpu=False)) as machines:
        with suppress(RankFailedError), machines.lend(lambda: None) as lease:
            first, second = lease.machines
            first.unreached = frozenset({second.name})
            raise RankFailedError("they lost each other", None, "infrastructure")
        with machines.lend(lambda: None) as lease:
            assert second.name not in lease.names


def failed_on(machines, *ranks, kind="infrastructure"):
    """Return the machines of an attempt in which these ranks failed by themselves, the first one first."""
    with suppress(RankFailedError), machines.lend(lambda: None) as lease:
        first, *others = (RankFailedError(f"rank {rank} failed", rank, kind) for rank in ranks)
        first.others = tuple(others)
        raise first
    return lease.names


def test_a_machine_whose_ranks_alone_fail_again_is_avoided(monkeypatch, caplog):
    monkeypatch.setattr(avoided, "get_run_logger", lambda: logging.getLogger("avoided"))
    cluster = Hosts(["a", "b"], **{**HERE, "ranks_per_host": 2})
    with closing(Machines(cluster, 2, 3, use_gpu=False)) as machines:
        for ranks in [(0,), (0,), (2,), (2,), (2, 0), (2,), (2,)]:  # no machine alone, three times in a row
            assert failed_on(machines, *ranks) == ("a", "b")
        assert "is avoided" not in caplog.text
        assert failed_on(machines, 2) == ("a", "b")
        assert "machine b is avoided for 5 minutes" in caplog.text
        with machines.lend(lambda: None) as lease:
            assert lease.names == ("a",)


@pytest.mark.parametrize("between", ["preemption", "user", None, "loss"])
def test_failures_on_a_machine_are_counted_only_in_a_row(monkeypatch, caplog, between):
    """A machine that is lost is avoided in any case, and there is nothing to look at."""
    for module in (avoided, lending):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("machines"))
    with closing(Machines(Hosts(["a", "b"], **HERE), 2, 2, use_gpu=False)) as machines:
        for _ in range(2):
            failed_on(machines, 1)
        with suppress(RankFailedError), machines.lend(lambda: None) as lease:
            if between == "loss":
                lease.machines[1].release()
            if between is not None:
                raise RankFailedError("rank 1 failed", 1, "infrastructure" if between == "loss" else between)
        for _ in range(2):
            failed_on(machines, 1)
        assert "look at its GPUs" not in caplog.text
        failed_on(machines, 1)
        assert "machine b is avoided" in caplog.text


@pytest.mark.parametrize(("unprepared", "kind", "left"), [((1,), "unprepared", "a"), ((1, 0), "final", "ab")])
def test_a_machine_that_lacks_something_is_avoided_at_once_and_if_all_do_it_is_not_theirs(unprepared, kind, left, monkeypatch):
    monkeypatch.setattr(avoided, "get_run_logger", lambda: logging.getLogger("avoided"))
    first, *others = (RankFailedError(f"rank {rank} failed", rank, "unprepared") for rank in unprepared)
    first.others = tuple(others)
    with closing(Machines(Hosts(["a", "b"], **HERE), 1, 2, use_gpu=False)) as machines:
        monkeypatch.setattr(gathering, "_MORE_S", 60.0)
        with suppress(RankFailedError), machines.lend(lambda: None):
            raise first
        assert first.kind == kind
        with machines.lend(lambda: None) as lease:
            assert lease.names == tuple(left)


class Pods(Cluster):
    """A cluster that chooses the machines of numbered pods anew for each request, as Kubernetes does."""

    kind: Literal["pods"] = "pods"
    requests: ClassVar[list[MachineRequest]] = []

    def lend(self, wanted, agents):
        self.requests.append(wanted)
        nodes = ["bad", "good", "good"]
        for number in range(3):
            name = f"{nodes[number - len(self.requests)]}/{number}"
            command = [sys.executable, "-m", AGENT, *agents.arguments(name, 1)]
            agents.run(f"exec {shlex.join(command)}", [f"pod {number}"])
        return nullcontext()

    def expected_name(self, agent):
        return kubernetes_job.pod_of(agent)

    def machine_of(self, agent):
        return kubernetes_job.machine_of(agent)


def test_a_machine_whose_ranks_alone_fail_again_is_known_whatever_its_pods_are_called(monkeypatch, caplog):
    for module in (avoided, lending):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("machines"))
    Pods.requests.clear()
    with closing(Machines(Pods(leader_address="127.0.0.1", wait_s=0), 2, 3, use_gpu=False)) as machines:
        names = []
        while "machine bad is avoided" not in caplog.text:
            assert len(names) < 3
            with suppress(RankFailedError), machines.lend(lambda: None) as lease:
                (number,) = (number for number, name in enumerate(lease.names) if name.startswith("bad/"))
                names.append(lease.names[number])
                raise RankFailedError("its rank failed", number, "infrastructure")
        assert len(set(names)) == 2, "the machines were lent anew after two failures"
        with machines.lend(lambda: None):
            assert Pods.requests[-1].avoid == {names[-1]}


def test_an_attempt_that_ends_for_more_ranks_has_its_machines_and_the_new_ones_next(tmp_path):
    """In a queue, others would get what is released."""
    cluster = Hosts(["a", "b"], **{**HERE, "ranks_per_host": None, "command": f"test -e {tmp_path}/{{host}} && exec {{agent}}"})
    (tmp_path / "a").touch()
    with closing(Machines(cluster, 1, 4, use_gpu=False, regrow_after_s=0.01)) as machines:
        with machines.lend(lambda: None) as lease:
            with machines.look_for_more(lease) as regrowth:
                (tmp_path / "b").touch()
                wait_until(lambda: regrowth.room, "another machine is lent")
                regrowth.is_used = True
            (first,), (more,) = lease.machines, regrowth.machines
        with machines.lend(lambda: None) as lease:
            assert lease.machines == (first, more)
            assert lease.num_ranks == (2, 2)
            assert (first.lost, more.lost) == (None, None)
            assert len(agents()) == 2
    assert not agents()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_machine_that_was_lent_meanwhile_and_is_taken_away_again_does_not_cost_the_others(tmp_path, number):
    cluster = Hosts(["a", "b", "c"], **{**HERE, "command": f"test -e {tmp_path}/{{host}} && exec {{agent}}"})
    (tmp_path / "a").touch()
    with closing(Machines(cluster, 1, 3, use_gpu=False, regrow_after_s=0.01)) as machines:
        with machines.lend(lambda: None) as lease, machines.look_for_more(lease) as regrowth:
            (tmp_path / "b").touch()
            wait_until(lambda: regrowth.room, "another machine is lent")
            (first,), (more,) = lease.machines, regrowth.machines
            (agent,) = [process for process, words in agents().items() if words[-4:-2] == ["--name", "b"]]
            os.kill(agent.pid, number)
            wait_until(lambda: more.lost or more.is_terminated, "the leader knows")
            regrowth.is_used = True
        (tmp_path / "c").touch()
        with machines.lend(lambda: None) as lease, machines.look_for_more(lease) as regrowth:
            assert lease.machines == (first,)
            wait_until(lambda: regrowth.room, "another machine is lent")
            assert [machine.name for machine in regrowth.machines] == ["c"], "the one that is gone is avoided"


def test_machines_that_are_lent_while_an_attempt_fails_are_released(tmp_path):
    cluster = Hosts(["a", "b"], **{**HERE, "command": f"test -e {tmp_path}/{{host}} && exec {{agent}}"})
    (tmp_path / "a").touch()
    with closing(Machines(cluster, 1, 2, use_gpu=False, regrow_after_s=0.01)) as machines:
        with suppress(RankFailedError), machines.lend(lambda: None) as lease, machines.look_for_more(lease) as regrowth:
            (tmp_path / "b").touch()
            wait_until(lambda: regrowth.room, "another machine is lent")
            raise RankFailedError("rank 0 failed", 0, "user")
        assert not agents()


class WithoutOne(Cluster):
    """A cluster that refuses every request for a machine that is gone, as Slurm does within a job."""

    kind: Literal["without-one"] = "without-one"

    def lend(self, wanted, agents):
        if "gone" not in wanted.avoid:
            raise NotEnoughMachinesError("gone is not available")
        agents.run(f"exec {shlex.join([sys.executable, '-m', AGENT, *agents.arguments('here', 1)])}", ["here"])
        return nullcontext()


def test_a_machine_that_is_still_gone_after_minutes_is_left_out_again(monkeypatch):
    monkeypatch.setattr(lending, "get_run_logger", lambda: logging.getLogger("lending"))
    monkeypatch.setattr(lending, "_AGAIN_S", 0.01)
    cluster = WithoutOne(leader_address="127.0.0.1", wait_s=20)
    with closing(Machines(cluster, 1, 1, use_gpu=False)) as machines:
        machines._avoided._since_s["gone"] = time.monotonic() - avoided._AVOID_S - 1
        with machines.lend(lambda: None) as lease:
            assert [machine.name for machine in lease.machines] == ["here"]


class Occupied(Cluster):
    """A cluster in whose queue a request waits, since others have all machines but `gone`, until one need not be avoided."""

    kind: Literal["occupied"] = "occupied"
    waits_itself = True
    now_s: ClassVar[list[float]] = []

    def lend(self, wanted, agents):
        if "gone" in wanted.avoid:
            self.now_s[0] += wanted.avoids_for_s
            agents.run("echo queued; sleep 600", ["other"])
        else:
            agents.run(f"exec {shlex.join([sys.executable, '-m', AGENT, *agents.arguments('gone', 1)])}", ["gone"])
        return nullcontext()


@pytest.fixture
def occupied_clock(monkeypatch):
    """The clock by which machines are avoided is at 0, and goes on only while a request waits in the queue of `Occupied`."""
    Occupied.now_s[:] = [0.0]
    monkeypatch.setattr(avoided, "time", SimpleNamespace(monotonic=lambda: Occupied.now_s[0]))


def test_a_request_without_a_lost_machine_is_waited_for_only_as_long_as_that_is_avoided(occupied_clock, monkeypatch, caplog):
    monkeypatch.setattr(lending, "get_run_logger", lambda: logging.getLogger("lending"))
    monkeypatch.setattr(avoided, "_AVOID_S", 0.5)
    monkeypatch.setattr(gathering, "_START_S", 0.1)
    monkeypatch.setattr(gathering, "_END_S", 0.1)
    cluster = Occupied(leader_address="127.0.0.1", wait_s=86400)
    with closing(Machines(cluster, 1, 1, use_gpu=False)) as machines:
        machines._avoided._since_s["gone"] = 0.0
        with machines.lend(lambda: None) as lease:
            assert lease.names == ("gone",)
    assert re.search(r"other: its agent did not come within 0\.5 s.*is asked again, and may lend gone again", caplog.text)


class Returning(Occupied):
    """A cluster like it, of which `gone` may be lent again before another machine that was lost."""

    kind: Literal["returning"] = "returning"
    avoided: ClassVar[list[set[str]]] = []

    def lend(self, wanted, agents):
        self.avoided.append(set(wanted.avoid))
        return super().lend(wanted, agents)


def test_of_several_lost_machines_each_is_avoided_for_its_own_time(occupied_clock, monkeypatch):
    monkeypatch.setattr(lending, "get_run_logger", lambda: logging.getLogger("lending"))
    monkeypatch.setattr(gathering, "_START_S", 0.1)
    monkeypatch.setattr(gathering, "_END_S", 0.1)
    Returning.avoided.clear()
    with closing(Machines(Returning(leader_address="127.0.0.1", wait_s=86400), 1, 1, use_gpu=False)) as machines:
        machines._avoided._since_s |= {"gone": 0.5 - avoided._AVOID_S, "later": 0.0}
        with machines.lend(lambda: None) as lease:
            assert lease.names == ("gone",)
        assert Returning.avoided == [{"gone", "later"}, {"later"}]


class Silent(Cluster):
    """A cluster none of whose agents comes, as hosts whose ssh hangs; it counts the requests."""

    kind: Literal["silent"] = "silent"
    requests: ClassVar[list[int]] = []

    def lend(self, wanted, agents):
        self.requests.append(wanted.most)
        agents.expect("a")
        return nullcontext()


class Queueing(Silent):
    """A cluster that is waited for in a queue."""

    requests: ClassVar[list[int]] = []
    waits_itself = True


@pytest.mark.parametrize(("kind", "num_requests"), [(Silent, 2), (Queueing, 1)])
def test_a_cluster_is_asked_again_until_wait_s_after_it_is_known_that_there_are_too_few_machines(
    monkeypatch, kind, num_requests
):
    """The first request takes as long as `wait_s` itself; whoever waited for that long in a queue has waited."""
    monkeypatch.setattr(lending, "get_run_logger", lambda: logging.getLogger("lending"))
    monkeypatch.setattr(lending, "_AGAIN_S", 0.01)
    monkeypatch.setattr(gathering, "_START_S", 0.2)
    kind.requests.clear()
    cluster = kind(leader_address="127.0.0.1", wait_s=0.1)
    with (
        closing(Machines(cluster, 1, 1, use_gpu=False)) as machines,
        pytest.raises(NotEnoughMachinesError, match=r"1 rank wanted.*a: its agent did not come within 0\.2 s"),
        machines.lend(lambda: None),
    ):
        pass
    assert len(kind.requests) == num_requests
