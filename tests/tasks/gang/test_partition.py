"""Machines that lose each other while the leader reaches all of them."""

import socket
import threading
import time
from itertools import combinations
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from left_behind import begun_threads
from prefect_servers import wait_until
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.tasks.gang.machine import neighbours
from prefect_torch.tasks.gang.machine.link import LinkError
from prefect_torch.tasks.gang.machine.machine import RemoteMachine
from prefect_torch.tasks.gang.machine.neighbours import Neighbours
from prefect_torch.tasks.gang.machine.partition import Partition, parted_from_others, watch_each_other
from prefect_torch.tasks.rank.rendezvous import are_joining, joining
from servers import free_port

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """Have neighbours watched without pauses, and none any longer: the next server at its port may be another test's."""
    monkeypatch.setattr(neighbours, "_CONNECT_S", 0.02)
    with begun_threads() as begun:
        yield
    resting = set()

    def rest(_):
        resting.add(threading.current_thread())
        threading.Event().wait()

    monkeypatch.setattr(neighbours, "time", SimpleNamespace(monotonic=time.monotonic, sleep=rest))
    wait_until(lambda: {it for it in begun if it.name.startswith("reach-")} <= resting, "nobody is watched")


def test_a_machine_that_was_reached_is_missed_until_it_is_reached_again():
    told, server = [], socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]
    Neighbours(LOOPBACK, lambda *lost: told.append(lost)).watch([("b", LOOPBACK, port)])
    connection, _ = server.accept()
    server.close()
    assert not told
    connection.close()
    wait_until(lambda: told == [(["b"], [])], "it is missed")
    with socket.create_server((LOOPBACK, port)):
        wait_until(lambda: told == [(["b"], []), ([], [])], "it is there again")


def test_a_machine_that_was_never_reached_is_told_apart():
    told, port = [], free_port()
    Neighbours(LOOPBACK, lambda *lost: told.append(lost)).watch([("b", LOOPBACK, port)])
    wait_until(lambda: told == [([], ["b"])], "it is told")
    with socket.create_server((LOOPBACK, port)):
        wait_until(lambda: told == [([], ["b"]), ([], [])], "it is there")


def test_an_error_of_this_machine_does_not_count(monkeypatch):
    told, tries = [], []

    def tell(*lost):
        told.append(lost)

    def connect(*_):
        tries.append(1)
        if len(tries) == 1:
            return socket.create_connection((LOOPBACK, Neighbours(LOOPBACK, tell).port))
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(neighbours, "_wait_for_end", lambda _: None)
    monkeypatch.setattr(neighbours, "socket", SimpleNamespace(**{**vars(socket), "create_connection": connect}))
    Neighbours(LOOPBACK, tell).watch([("b", LOOPBACK, 1)])
    wait_until(lambda: len(tries) > 10, "it is tried again")
    assert not told


def test_the_kernel_finds_that_the_other_machine_is_gone():
    with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname()) as connection:
        accepted, _ = server.accept()
        waiting = threading.Thread(target=neighbours._wait_for_end, args=(connection,))
        waiting.start()
        wait_until(lambda: connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4, "it is set")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
        accepted.close()
        waiting.join(30)
        assert not waiting.is_alive()


def machines(**unreached):
    return [SimpleNamespace(name=name, unreached=frozenset(others), unmet=frozenset()) for name, others in unreached.items()]


@pytest.mark.parametrize(
    ("unreached", "expected"),
    [
        ({"a": "", "b": "", "c": ""}, ""),
        ({"a": "b", "b": "", "c": ""}, "b"),
        ({"a": "", "b": "a", "c": ""}, "b"),
        ({"a": "bc", "b": "", "c": ""}, "a"),
        ({"a": "c", "b": "c", "c": ""}, "c"),
        ({"a": "b", "b": "", "c": "d", "d": "c"}, "bd"),
        ({"a": "z", "b": ""}, ""),
    ],
)
def test_as_few_machines_as_possible_are_avoided(unreached, expected):
    assert parted_from_others(machines(**unreached)) == set(expected)


