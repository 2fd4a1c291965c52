"""Ranks whose messages are aggregated on each machine; sessions are threads, stores dictionaries or TCPStores."""

import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt import PeerGoneError, ReportMismatchError
from prefect_torch.ckpt.reporting.exchange import peers as peers_module
from prefect_torch.ckpt.reporting.exchange.exits import RankExit, announce_exit
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.reporting.exchange.node import Node, pack, unpack
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from prefect_torch.tasks.rank import rendezvous
from prefect_torch.tasks.rank.rendezvous import Rendezvous, connect
from ranks import Attempt, folder, read_files

NODES = (3, 2, 1)
WORLD = sum(NODES)


@given(st.lists(st.binary(max_size=100)))
def test_messages_are_packed(messages):
    assert unpack(pack(messages)) == messages


@pytest.mark.parametrize("upload", ["sync", "async"])
def test_ranks_of_several_machines_agree_and_leave_nothing_behind(store, tmp_path, upload):
    attempt = Attempt(store, WORLD, NODES)
    answers = [[] for _ in range(WORLD)]

    def work(session, rank):
        for step in range(10):
            answers[rank].append(session.context.should_checkpoint())
            checkpoint = folder(tmp_path / f"{rank}-{step}", **{f"rank{rank}": f"{step}"})
            session.report({"step": step}, checkpoint, upload=upload)

    assert attempt.run(work) == [None] * WORLD
    assert len(store.list()) == 10
    assert read_files(store.checkpoint(store.latest())) == {f"rank{rank}": b"9" for rank in range(WORLD)}
    assert answers == [[False] * 10] * WORLD
    attempt.events()
    assert not any(value for key, value in attempt.key_value._values.items() if key.startswith("event/"))  # slots used again
    left = [key for key in attempt.key_value._values if not key.startswith(("end", "left/", "all left", "event"))]
    assert len(left) <= 2 + len(NODES), left  # the last round's, and the decision on the last commit
    for node in attempt.nodes:
        left = list(node.key_value._values)
        assert len(left) <= len(node.ranks) + 1 + 4, left  # the last round's, copies of these decisions, and who read them


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_long_messages_of_a_machine_leave_nothing_behind_whichever_rank_comes_last(monkeypatch, order):
    monkeypatch.setattr(rendezvous, "_MOST_BYTES", 100)
    meeting = Rendezvous()
    leader = meeting.serve()
    nodes = [Node(MemoryKeyValue(), 0, 2, range(1)), *[Node(MemoryKeyValue(), 1, 2, range(1, 3))] * 2]
    ranks = [Peers(connect(meeting.address), rank, 3, node) for rank, node in enumerate(nodes)]
    for rank in order:
        ranks[rank].exchange("topic", bytes([rank]) * 1000)
    assert ranks[0].exchange("topic", b"\0" * 1000) == [bytes([rank]) * 1000 for rank in range(3)]
    for peers in ranks:
        peers.forget_message("topic")
        peers.have_all_noted("topic")  # its answer comes after all that this rank has deleted
    leader.delete("topic")
    assert leader.store.num_keys() <= 1  # torch's own


def test_one_request_a_node_reaches_the_store_of_all_ranks(store):
    attempt = Attempt(store, WORLD, NODES)
    sent = []
    send = attempt.key_value.set

    def count(key, value):
        sent.append(key)
        send(key, value)

    attempt.key_value.set = count
    assert attempt.run(lambda session, _: session.report({})) == [None] * WORLD
    assert sorted(key for key in sent if key.startswith("report 1")) == [
        "report 1",
        "report 1/begun",
        *(f"report 1/node {number}" for number in range(len(NODES))),
    ]


@pytest.mark.parametrize("late", range(WORLD))
def test_a_late_rank_keeps_all_waiting_and_then_all_agree(store, late, monkeypatch):
    node = next(number for number, first in ((2, 5), (1, 3), (0, 0)) if late >= first)
    whom = f"a rank of node {node}" if late else "rank 0"
    told = threading.Event()

    def record(*said):  # where another one is late, too, the next line is the first without it
        if f" in report 1 for {whom}, and still waits" in said[0] % said[1:]:
            told.set()

    monkeypatch.setattr(peers_module, "_SILENT_S", 0.1)
    monkeypatch.setattr(peers_module._logger, "warning", record)

    def work(session, rank):
        if rank == late:
            assert told.wait(20)
        session.report({})

    assert Attempt(store, WORLD, NODES).run(work) == [None] * WORLD


@pytest.mark.parametrize("other", range(1, WORLD))
def test_a_rank_that_disagrees_is_named_on_all(store, other):
    errors = Attempt(store, WORLD, NODES).run(lambda session, rank: session.report({}, step=int(rank == other)))
    assert {type(error) for error in errors} == {ReportMismatchError}
    assert {str(error) for error in errors} == {
        f"rank {other} reported step 1 but rank 0 reported step 0; report the same step on every rank"
    }


