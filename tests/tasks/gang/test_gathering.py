"""What the leader says of machines that do not come."""

import errno
import io
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import yaml
from agents import OpenLink, agents
from left_behind import begun_threads
from prefect.context import use_profile
from prefect.settings import PREFECT_API_KEY, PREFECT_API_URL, Profile
from prefect_servers import wait_until
from prefect_torch.ckpt import StorageSpec
from prefect_torch.tasks import DaskCluster, Hosts, KubernetesCluster, RayCluster, SlurmCluster
from prefect_torch.tasks.gang.engines import agent_process, client_process, ray_agents, slurm_cluster
from prefect_torch.tasks.gang.engines.cluster import Cluster, MachineRequest
from prefect_torch.tasks.gang.machine import agent
from prefect_torch.tasks.gang.machine import gathering as gathering_module
from prefect_torch.tasks.gang.machine import machine as machine_module
from prefect_torch.tasks.gang.machine.gathering import gather
from prefect_torch.tasks.gang.machine.launcher import AgentLauncher
from prefect_torch.tasks.gang.machine.link import Link, LinkError, greet_leader
from prefect_torch.tasks.gang.machine.machine import RemoteMachine
from prefect_torch.tasks.gang.machine.versions import versions
from prefect_torch.tasks.gang.processes.fork_servers import ProcessContext
from prefect_torch.tasks.rank.errors import NotEnoughMachinesError
from prefect_torch.tasks.rank.failures import counts_against
from pydantic import ValidationError
from servers import free_port


def test_a_command_that_brings_no_agent_is_quoted(monkeypatch):
    """As that of an srun, which waits in the queue and says so."""
    monkeypatch.setattr(gathering_module, "_START_S", 0.01)
    monkeypatch.setattr(gathering_module, "_END_S", 0.1)
    command = "echo queued and waiting for resources; sleep 600 #"
    cluster = Hosts(["a"], command=command, leader_address="127.0.0.1", wait_s=0)
    with gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())) as gathering:
        deadline_s = time.monotonic() + 60
        while not gathering._launchers[0][0].last_lines:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert not gathering.wait(lambda: None)
        assert gathering.missing() == ["a: its agent did not come within 0.01 s: queued and waiting for resources"]


@pytest.mark.parametrize("command", ["ssh {host}", "{bin}/ssh {host} exec {agent}"])
def test_ssh_starts_an_interpreter_whose_path_has_blanks_and_characters_of_the_shell(tmp_path, monkeypatch, command):
    """The other machine's shell reads what ssh makes of its arguments."""
    python, ssh = tmp_path / "Ada's project (3.11)/python", tmp_path / "bin/ssh"
    for program, text in ((python, f'exec {sys.executable} "$@"'), (ssh, 'shift; exec sh -c "$*"')):
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    command = command.replace("{bin}", str(ssh.parent))
    cluster = Hosts(["a"], command=command, python=str(python), leader_address="127.0.0.1", wait_s=0)
    with gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())) as gathering:
        assert [machine.name for machine in gathering.wait(lambda: None)] == ["a"], gathering.missing()


def test_a_machine_without_a_free_gpu_is_no_machine():
    """A rank cannot be there, and another machine that comes later has room for it."""
    cluster = Hosts(["a"], command="exec {agent}", leader_address="127.0.0.1", wait_s=0)
    with gather(cluster, MachineRequest(1, 1, use_gpu=True, avoid=frozenset()), prepares=True) as gathering:
        assert not gathering.wait(lambda: None)
        (missing,) = gathering.missing()
        assert missing.startswith("a: torch finds no GPU there, or others use all of them: ")


@pytest.mark.parametrize("slots", ["0", "abc"])
def test_an_agent_has_room_for_a_rank_at_least(capsys, slots):
    with pytest.raises(SystemExit):
        agent.main(["127.0.0.1:1", "--slots", slots])
    assert f"argument --slots: '{slots}': give 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("leader", ["nohost", "host:abc", "host:0", "host:99999", ":1"])