def test_a_loss_that_lasts_ends_the_attempt_and_names_both_machines():
    now_s = [0.0]
    lease = machines(a="", b="", c="")
    partition = Partition(lease, lambda: False, lambda: now_s[0])

    def after(seconds, **unreached):
        for machine in lease:
            machine.unreached = frozenset(unreached.get(machine.name, ""))
        now_s[0] += seconds
        return partition.problem()

    assert after(4) is None
    assert after(4, c="a") is None
    assert after(4, c="a") is None
    assert after(4) is None, "it has come back"
    assert after(4, c="a") is None
    assert after(60, c="a") is None, "the leader was stopped"
    assert after(4, c="a") is None
    assert after(4, c="a") is None
    problem = after(4, c="a", a="c")
    assert (problem.kind, problem.rank) == ("infrastructure", None)
    assert str(problem).startswith("machines no longer reach each other, while all of them reach the flow's: a and c. ")


def test_machines_that_never_reached_each_other_end_the_attempt_once_their_ranks_have_tried_to_for_a_minute():
    """Earlier, ranks may be late, or not even there; and they may reach each other over another network."""
    now_s, joining = [0.0], [False]
    lease = machines(a="", b="", c="")
    lease[1].unmet = frozenset("c")
    partition = Partition(lease, lambda: joining[0], lambda: now_s[0])

    def after(seconds):
        for _ in range(seconds // 4):
            now_s[0] += 4
            assert partition.problem() is None

    after(100)
    joining[0] = True
    after(60)
    joining[0] = False
    after(4)
    joining[0] = True
    after(60)
    now_s[0] += 4
    problem = partition.problem()
    assert (problem.kind, problem.rank) == ("infrastructure", None)
    assert str(problem).startswith(
        "machines do not reach each other, while all of them reach the flow's: b and c. They connect "
    )
    assert parted_from_others(lease) == {"c"}


def test_ranks_are_joining_from_the_last_one_that_begins_to_until_the_last_one_that_has():
    key_value, seen = MemoryKeyValue(), []
    with joining(key_value):
        seen.append(are_joining(key_value, 2))
        with joining(key_value):
            seen.append(are_joining(key_value, 2))
        seen.append(are_joining(key_value, 2))
    assert [*seen, are_joining(key_value, 2)] == [False, True, True, False]


class Heard:
    """The leader's side of a link whose agent says what it is given."""

    def __init__(self, *messages):
        self.sent, self.messages, self.is_over = [], iter(messages), threading.Event()

    def receive(self):
        message = next(self.messages, None)
        if message is None:
            self.is_over.wait()
            raise LinkError("gone")
        return message, b""

    def send(self, header, body=b""):
        self.sent.append(header)

    def close(self):
        pass


def test_machines_are_told_which_ones_follow_them_and_tell_which_they_lost():
    hello = {"address": "10.0.0.1", "slots": 1}
    links = [Heard({"type": "unreached", "machines": ["b"], "unmet": ["c"]}), Heard(), Heard()]
    lease = [
        RemoteMachine(link, {**hello, "name": name, "port": port}, {}, ())
        for link, name, port in zip(links, "abc", (1, 2, None), strict=True)
    ]
    watch_each_other(lease)
    assert [link.sent for link in links] == [
        [{"type": "watch", "machines": [("b", "10.0.0.1", 2)]}],
        [{"type": "watch", "machines": [("a", "10.0.0.1", 1)]}],
        [{"type": "watch", "machines": [("a", "10.0.0.1", 1), ("b", "10.0.0.1", 2)]}],
    ]
    wait_until(lambda: (lease[0].unreached, lease[0].unmet) == ({"b"}, {"c"}), "it is told")
    for link in links:
        link.is_over.set()


def test_every_two_of_seventeen_machines_watch_each_other_and_racks_of_many():
    def watched(count):
        lease = [SimpleNamespace(watch=Mock()) for _ in range(count)]
        watch_each_other(lease)
        return {frozenset((one, lease.index(it))) for one in range(count) for it in lease[one].watch.call_args.args[0]}

    assert watched(17) == {frozenset(pair) for pair in combinations(range(17), 2)}
    racks = {(one // 16, other // 16) for one, other in map(sorted, watched(64))}
    assert racks == {(one, other) for one in range(4) for other in range(one, 4)}
