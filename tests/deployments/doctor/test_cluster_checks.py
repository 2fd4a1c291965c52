"""`doctor --cluster`: real agents, here on this machine."""

import errno
import json
import shlex
import socket
import sys
import threading

import pytest
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.opening import parse_storage
from prefect_torch.deployments.command_line.doctor.cluster_checks import _finding, check_cluster
from prefect_torch.flows import Hosts
from prefect_torch.tasks.gang.engines import client_process
from prefect_torch.tasks.gang.machine import inspection, remote_rank
from prefect_torch.tasks.gang.machine.inspection import InspectedMachine
from prefect_torch.tasks.gang.machine.link import LinkError
from prefect_torch.tasks.gang.machine.machine import RemoteMachine
from prefect_torch.tasks.rank import machine_report
from prefect_torch.tasks.rank.machine_report import InspectionOrder
from prefect_torch.tasks.rank.rendezvous import Address

RAY = '{"kind": "ray", "leader_address": "127.0.0.1"}'
GOOD = {"gpus": [], "nccl": None, "shared_memory": 2**30, "leader": None, "machines": {}, "storage": None}


def test_each_machine_says_what_it_has_and_one_of_another_version_is_named(command, tmp_path):
    """Of three hosts, one has another torch and one does not answer."""
    other = tmp_path / "other.py"
    other.write_text(
        "import sys\n"
        "from prefect_torch.tasks.gang.machine import agent, versions\n"
        "agent.versions = lambda: {**versions.versions(), 'torch': '1.13'}\n"
        "sys.exit(agent.main(sys.argv[1:]))\n"
    )
    (tmp_path / "of").mkdir()
    run = f"exec {shlex.quote(sys.executable)}"
    # {agent} is "python -m module arguments": the host that differs drops the first three words.
    scripts = {"good": '"$@"', "old": f'shift 3; {run} {other} "$@"', "gone": "echo no route; exit 255"}
    for host, script in scripts.items():
        (tmp_path / "of" / host).write_text(script)
    cluster = {
        "hosts": list(scripts),
        "command": f"sh {tmp_path}/of/{{host}} {{agent}}",
        "leader_address": "127.0.0.1",
        "wait_s": 0,
    }
    code, out, _ = command("doctor", str(tmp_path / "store"), "--cluster", json.dumps(cluster), "--json")
    found = {it["check"]: it for it in json.loads(out)}
    assert code == 1
    good = found["machine good"]
    assert good["status"] == "ok", good
    for text in ("torch ", "room for 1", "no GPU", "free in /dev/shm", "clock ", "sees the storage", "reaches this machine"):
        assert text in good["found"]
    assert found["machine old"]["found"].startswith("it has other versions: torch 1.13, here ")
    assert found["machine gone"]["found"] == "its command ended with 255: no route"
    assert not list((tmp_path / "store").glob("doctor-*"))


@pytest.mark.parametrize(
    ("change", "clock_s", "status", "text"),
    [
        ({"leader": "10.0.0.1:1: refused"}, 0.0, "wrong", "does not reach this machine at 10.0.0.1:1: refused"),
        ({"machines": {"b": "10.0.0.2:9: timed out"}}, 0.0, "wrong", "does not reach machine b at 10.0.0.2:9: timed out"),
        ({}, 0.0, "ok", "reaches this machine; reaches the other machines"),
        ({"storage": "/store is another storage here"}, 0.0, "wrong", "does not see the storage: /store is another"),
        ({"shared_memory": 1000}, 0.0, "warning", "little shared memory"),
        ({"shared_memory": None}, 0.0, "warning", "no /dev/shm"),
        ({}, -3.0, "warning", "clock -3.00 s"),
        ({"gpus": ["H100", "H100"], "nccl": "2.27.3"}, 0.1, "ok", "nccl 2.27.3; room for 8; 2 GPUs (H100)"),
    ],
)
def test_what_is_wrong_with_a_machine_is_said_with_advice(change, clock_s, status, text):
    finding = _finding(InspectedMachine("a", None, 8, clock_s, {**GOOD, **change}), "python 3.11", "/store", num_others=1)
    assert (finding.check, finding.status) == ("machine a", status)
    assert text in finding.found
    assert bool(finding.advice) == (status != "ok")