def test_an_address_that_leads_nowhere_is_one_line_before_the_key_is_asked_for(capsys, monkeypatch, leader):
    monkeypatch.delenv(agent.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert agent.main([leader]) == 2
    assert capsys.readouterr().err == f"'{leader}' is no address of a leader: give HOST:PORT, with a port of 1 to 65535\n"


def hung_up(connection, *_):
    connection.close()
    raise LinkError("closed")


class Clock:
    """The time of an agent, which passes only while it sleeps."""

    def __init__(self, wake=lambda: None):
        self.now_s, self._wake = 0.0, wake

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        self._wake()


def test_an_agent_that_does_not_reach_the_leader_names_the_setting(capsys, monkeypatch):
    """As on machines without a default route, whose flow waits at 127.0.0.1."""
    monkeypatch.setenv(agent.KEY_VARIABLE, "key")
    clock = Clock()
    monkeypatch.setattr(agent, "time", clock)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # a port that refuses, and that no other process takes
        assert agent.main([f"127.0.0.1:{nobody.getsockname()[1]}"]) == 1
    assert clock.now_s == 20.0
    assert "Connection refused; set the cluster's leader_address to one by which " in capsys.readouterr().err
    monkeypatch.setenv(agent.KEY_VARIABLE, "key")
    monkeypatch.setattr(agent, "greet_leader", hung_up)
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert agent.main([f"127.0.0.1:{other.getsockname()[1]}"]) == 1
    assert capsys.readouterr().err.endswith(": closed\n")


def test_an_agent_that_is_refused_at_first_tries_again(capsys, monkeypatch):
    """A pod starts before its network is complete, and never starts again: its gang would have to."""
    with socket.socket() as leader:
        leader.bind(("127.0.0.1", 0))  # it refuses until it listens
        monkeypatch.setattr(agent, "time", Clock(leader.listen))
        monkeypatch.setattr(agent, "greet_leader", hung_up)
        monkeypatch.setenv(agent.KEY_VARIABLE, "key")
        assert agent.main([f"127.0.0.1:{leader.getsockname()[1]}"]) == 1
    assert capsys.readouterr().err.endswith(": closed\n"), "it was connected"


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (RayCluster(), r"^Ray is not installed: pip install 'prefect-torch\[ray\]'$"),
        (DaskCluster(address="tcp://127.0.0.1:1"), r"^Dask is .*\[dask\]'$"),
        (KubernetesCluster(), r"^Kubernetes' client is .*\[kubernetes\]'$"),
    ],
)
def test_a_cluster_whose_client_is_missing_is_refused_and_not_asked_again(monkeypatch, cluster, said):
    monkeypatch.setattr(client_process, "find_spec", lambda name: None)
    lent = cluster.model_copy(update={"leader_address": "127.0.0.1"})
    with pytest.raises(ImportError, match=said) as caught, gather(lent, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())):
        pass
    assert counts_against(caught.value) == "final"


def begun_in_vain(cluster, reason):
    """Return the threads that three gatherings have begun, each of which finds too few machines."""
    with begun_threads() as begun:
        for _ in range(3):
            with (
                pytest.raises(NotEnoughMachinesError, match=reason),
                gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())),
            ):
                pass
    return begun


def test_a_port_that_is_taken_leaves_no_thread():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cluster = Hosts(["a"], leader_address="127.0.0.1", leader_port=taken.getsockname()[1])
        begun = begun_in_vain(cluster, "it is in use")
        assert not [it for it in begun if it.is_alive()]


class Refusing(Cluster):
    """A cluster that knows at once that it has no room, as a Slurm job with too few nodes does."""

    kind: Literal["refusing"] = "refusing"

    def lend(self, wanted, agents):
        raise NotEnoughMachinesError("no room")


def test_a_cluster_that_refuses_leaves_the_leaders_port_free():
    cluster = Refusing(leader_address="127.0.0.1", leader_port=free_port())
    begun = begun_in_vain(cluster, "no room")
    assert begun
    wait_until(lambda: not any(it.is_alive() for it in begun), "the threads that accept end")


class Roomy(Cluster):
    """A cluster whose agents come by themselves."""

    kind: Literal["roomy"] = "roomy"

    def lend(self, wanted, agents):
        return nullcontext()


class EndedLink:
    """The leader's side of a link whose agent is gone after its hello."""

    def __init__(self):
        self.sent = []

    def receive(self):
        raise LinkError("gone")

    def send(self, header, body=b""):
        self.sent.append(header)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("came", "ordered"),
    [
        ({"n2": 2, "n10": 0, "n1": 1}, ["n10", "n1", "n2"]),
        (dict.fromkeys(["n10", "n2-b", "n2-a", "n1"], 0), ["n1", "n2-a", "n2-b", "n10"]),
    ],
)
def test_machines_of_one_command_are_in_the_order_of_their_cluster_whichever_comes_first(came, ordered):
    """Else each attempt had another order, in which the rings of collectives cross the network more often."""
    request = MachineRequest(len(came), len(came), use_gpu=False, avoid=frozenset())
    with gather(Roomy(leader_address="127.0.0.1"), request) as gathering:
        gathering.expect("Slurm")
        for name, place in came.items():
            hello = {"name": name, "place": place, "address": "127.0.0.1", "slots": 1, "versions": versions()}
            gathering._enter(OpenLink(), hello)
        assert [machine.name for machine in gathering.wait(lambda: None)] == ordered