@pytest.mark.parametrize("failing", range(WORLD))
def test_a_rank_that_fails_is_named_on_all_others(store, failing):
    def work(session, rank):
        session.report({})
        if rank == failing:
            raise RuntimeError("boom")
        session.report({})

    errors = Attempt(store, WORLD, NODES).run(work)
    assert str(errors.pop(failing)) == "boom"
    assert all(isinstance(error, PeerGoneError) and f"rank {failing} failed" in str(error) for error in errors)


@pytest.mark.parametrize("early", range(WORLD))
def test_a_rank_that_returns_early_is_named_on_all_others(store, early):
    def work(session, rank):
        for _ in range(2 - (rank == early)):
            session.report({})

    errors = Attempt(store, WORLD, NODES).run(work)
    assert all(isinstance(error, (ReportMismatchError, PeerGoneError)) for error in errors)
    del errors[early]
    assert all(f"rank {early} returned after 1 report" in str(error) for error in errors)


def test_the_answer_of_rank_0_reaches_ranks_whose_neighbours_never_ask(store):
    """A rank that reads for its machine is the first that asks, not a certain one."""
    answers = []

    def work(session, rank):
        if rank in (0, 2, 4):
            answers.append(session.context.should_checkpoint())
        session.report({})

    attempt = Attempt(store, WORLD, NODES)
    attempt.ends_soon = True
    assert attempt.run(work) == [None] * WORLD
    assert answers == [True] * 3


@contextmanager
def two_ranks_of_one_machine():
    """Ranks 1 and 2 of three, on the second machine."""
    everybody, nodes = MemoryKeyValue(), MemoryKeyValue()
    node = Node(nodes, 1, 2, range(1, 3))
    yield everybody, [Peers(everybody, rank, 3, node) for rank in node.ranks]


def test_a_rank_that_dies_while_it_reads_for_others_is_not_waited_for():
    """What rank 0 has decided reaches them all the same; what it can no longer decide is an error that names the dead one."""
    with two_ranks_of_one_machine() as (everybody, (dead, alive)):
        assert dead._node.takes_reading("one")
        everybody.set("one", b"decided")
        assert alive.decision("one") == b"decided"
        assert dead._node.takes_reading("two")
        announce_exit(everybody, RankExit(1, None, "died", "killed by SIGKILL"))
        with pytest.raises(PeerGoneError, match=r"rank 1 died \(killed by SIGKILL\)"):
            alive.decision("two")


def test_a_rank_whose_neighbour_asked_while_rank_0_reports_is_told():
    with two_ranks_of_one_machine() as (everybody, (reader, other)):
        everybody.set("begun", b"")
        for rank in (reader, other):
            with pytest.raises(ReportMismatchError, match="asks should_checkpoint"):
                rank.decision("answer", unless="begun")


def test_without_the_process_that_serves_a_machines_store_its_ranks_learn_who_is_gone():
    class Gone(MemoryKeyValue):
        def gone(self, *_):
            raise ConnectionError

        set = get = add = check = delete = gone

    everybody = MemoryKeyValue()
    peers = Peers(everybody, 2, 3, Node(Gone(), 1, 2, range(1, 3)))
    with pytest.raises(PeerGoneError, match="rank 1 is gone, which serves its machine, so report 0 of rank 2 cannot"):
        peers.exchange("report 0", b"")
    everybody.set("report 1", b"decided")
    assert peers.decision("report 1") == b"decided"


def test_all_ranks_see_one_decision_however_they_are_scheduled():
    """Thirty-two ranks on machines of different sizes, two hundred rounds, all as fast as they can."""
    sizes, rounds = (1, 5, 8, 2, 16), 200
    everybody, nodes, first = MemoryKeyValue(), [], 0
    for number, size in enumerate(sizes):
        nodes.append(Node(MemoryKeyValue(), number, len(sizes), range(first, first + size)))
        first += size
    seen = [[] for _ in range(first)]

    def be(rank, node):
        peers = Peers(everybody, rank, first, node)
        for number in range(rounds):
            told = peers.exchange(f"topic {number}", f"{rank} {number}".encode())
            if told is not None:
                assert told == [f"{each} {number}".encode() for each in range(first)]
                peers.decide(f"topic {number}", f"decision {number}".encode())
                seen[rank].append(f"decision {number}".encode())
            else:
                seen[rank].append(peers.decision(f"topic {number}"))
            if number:
                peers.forget_message(f"topic {number - 1}")
                peers.forget_decision(f"topic {number - 1}")

    threads = [threading.Thread(target=be, args=(rank, node)) for node in nodes for rank in node.ranks]
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), time.monotonic() - started_s
    assert seen == [[f"decision {number}".encode() for number in range(rounds)]] * first
    assert len(everybody._values) <= 2 * len(sizes) + 2