def test_each_machine_connects_to_the_agents_of_the_others(monkeypatch):
    def look(machine, order):
        return InspectedMachine(
            machine.name, report={"asked": order.machines, "found": machine_report._unreached(order.machines)}
        )

    monkeypatch.setattr(inspection, "_inspect", look)
    cluster = Hosts(["a", "b"], command="exec {agent}", leader_address="127.0.0.1", wait_s=0)
    first, second = inspection.inspect_machines(cluster, 2, None)
    assert [(it.name, set(it.report["asked"]), it.report["found"]) for it in (first, second)] == [
        ("a", {"b"}, {}),
        ("b", {"a"}, {}),
    ]
    gone = first.report["asked"]
    assert machine_report._unreached(gone) == {"b": f"127.0.0.1:{gone['b'].port}: [Errno 111] Connection refused"}


def test_a_long_name_is_parted_from_what_is_said_of_the_machine(command, tmp_path):
    cluster = {"hosts": ["node-17.gpu.example"], "command": "echo no route {host} >&2; exit 255", "wait_s": 0}
    _, out, _ = command("doctor", str(tmp_path / "store"), "--cluster", json.dumps(cluster))
    assert "machine node-17.gpu.example its command ended" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"hosts": 1}', "hosts: Input should be a valid list"),
        ('{"hosts": ["a", "a"]}', "hosts: hosts has 'a' twice: name a machine once, and give ranks_per_host"),
        ("{}", "hosts: Field required"),
    ],
)
def test_a_cluster_with_wrong_fields_is_told_in_a_line(text, said):
    (found,) = check_cluster(text, 1, None)
    assert (found.status, found.found, found.advice) == ("wrong", said, "see prefect_torch.flows.Hosts for its fields")


def test_a_cluster_whose_client_is_missing_is_wrong(monkeypatch):
    monkeypatch.setattr(client_process, "find_spec", lambda name: None)
    (found,) = check_cluster(RAY, 1, None)
    assert (found.status, found.found) == ("wrong", "Ray is not installed: pip install 'prefect-torch[ray]'")


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("{", "Expecting"), ("[1]", "is no JSON object"), ('{"kind": "x"}', "kind 'x'")]
)
def test_what_describes_no_cluster_is_wrong_and_says_what_does(tmp_path, text, said):
    path = tmp_path / "cluster.json"
    if text is not None:
        path.write_text(text)
    (found,) = check_cluster(str(path), 1, None)
    assert (found.status, found.advice) == ("wrong", "give torch-cluster/NAME, JSON, or a file with JSON")
    assert said in found.found


def test_a_cluster_that_refuses_a_request_is_wrong():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (found,) = check_cluster(json.dumps({"hosts": ["a"], "leader_address": "127.0.0.1", "leader_port": port}), 1, None)
    assert (found.check, found.status) == ("cluster", "wrong")
    assert found.found == f"agents cannot come to port {port} (leader_port): it is in use"
    (found,) = check_cluster(json.dumps({"hosts": ["a"], "leader_address": "192.0.2.1"}), 1, None)
    assert (found.check, found.status) == ("cluster", "wrong")
    assert found.found.startswith("leader_address='192.0.2.1' is no address of this machine")


def test_machines_are_inspected_where_nothing_in_the_storage_may_be_deleted(monkeypatch, tmp_path):
    def delete(*_):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(LocalStorage, "delete", delete)
    cluster = Hosts(["a"], command="echo no route; exit 255 #", leader_address="127.0.0.1", wait_s=0)
    (machine,) = inspection.inspect_machines(cluster, 1, parse_storage(str(tmp_path)))
    assert machine.problem == "its command ended with 255: no route"


class StuckLink:
    """The leader's side of a link to a machine whose program says nothing and outlasts SIGKILL, ten of which end this test."""

    def __init__(self):
        self.num_kills, self._is_closed = 0, threading.Event()

    def receive(self):
        self._is_closed.wait()
        raise LinkError("closed")

    def send(self, header, body=b""):
        self.num_kills += header["type"] == "kill"
        if self.num_kills >= 10:
            self.close()

    def close(self):
        self._is_closed.set()


def test_a_machine_whose_program_cannot_be_killed_is_not_waited_for(monkeypatch):
    """As one with a dead network filesystem, which an inspection is to find."""
    monkeypatch.setattr(inspection, "_LONGEST_S", 0.0)
    monkeypatch.setattr(remote_rank, "_IDLE_S", 0.01)
    machine = RemoteMachine(StuckLink(), {"name": "stuck", "address": "127.0.0.1", "slots": 1}, {}, ())
    found = inspection._inspect(machine, InspectionOrder(Address("127.0.0.1", 1), None, "key", {}))
    assert found.problem == "its machine stuck is lost: its inspection took longer than 0 s"