def test_an_agent_that_says_hello_when_an_attempt_begins_is_sent_away():
    """Nobody would use its machine, which it would hold for as long as the attempt takes."""
    link = EndedLink()
    with gather(Roomy(leader_address="127.0.0.1"), MachineRequest(1, 1, use_gpu=False, avoid=frozenset())) as gathering:
        gathering.wait(lambda: None)
        gathering._enter(link, {"name": "late", "address": "127.0.0.1", "slots": 1, "versions": versions()})
        assert link.sent == [{"type": "refused", "reason": "the attempt has begun without it"}]


@pytest.fixture
def greeted(monkeypatch):
    """Return what gives the agent's end of a link whose other end the leader has accepted, and which sends no heartbeats."""
    monkeypatch.setattr(machine_module, "SILENT_S", math.inf)
    with ExitStack() as links:

        def greet(gathering):
            connection = socket.create_connection((gathering._listener.host, gathering._listener.port))
            link = greet_leader(connection, gathering.key, 60, 60)
            links.callback(link.close)
            wait_until(lambda: not gathering._listener._unknown, "the leader knows it")
            return link

        yield greet


def hello(name, **more):
    return {"type": "hello", "name": name, "address": "127.0.0.1", "slots": 1, "versions": versions(), **more}


@pytest.mark.parametrize("ends", [False, True])
def test_a_machine_that_lists_its_gpus_is_awaited_though_others_suffice(greeted, monkeypatch, ends):
    """That takes some machines a minute longer than others, whose attempt would do without them for good."""
    monkeypatch.setattr(gathering_module, "_MORE_S", 0.0)
    with gather(Roomy(leader_address="127.0.0.1"), MachineRequest(1, 2, use_gpu=False, avoid=frozenset())) as gathering:
        gathering.expect("others")
        slow, quick = greeted(gathering), greeted(gathering)
        quick.send(hello("quick"))
        looks = []

        def look():
            looks.extend(gathering._alive())
            if len(looks) == 4 and ends:
                slow.close()
            elif len(looks) == 4:
                slow.send(hello("slow"))

        assert {machine.name for machine in gathering.wait(look)} == ({"quick"} if ends else {"quick", "slow"})
        assert len(looks) >= 4


def test_a_machine_that_its_command_has_counted_is_awaited_though_others_suffice(greeted, monkeypatch):
    """As one of Ray's, which are reserved; one that has room for fewer ranks than were counted has come as well."""
    monkeypatch.setattr(gathering_module, "_MORE_S", 0.0)
    monkeypatch.setattr(gathering_module.Gathering, "counted", ("room for 6: reserved", 6))
    with gather(Roomy(leader_address="127.0.0.1"), MachineRequest(1, 8, use_gpu=False, avoid=frozenset())) as gathering:
        gathering.expect("others")
        agents, looks = [greeted(gathering)], []
        agents[0].send(hello("a", slots=1, asked=3))

        def look():
            looks.extend(gathering._alive())
            if len(looks) == 4:
                agents.append(greeted(gathering))
                agents[1].send(hello("b", slots=3, asked=3))

        assert sorted(machine.slots for machine in gathering.wait(look)) == [1, 3]


def test_an_agent_that_says_hello_when_the_wait_for_machines_was_broken_off_is_sent_away():
    """As at the end of an attempt that had asked for more machines: the agent has listed its GPUs meanwhile, and holds them."""

    class EndedError(Exception):
        pass

    def end():
        raise EndedError

    link, request = EndedLink(), MachineRequest(1, 1, use_gpu=False, avoid=frozenset())
    with pytest.raises(EndedError), gather(Roomy(leader_address="127.0.0.1"), request) as gathering:
        gathering.wait(end)
    gathering._enter(link, {"name": "late", "address": "127.0.0.1", "slots": 1, "versions": versions()})
    assert [header["type"] for header in link.sent] == ["refused"]


