"""The link between a leader and an agent, between the threads of this process."""

import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import SimpleNamespace

import cloudpickle
import prefect_torch
import pytest
from prefect_torch.ckpt import StorageSpec
from prefect_torch.tasks.gang.machine import agent as agent_module
from prefect_torch.tasks.gang.machine import agent_listener
from prefect_torch.tasks.gang.machine import link as links
from prefect_torch.tasks.gang.machine.agent import Agent
from prefect_torch.tasks.gang.machine.agent_listener import AgentListener
from prefect_torch.tasks.gang.machine.interface import interface_of
from prefect_torch.tasks.gang.machine.link import Link, LinkError, greet_agent, greet_leader
from prefect_torch.tasks.gang.machine.machine import RemoteMachine
from prefect_torch.tasks.gang.machine.versions import explain_mixture, versions
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from rank_specs import rank_spec

CHALLENGE_BYTES = len(links._PROTOCOL) + 32
PROOF_BYTES = 32


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield lambda end: stack.enter_context(closing(end))


@pytest.fixture
def greet(opened):
    """Return both ends of a link, or the error of each."""

    def make(leader_key="secret", agent_key="secret"):
        listening = opened(socket.create_server(("127.0.0.1", 0)))
        ends = {}

        def meet(name, connect, greeting, key):
            connection = opened(connect())
            try:
                ends[name] = opened(greeting(connection, key, 5, 30))
            except LinkError as exc:
                connection.close()
                ends[name] = exc

        serve = partial(socket.create_connection, listening.getsockname())
        threads = [
            threading.Thread(target=meet, args=("leader", lambda: listening.accept()[0], greet_agent, leader_key)),
            threading.Thread(target=meet, args=("agent", serve, greet_leader, agent_key)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ends["leader"], ends["agent"]

    return make


def test_messages_arrive_in_order_with_their_bytes_and_heartbeats_are_not_seen(greet):
    leader, agent = greet()
    for number in range(3):
        leader.send({"number": number}, bytes([number]) * 1_000)
        leader.send_heartbeat()
    assert [agent.receive() for _ in range(3)] == [({"number": number}, bytes([number]) * 1_000) for number in range(3)]
    agent.send({"answer": "ü"})
    assert leader.receive() == ({"answer": "ü"}, b"")


def test_what_was_lost_is_sent_again_each_second(greet):
    """A network that is away for eight seconds is back before the machine counts as lost."""
    for end in greet():
        try:
            longest_ms = end._connection.getsockopt(socket.IPPROTO_TCP, 44)
        except OSError:
            pytest.skip("of Linux 6.15 and newer")
        assert longest_ms == 1000


def test_the_kernel_looks_at_a_link_on_which_nothing_is_sent(greet):
    """As before an agent's hello, while it lists its GPUs: the leader would wait for a machine that is gone."""
    for end in greet():
        assert end._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert end._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3


def test_without_the_key_there_is_no_link_on_either_end(greet):
    leader, agent = greet(agent_key="guessed")
    assert isinstance(leader, LinkError)
    assert isinstance(agent, LinkError)


@pytest.mark.parametrize("place", [0, 3, 20, 50, 60])
def test_a_message_that_is_changed_on_its_way_ends_the_link(opened, place):
    """Lengths, code, header and body: each byte is under the code."""
    sender, receiver, attacked, target = map(opened, (*socket.socketpair(), *socket.socketpair()))
    Link(sender, b"a", b"b").send({"type": "start"}, b"a function")
    message = bytearray(receiver.recv(1000))
    message[place] ^= 1
    attacked.sendall(message)
    attacked.close()
    with pytest.raises(LinkError):
        Link(target, b"b", b"a").receive()


def test_a_message_cannot_be_sent_again(opened):
    sender, receiver = map(opened, socket.socketpair())
    Link(sender, b"a", b"b").send({"type": "kill"})
    message = receiver.recv(1000)
    sender.sendall(message * 2)
    link = Link(receiver, b"b", b"a")
    assert link.receive() == ({"type": "kill"}, b"")
    with pytest.raises(LinkError, match="not from the other end"):
        link.receive()


def test_a_message_is_worth_nothing_in_the_other_direction(greet):
    leader, agent = greet()
    leader.send({"type": "kill"})
    message = agent._connection.recv(1000)
    agent._connection.sendall(message)
    with pytest.raises(LinkError, match="not from the other end"):
        leader.receive()


def heard(connection, num_bytes):
    """Return what the other end says; a socket with a timeout, unlike one without, does not wait for all of it by itself."""
    return links._exactly(connection, num_bytes, time.monotonic() + 20)


def test_the_key_does_not_cross_the_network():
    """Of an agent that connects to what is no leader."""
    listening = socket.create_server(("127.0.0.1", 0))
    said = []

    def overhear():
        with closing(listening.accept()[0]) as connection:
            connection.sendall(links._PROTOCOL + b"n" * 32)
            said.append(heard(connection, CHALLENGE_BYTES + PROOF_BYTES))

    thread = threading.Thread(target=overhear)
    thread.start()
    with pytest.raises(LinkError), closing(socket.create_connection(listening.getsockname())) as connection:
        greet_leader(connection, "a secret of some length", 5, 30)
    thread.join()
    listening.close()
    assert len(said[0]) == CHALLENGE_BYTES + PROOF_BYTES
    assert b"secret" not in said[0]


def hello(name, **fields):
    return {"type": "hello", "name": name, "slots": 1, "address": "127.0.0.1", "versions": versions(), **fields}


@pytest.fixture
def listener():
    entered = []
    listener = AgentListener("127.0.0.1", 0, "key", lambda link, hello: entered.append((link, hello)))
    yield listener, entered
    listener.close()
    for link, _ in entered:
        link.close()


def connect_agent(listener, key="key"):
    connection = socket.create_connection((listener.host, listener.port))
    try:
        link = greet_leader(connection, key, 5, 30)
    except LinkError:
        connection.close()
        raise
    link.send(hello("good"))
    return link


def wait_for(condition, longest_s=20):
    deadline = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_an_agent_proves_in_one_connection_is_worth_nothing_in_another(listener, opened):
    listener, _ = listener

    def connect():
        to_leader = opened(socket.create_connection((listener.host, listener.port)))
        return to_leader, heard(to_leader, CHALLENGE_BYTES)

    relay = opened(socket.create_server(("127.0.0.1", 0)))
    agent = opened(socket.create_connection(relay.getsockname()))
    greeting = threading.Thread(target=greet_leader, args=(agent, "key", 20, 30))
    greeting.start()
    to_agent, (to_leader, challenge) = opened(relay.accept()[0]), connect()
    to_agent.sendall(challenge)
    said = heard(to_agent, CHALLENGE_BYTES + PROOF_BYTES)
    to_leader.sendall(said)
    to_agent.sendall(heard(to_leader, PROOF_BYTES))
    greeting.join()
    again, _ = connect()
    again.sendall(said)
    with pytest.raises(LinkError, match="has closed the connection"):  # the leader proves nothing
        heard(again, PROOF_BYTES)


def test_a_flood_of_silent_connections_keeps_no_agent_waiting(listener):
    listener, entered = listener
    connections = [socket.create_connection((listener.host, listener.port)) for _ in range(400)]
    begun = time.monotonic()
    link = connect_agent(listener)
    wait_for(lambda: entered)
    assert time.monotonic() - begun < links.LINK_HEARTBEAT_S + 3  # less than one of them may take to be given up
    assert [hello["name"] for _, hello in entered] == ["good"]
    assert len(listener._unknown) <= 256
    link.close()
    for connection in connections:
        connection.close()


def test_an_agent_is_accepted_once_there_is_a_thread_for_it(listener, monkeypatch):
    """At a limit of processes there may be none for the moment, and agents do not come again."""
    listener, entered = listener
    refused = []

    class Thread(threading.Thread):
        def start(self):
            if len(refused) < 2:
                refused.append(self)
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(agent_listener, "threading", SimpleNamespace(Thread=Thread))
    greeted = [connect_agent(listener) for _ in range(2)]
    wait_for(lambda: len(entered) == 2)
    assert len(refused) == 2
    for link in greeted:
        link.close()


def test_hundreds_of_agents_that_all_take_their_time_are_accepted(listener):
    """They prove the key at once, and say what they have when they have taken their GPUs."""
    listener, entered = listener
    greeted = [greet_leader(socket.create_connection((listener.host, listener.port)), "key", 20, 30) for _ in range(300)]
    for number, link in enumerate(greeted):
        link.send(hello(f"{number}"))
    wait_for(lambda: len(entered) == 300)
    for link in greeted:
        link.close()


def test_a_connection_without_the_key_is_not_accepted(listener):
    listener, entered = listener
    with pytest.raises(LinkError):
        connect_agent(listener, "another key")
    with closing(socket.create_connection((listener.host, listener.port))) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
        with suppress(ConnectionResetError):  # the end, while bytes are unread there
            while connection.recv(1000):  # the protocol and the challenge
                pass
    link = connect_agent(listener)
    wait_for(lambda: entered)
    assert len(entered) == 1
    link.close()


def test_a_mixture_of_versions_is_explained():
    assert explain_mixture(versions()) is None
    assert explain_mixture({**versions(), "torch": "1.0"}).startswith("it has other versions: torch 1.0, here ")
    assert "prefect-torch None" in explain_mixture({"python": versions()["python"], "torch": versions()["torch"]})


def test_a_machine_that_starts_after_an_upgrade_differs_from_the_leader_that_began_before_it(monkeypatch):
    monkeypatch.setattr("prefect_torch.tasks.gang.machine.versions.version", lambda _: "99.0")
    explained = explain_mixture({**versions(), "prefect-torch": "99.0"})
    assert explained == f"it has other versions: prefect-torch 99.0, here {prefect_torch.__version__}"


def test_a_machine_is_lost_by_its_silence_but_not_by_our_own_sleep(greet):
    leader, agent = greet()
    machine = RemoteMachine(leader, hello("m"), {}, ())
    leader.heard_s -= 60
    machine.look(slept_s=60)
    assert machine.lost is None
    leader.heard_s -= 60
    machine.look(slept_s=0)
    assert machine.lost.startswith("it has sent nothing for 10 s")
    with pytest.raises(LinkError):
        agent.receive()


@pytest.mark.parametrize("is_terminated", [False, True])
def test_an_agent_ends_by_the_silence_of_its_leader_but_not_by_its_own_sleep(monkeypatch, is_terminated):
    """Both sleep where all containers of a training on one host are paused."""
    waits_s, clock = [1.0, 1.0, 60.0, *[1.0] * 60], SimpleNamespace(now_s=0.0)

    class Waited:
        def is_set(self):
            return False

        def wait(self, timeout):
            assert timeout == 1.0
            clock.now_s += waits_s.pop(0)

    link = SimpleNamespace(heard_s=0.0, send_heartbeat=lambda: None, send=lambda header: None, close=lambda: None)
    sending = Agent(link, "127.0.0.1")
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    sending._has_ended = sending._terminated = Waited()
    if is_terminated:
        sending._terminated = threading.Event()
        sending._terminated.set()
    sending._send_heartbeats()
    assert clock.now_s == 62.0 + 31.0


def test_a_machine_that_was_sent_a_signal_says_so_and_is_not_lost(greet):
    leader, agent = greet()
    machine = RemoteMachine(leader, hello("m"), {}, ())
    agent.send({"type": "terminated"})
    wait_for(lambda: machine.is_terminated)
    assert machine.lost is None
    agent.close()
    wait_for(lambda: machine.lost)
    assert machine.lost.startswith("its agent is gone")


@pytest.mark.parametrize("renews", [True, False])
def test_a_rank_whose_initial_checkpoint_is_in_the_storage_of_a_block_reaches_prefect(greet, monkeypatch, renews):
    monkeypatch.setenv("PREFECT_API_KEY", "key")
    leader, agent = greet()
    source = StorageSpec("s3://bucket", credential_source=b"block" if renews else None)
    machine = RemoteMachine(leader, hello("m"), {}, ())
    machine.start(rank_spec(restored=CheckpointRef(source, "seed", "000001-00000000-0123abcd")))
    started, _ = agent.receive()
    assert started["environment"].get("PREFECT_API_KEY") == ("key" if renews else None)


def test_the_leader_holds_what_one_rank_of_a_machine_is_sent_at_a_time(greet, monkeypatch):
    """With a checkpoint of 100,000 files, that is 12 MB for each."""
    leader, _ = greet()
    machine = RemoteMachine(leader, hello("m"), {}, ())
    held, has_two = [], threading.Event()

    def dumps(spec):
        held.append(spec.rank)
        if len(held) > 1:
            has_two.set()
        return b""

    def send(header, body):
        has_two.wait(0.3)  # there is time for another rank
        held.remove(header["rank"])

    monkeypatch.setattr(cloudpickle, "dumps", dumps)
    monkeypatch.setattr(machine, "_send", send)
    starting = [threading.Thread(target=machine.start, args=(rank_spec(rank=rank, world_size=4),)) for rank in range(4)]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    assert not has_two.is_set()
    assert not held


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
@pytest.mark.parametrize("own", [{}, {"NCCL_SOCKET_IFNAME": "eth"}])
def test_gloo_and_nccl_use_the_interface_that_reaches_the_leader_and_no_other_whose_name_begins_like_it(monkeypatch, own):
    """NCCL would take "eth1" for eth10, too. What is set on the machine holds."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    order = {"not_for_ranks": [], "environment": {}, "local_world_size": 1}
    environment = Agent(SimpleNamespace(), "127.0.0.1")._environment(order)
    assert {name: environment[name] for name in environment if name.endswith("_SOCKET_IFNAME")} == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        **own,
    }


def test_an_agent_imports_neither_prefect_nor_torch():
    program = "import prefect_torch.tasks.gang.machine.agent, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout.split()
    assert not {"prefect", "torch", "pydantic", "cloudpickle"} & set(loaded)