@pytest.mark.parametrize(
    ("states", "cancels"),
    [
        ("PENDING", True),
        ("RUNNING", True),
        ("RUNNING COMPLETING", False),
        ("", False),
        ("failed PENDING", True),
        ("failed COMPLETING", False),
        ("failed failed", True),
    ],
)
def test_the_allocation_of_an_srun_that_is_killed_is_cancelled_unless_it_ends(monkeypatch, tmp_path, states, cancels):
    """Slurm keeps it otherwise, also where its controller restarts meanwhile; in a job there is none of its own."""
    (tmp_path / "states").write_text("\n".join(states.split()))
    programs = {
        "srun": "echo $* > started; exec sleep 600",
        "squeue": "state=$(head -n 1 states); sed -i '$!{1d}' states; [ \"$state\" != failed ] && echo $state",
        "scancel": "[ -e tried ] && echo $* > cancelled || ! : > tried",
    }
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\nPATH=/usr/bin:/bin\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(slurm_cluster, "_END_S", 0.1 if cancels else 60)
    monkeypatch.setattr(slurm_cluster, "_POLL_S", 0.01)
    monkeypatch.setattr(gathering_module, "_END_S", 0.1)
    cluster = SlurmCluster(srun_arguments=["--job-name=own"], leader_address="127.0.0.1")
    request = MachineRequest(1, 1, use_gpu=False, avoid=frozenset())
    with gather(cluster, request):
        wait_until((tmp_path / "started").exists, "srun is started")
        wait_until((tmp_path / "started").read_text, "srun has said its arguments")
    (name,) = [word for word in (tmp_path / "started").read_text().split() if word.startswith("--job-name=own-")]
    assert (tmp_path / "cancelled").exists() == cancels
    if cancels:
        assert (tmp_path / "cancelled").read_text().split() == [name.replace("--job-name", "--name")]
    (tmp_path / "cancelled").unlink(missing_ok=True)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm_cluster, "_nodes_of_job", lambda *_: "1")
    with gather(cluster, request):
        pass
    assert not (tmp_path / "cancelled").exists()


@pytest.mark.parametrize("given", [["-M", "gpu"], ["-Mgpu"], ["--clusters=gpu"], ["--clusters", "gpu"], ["--cluster=gpu"]])
@pytest.mark.parametrize("state", ["PENDING", ""])
def test_an_allocation_on_another_cluster_is_looked_for_and_cancelled_there(monkeypatch, tmp_path, given, state):
    programs = {
        "squeue": f"[ $2 = --clusters=gpu ] && echo CLUSTER: cpu && echo && echo CLUSTER: gpu && echo {state}",
        "scancel": "echo $* > cancelled",
    }
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n[ $1 = --noheader ] && shift\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    commands = []
    agents = SimpleNamespace(arguments=lambda slots: [], run=lambda command, _: commands.append(command))
    with SlurmCluster(srun_arguments=[*given, "--cluster-constraint=any"]).lend(
        MachineRequest(1, 1, use_gpu=False, avoid=frozenset()), agents
    ):
        pass
    (of_watch,) = re.findall(r"scancel (--name=\S+ --clusters=gpu);;", commands[0])
    assert not state or (tmp_path / "cancelled").read_text().strip() == of_watch
    assert (tmp_path / "cancelled").exists() == bool(state)


@pytest.mark.parametrize("given", [["--exclude=bad[1-2]"], ["--exclude", "bad[1-2]"], ["-x", "bad[1-2]"], ["-xbad[1-2]"]])
def test_srun_excludes_lost_machines_beside_those_that_its_arguments_exclude(monkeypatch, given):
    """It obeys the last --exclude only."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm_cluster, "_nodes_of_job", lambda *_: "1")
    commands = []
    agents = SimpleNamespace(arguments=lambda slots: [], run=lambda command, names: commands.append(shlex.split(command)))
    cluster = SlurmCluster(srun_arguments=["--time=2", *given, "--mem=0"])
    for lost in [(), ("n2", "n1")]:
        with cluster.lend(MachineRequest(1, 1, use_gpu=False, avoid=frozenset(lost)), agents):
            pass
    excluding = [[word for word in command if word.startswith(("--ex", "-x", "bad"))] for command in commands]
    assert excluding == [["--exclude=bad[1-2]"], ["--exclude=bad[1-2],n1,n2"]]
    assert all({"--time=2", "--mem=0"} <= set(command) for command in commands)


def test_srun_takes_a_file_of_machines_to_exclude_alone():
    """With more in the argument, it would look for a file of that name."""
    assert slurm_cluster._without_exclusions(["-x", "/etc/bad", "--mem=0"]) == ([], ["--exclude=/etc/bad", "--mem=0"])


class PlayedRay:
    """Ray with a CPU for each of 1000 ranks, of which fewer fit: as many as it has machines, one on each."""

    def __init__(self, num_machines):
        self.num_machines, self.tried, self.held = num_machines, [], 0
        self.util = self

    def nodes(self):
        return []

    def available_resources(self):
        return {"CPU": 1000.0 - self.held}

    def placement_group(self, bundles, *, strategy):
        def wait(*, timeout_seconds):
            self.tried.append(len(bundles))
            fits = len(bundles) + self.held <= self.num_machines
            self.held += len(bundles) if fits else 0
            return fits

        return SimpleNamespace(wait=wait, bundles=bundles)

    def remove_placement_group(self, group):
        self.held = 0


@pytest.mark.parametrize("num_machines", [2, 3, 4, 31, 63, 64, 100])
def test_ray_is_asked_for_few_numbers_of_ranks_until_one_fits(monkeypatch, num_machines):
    """It answers after seconds that a group does not fit, and the leader waits for a minute."""
    ray = PlayedRay(num_machines)
    monkeypatch.setattr(ray_agents, "_ray", lambda: ray)
    order = {"fewest": 2, "most": 64, "avoid": [], "wait_s": 0, "resources": {"CPU": 1.0}, "strategy": "STRICT_SPREAD"}
    _, num_ranks = ray_agents._reserve(order)
    assert num_ranks == ray.held == min(num_machines, 64)
    assert len(ray.tried) <= 8


def test_the_leader_waits_for_how_much_room_ray_has_at_the_end_of_the_wait(monkeypatch, tmp_path):
    """Ray's client takes seconds to start, and Ray seconds to answer."""
    (tmp_path / "ray.py").write_text(
        "import sys, time\n"
        "util = sys.modules[__name__]\n"
        "init = lambda **_: None\n"
        "nodes = lambda: []\n"
        "available_resources = lambda: {'CPU': 2.0}\n"
        "remove_placement_group = lambda _: None\n"
        "def placement_group(bundles, *, strategy):\n"
        "    return util\n"
        "def wait(*, timeout_seconds):\n"
        "    time.sleep(min(timeout_seconds, 0.1))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gathering_module, "_START_S", 0.0)
    cluster = RayCluster(leader_address="127.0.0.1", wait_s=0.5)
    with gather(cluster, MachineRequest(3, 3, use_gpu=False, avoid=frozenset())) as gathering:
        assert not gathering.wait(lambda: None)
        assert gathering.counted == ("room for 2: with {'CPU': 1.0} for each rank", 2)


def test_ranks_inherit_no_variable_that_dasks_nanny_sets():
    """The threshold makes operations on CPU tensors of 1 MiB several times slower."""
    if (found := find_spec("distributed")) is None:
        pytest.skip("needs dask")
    distributed = Path(found.origin).parent  # not imported
    nanny = yaml.safe_load((distributed / "distributed.yaml").read_text())["distributed"]["nanny"]
    assert nanny["pre-spawn-environ"]
    assert set(nanny["pre-spawn-environ"]) <= set(DaskCluster.not_for_ranks)


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_the_agent_of_a_machine_of_ray_has_the_gpus_of_all_bundles_there(monkeypatch, variable):
    """In the variable in which Ray has set that of the agent's own bundle; the others may be set for other reasons."""
    environments = []
    monkeypatch.setattr(ray_agents, "_ray", lambda: SimpleNamespace(get_gpu_ids=lambda: [1]))
    monkeypatch.setattr(ray_agents, "run_agent", lambda _arguments, _key, environment, _: environments.append(environment))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    monkeypatch.setenv(variable, "1")
    ray_agents.Bundle().run([], "key", ["1", "2"])
    ray_agents.Bundle().run([], "key", [])
    assert environments == [{variable: "1,2"}, {}]


def test_an_agent_gets_sigterm_once_its_machine_is_going_to_be_taken_away(monkeypatch, tmp_path):
    (tmp_path / "waiting_agent.py").write_text(
        "import pathlib, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "signal.sigwait({signal.SIGTERM})\n"
        "print('told')\n"
    )
    monkeypatch.setattr(agent_process, "AGENT", "waiting_agent")
    monkeypatch.setattr(agent_process, "_LOOK_S", 0.01)
    waits = tmp_path / "it waits"
    assert agent_process.run_agent([str(waits)], "key", {"PYTHONPATH": str(tmp_path)}, waits.exists) == "told"


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ({"GPU": 2}, "each rank has one GPU, not 2"),
        ({"CPU": 1, "GPU": 0.5}, "each rank has one GPU, not 0.5"),
        ({"CPU": -1}, "no negative"),
        ({"memory": float("nan")}, "no negative and no infinite"),
    ],
)
def test_what_ray_cannot_reserve_for_a_rank_is_refused(resources, why):
    with pytest.raises(ValidationError, match=why):
        RayCluster(resources_per_worker=resources)


@pytest.mark.parametrize(
    ("resources", "use_gpu", "why"),
    [
        ({"CPU": 0}, False, "nothing without an amount above 0: give one, or leave resources_per_worker out"),
        ({"GPU": 0}, False, "nothing without an amount above 0"),
        ({"CPU": 1, "GPU": 0}, True, "each rank has one GPU, not 0: leave GPU out"),
    ],
)
def test_what_ray_cannot_reserve_for_a_rank_with_or_without_a_gpu_is_refused(resources, use_gpu, why):
    request = MachineRequest(1, 1, use_gpu=use_gpu, avoid=frozenset())
    with pytest.raises(ValueError, match=why), RayCluster(resources_per_worker=resources).lend(request, None):
        pass


class DrainingRay:
    """Ray as an actor on node "b" sees it."""

    class exceptions:  # noqa: N801 - as the module is named
        class RayError(Exception):
            pass

    def __init__(self, draining):
        self._draining = draining
        self._private = SimpleNamespace(state=SimpleNamespace(state=self))

    def get_draining_nodes(self):
        if self._draining is None:
            raise self.exceptions.RayError
        return dict.fromkeys(self._draining, 0)

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "b")


@pytest.mark.parametrize(("draining", "is_draining"), [("", False), ("ac", False), ("ab", True), (None, False)])
def test_a_machine_is_going_to_be_taken_away_if_ray_drains_it(monkeypatch, draining, is_draining):
    """While its head does not answer, nothing is known."""
    monkeypatch.setattr(ray_agents, "_ray", lambda: DrainingRay(draining))
    assert ray_agents._is_draining() == is_draining


@pytest.mark.parametrize(
    ("given", "reserved"),
    [
        ({}, {"CPU": 1, "GPU": 1}),
        ({"CPU": 8}, {"CPU": 8, "GPU": 1}),
        ({"CPU": 0}, {"CPU": 0, "GPU": 1}),
        ({"GPU": 1}, {"GPU": 1}),
    ],
)
def test_ray_reserves_a_gpu_for_each_rank_that_needs_one(given, reserved):
    """Also beside other resources: else the rank would take a GPU that Ray has lent to others."""
    commands = []
    agents = SimpleNamespace(arguments=list, run=lambda command, _: commands.append(shlex.split(command)))
    with RayCluster(resources_per_worker=given).lend(MachineRequest(1, 1, use_gpu=True, avoid=frozenset()), agents):
        assert json.loads(commands[0][-1])["resources"] == reserved


def test_ray_reserves_no_gpu_where_none_is_asked_for():
    commands = []
    agents = SimpleNamespace(arguments=list, run=lambda command, _: commands.append(shlex.split(command)))
    request = MachineRequest(1, 1, use_gpu=False, avoid=frozenset())
    with RayCluster(resources_per_worker={"CPU": 1, "GPU": 0}).lend(request, agents):
        assert json.loads(commands[0][-1])["resources"] == {"CPU": 1, "GPU": 0}


def test_an_allocation_may_take_a_day_in_the_queue_and_what_ended_is_not_requested_for_as_long(monkeypatch):
    def waits(cluster):
        return cluster.longest_wait_s, cluster.asks_for_s

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert (waits(SlurmCluster()), waits(SlurmCluster(wait_s=5))) == ((86400, 60), (5, 5))
    assert (waits(KubernetesCluster()), waits(DaskCluster(address="a")), waits(Hosts(["a"], wait_s=0))) == (
        (600, 600),
        (60, 60),
        (0, 0),
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert (waits(SlurmCluster()), waits(SlurmCluster(wait_s=500))) == ((60, 60), (500, 500))


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_allocation_of_a_leader_that_is_killed_is_cancelled(tmp_path, monkeypatch, is_killed):
    """Its srun waits for the agent of a machine that was lost as well; the leader's parent has not waited for it yet."""
    cancels = "import sys, time; time.sleep(1.5); print(*sys.argv[2:], file=open('cancelled', 'w'))"
    programs = {"srun": ": > started; exec sleep 600", "scancel": f'exec {sys.executable} -SIc "{cancels}" scancel "$@"'}
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with subprocess.Popen(["sleep", "600"]) as leader:
        launcher = AgentLauncher(slurm_cluster._watched("srun --nodes=2", ["--name=own"], leader.pid), "key", lambda _: None)
        wait_until((tmp_path / "started").exists, "srun is started")
        if is_killed:
            leader.kill()
            os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still there
        launcher.end(0)
        leader.kill()
    assert (tmp_path / "cancelled").exists() == is_killed
    if is_killed:
        assert (tmp_path / "cancelled").read_text() == "--name=own\n"


def test_an_srun_has_the_time_to_give_its_allocation_back_when_it_is_killed(tmp_path):
    """As when the leader is killed; the agents end then, and srun with them."""
    srun = tmp_path / "srun"
    ends = "while os.getppid() == parent: time.sleep(0.001)\ntime.sleep(0.2)\nopen(__file__ + '-ended', 'x')\n"
    srun.write_text(f"#!{sys.executable}\nimport os, time\nparent = os.getppid()\nopen(__file__ + '-started', 'x')\n{ends}")
    srun.chmod(0o755)
    launcher = AgentLauncher(f"{srun}; true", "key", lambda _: None)
    wait_until((tmp_path / "srun-started").exists, "srun is started")
    launcher.end(0)
    assert (tmp_path / "srun-ended").exists()


@pytest.mark.parametrize("address", ["nowhere.invalid", "192.0.2.1"])
def test_a_leaders_address_that_is_none_of_this_machine_is_refused_and_one_that_cannot_be_looked_up_is_asked_again(
    monkeypatch, address
):
    cluster, request = Hosts(["a"], leader_address=address), MachineRequest(1, 1, use_gpu=False, avoid=frozenset())
    if not address[0].isdigit():
        monkeypatch.setattr(socket, "getaddrinfo", fails(socket.gaierror(socket.EAI_NONAME, "not known")))
    with (
        pytest.raises(ValueError, match=rf"^leader_address='{address}' is no address of this machine \("),
        gather(cluster, request),
    ):
        pass
    monkeypatch.setattr(socket, "getaddrinfo", fails(socket.gaierror(socket.EAI_AGAIN, "no name server answers")))
    with (
        pytest.raises(NotEnoughMachinesError, match=f"agents cannot come to {address}: .*no name server"),
        gather(cluster, request),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "resolved", "listens"),
    [
        ("flow", ["127.0.1.1"], "192.0.2.7"),  # the own name, in /etc/hosts of Debian
        ("flow", ["127.0.1.1", "198.51.100.1"], "198.51.100.1"),
        ("localhost", ["127.0.0.1"], "127.0.0.1"),
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
    ],
)
def test_the_own_name_is_an_address_that_other_machines_reach(monkeypatch, given, resolved, listens):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in resolved]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
    monkeypatch.setattr(gathering_module, "_routed_address", lambda: "192.0.2.7")
    assert gathering_module._address(given) == listens
    if listens == "192.0.2.7":
        monkeypatch.setattr(gathering_module, "_routed_address", lambda: "127.0.0.1")
        with pytest.raises(ValueError, match=r"leader_address='flow' is 127\.0\.1\.1 on this machine.*no default route: give"):
            gathering_module._address(given)


def fails(error):
    def fail(*_args, **_options):
        raise error

    return fail


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")])
def test_a_command_that_cannot_be_started_is_a_machine_that_does_not_come(monkeypatch, error):
    monkeypatch.setattr(gathering_module, "AgentLauncher", fails(error))
    cluster = Hosts(["a"], leader_address="127.0.0.1")
    with gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())) as gathering:
        assert gathering.missing() == [f"a: its command cannot be started: {error}"]


def test_an_agent_whose_machine_gets_no_thread_is_sent_away_and_says_why(monkeypatch):
    """It would wait for an order, and the leader for it."""
    monkeypatch.setattr(gathering_module, "RemoteMachine", fails(RuntimeError("can't start new thread")))
    here, there = socket.socketpair()
    cluster, request = Roomy(leader_address="127.0.0.1"), MachineRequest(1, 1, use_gpu=False, avoid=frozenset())
    with there, gather(cluster, request) as gathering:
        gathering._enter(Link(here, b"", b""), {"name": "a", "address": "127.0.0.1", "slots": 1, "versions": versions()})
        assert not there.recv(1)
        assert gathering.missing() == ["a: its messages cannot be received: can't start new thread"]


def test_a_leader_that_gets_no_thread_for_its_heartbeats_leaves_its_port_free(monkeypatch):
    monkeypatch.setattr(gathering_module.Pulse, "start", fails(RuntimeError("can't start new thread")))
    cluster, request = Roomy(leader_address="127.0.0.1"), MachineRequest(1, 1, use_gpu=False, avoid=frozenset())
    with begun_threads() as begun, pytest.raises(RuntimeError, match="new thread"), gather(cluster, request):
        pass
    assert begun
    wait_until(lambda: not any(it.is_alive() for it in begun), "the threads that accept end")


def test_a_rank_that_an_agent_cannot_start_says_why():
    """And the agent goes on, for the others."""
    cluster = Hosts(["a"], command="ulimit -n 12 && exec {agent}", leader_address="127.0.0.1", wait_s=0)
    with gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset()), prepares=True) as gathering:
        (machine,) = gathering.wait(lambda: None)
        for _ in range(2):
            result = machine.run("prefect_torch.tasks.rank.machine_report", None, None).finish()
            assert (result.kind, result.error) == (
                "infrastructure",
                "its process cannot be started: [Errno 24] Too many open files",
            )
        assert machine.lost is None


def test_an_agent_has_the_name_that_slurm_has_for_its_machine(monkeypatch):
    """srun takes no other in --exclude, and a host may call itself by a longer one."""
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    cluster = Hosts(["a"], command="exec $(echo {agent} | sed 's/ --name a//')", leader_address="127.0.0.1", wait_s=0)
    with gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())) as gathering:
        assert [machine.name for machine in gathering.wait(lambda: None)] == ["node1"]


@pytest.mark.parametrize("renews", [True, False])
def test_a_rank_whose_storage_is_a_block_reaches_prefect_as_the_flow_does_by_its_profile(tmp_path, monkeypatch, renews):
    """It reads the block anew when its login expires; other ranks do not get the key."""
    names = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_PROFILE")
    for name in names[:2]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_PROFILE", "own")
    profile = Profile(name="own", settings={PREFECT_API_URL: "http://127.0.0.1:1/api", PREFECT_API_KEY: "key"})
    (tmp_path / "teller.py").write_text(f"def main():\n    import os\n    print([os.environ.get(it) for it in {names}])\n")
    cluster = Hosts(
        ["a"],
        command="unset PREFECT_PROFILE; exec {agent}",
        leader_address="127.0.0.1",
        wait_s=0,
        environment={"PYTHONPATH": str(tmp_path)},
    )
    storage = StorageSpec("s3://bucket", credential_source=b"block" if renews else None)
    with (
        use_profile(profile, include_current_context=False),
        gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())) as gathering,
    ):
        (machine,) = gathering.wait(lambda: None)
        told = [line for lines in machine.run("teller", None, storage).lines(1.0) for line in lines]
    assert told == [str(["http://127.0.0.1:1/api", "key", None] if renews else [None, None, None])]


def test_a_machine_prepares_what_its_ranks_are_forked_from(monkeypatch):
    """With the variables that fsspec reads when it is imported."""
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", "http://127.0.0.1:1")
    orders, send = {}, RemoteMachine._send

    def record(machine, header, body=b""):
        orders[header["type"]] = header
        if header["type"] != "start":
            send(machine, header, body)

    monkeypatch.setattr(RemoteMachine, "_send", record)
    own = {"rank": 0, "local_rank": 0, "local_world_size": 1}
    spec = SimpleNamespace(**own, records_collectives=False, storages=[StorageSpec("s3://bucket")], environment=dict)
    cluster = Hosts(["a"], command="exec {agent}", leader_address="127.0.0.1", wait_s=0)
    with gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset()), prepares=True) as gathering:
        (machine,) = gathering.wait(lambda: None)
        machine.start(spec)
    prepared, started = (ProcessContext.of_rank(orders[name]["environment"]) for name in ("prepare", "start"))
    assert prepared == started


def test_a_rank_that_writes_more_than_the_leader_takes_waits(tmp_path):
    """As at a full pipe; else a log that Prefect accepts slowly would fill the memory of the leader."""
    (tmp_path / "chatter.py").write_text(
        "def main():\n    for number in range(200_000):\n        print(f'line {number:040}')\n"
    )
    cluster = Hosts(
        ["a"], command="exec {agent}", leader_address="127.0.0.1", wait_s=0, environment={"PYTHONPATH": str(tmp_path)}
    )
    with gather(cluster, MachineRequest(1, 1, use_gpu=False, avoid=frozenset())) as gathering:
        (machine,) = gathering.wait(lambda: None)
        chatter = machine.run("chatter", None, None)
        read, most_waiting = [], 0
        wait_until(lambda: chatter._messages.qsize() >= agent._MOST_UNREAD, "the first lines have come")
        for lines in chatter.lines(1.0):
            read += lines
            most_waiting = max(most_waiting, chatter._messages.qsize())
        assert most_waiting <= agent._MOST_UNREAD
        assert read == [f"line {number:040}" for number in range(200_000)]
        untaken = machine.run("chatter", None, None)
        wait_until(lambda: untaken._messages.qsize() >= agent._MOST_UNREAD, "the first lines have come")
        untaken.finish()
        assert untaken._exit["type"] == "exit"
    wait_until(lambda: not agents(), "the agent ends with the leader", 20)
