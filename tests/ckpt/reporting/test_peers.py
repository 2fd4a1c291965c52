import threading

import pytest
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.reporting import commit
from prefect_torch.ckpt.reporting.decisions import DecisionPoints, Decisions, Verdict, send_verdict
from prefect_torch.ckpt.reporting.events import EventSender
from prefect_torch.ckpt.reporting.exchange import peers
from prefect_torch.ckpt.reporting.exchange.exits import RankExit, announce_exit, read_exits
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from ranks import Attempt, folder


@pytest.fixture
def warnings(monkeypatch) -> tuple[list[str], threading.Event]:
    """The warnings of ranks that wait, which come after a tenth of a second, and whether there is one."""
    lines, told = [], threading.Event()

    def record(*arguments):
        lines.append(arguments[0] % arguments[1:])
        told.set()

    monkeypatch.setattr(peers, "_SILENT_S", 0.1)
    monkeypatch.setattr(peers._logger, "warning", record)
    return lines, told


def test_a_rank_that_is_waited_for_is_named(tmp_path, warnings):
    lines, told = warnings

    def train_fn(session, rank):
        if rank == 1:
            assert told.wait(20)  # as in a collective that rank 0 never comes to
        session.report({})

    assert Attempt(CheckpointStore.open(tmp_path, "run"), 2).run(train_fn) == [None, None]
    assert "rank 0 has waited 0.1 s in report 1 for rank 1, and still waits" in lines[0]


def test_each_warning_of_a_wait_says_how_long_it_is_by_now(tmp_path, warnings, monkeypatch):
    lines, _ = warnings
    monkeypatch.setattr(peers, "_SILENT_S", 0.02)
    has_warned_again = threading.Event()

    def record(*arguments):
        lines.append(arguments[0] % arguments[1:])
        if len(lines) == 2:
            has_warned_again.set()

    monkeypatch.setattr(peers._logger, "warning", record)

    def train_fn(session, rank):
        if rank == 1:
            assert has_warned_again.wait(20)
        session.report({})

    assert Attempt(CheckpointStore.open(tmp_path, "run"), 2).run(train_fn) == [None, None]
    assert [line.partition(" in ")[0] for line in lines[:2]] == ["rank 0 has waited 0.02 s", "rank 0 has waited 0.22 s"]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_waits_while_another_one_stores_says_so(tmp_path, monkeypatch, slow):
    exchanged = "commit" if slow == 0 else "files"
    line = f"rank {1 - slow} has waited 0.1 s in report 1 {exchanged} for rank {slow}, and still waits: a commit takes until "
    told, store_part = threading.Event(), commit.store_part

    def record(*said):  # a rank may also be late to its report
        if (said[0] % said[1:]).startswith(line):
            told.set()

    def store_slowly(run, job, rank):
        assert rank != slow or told.wait(20)
        return store_part(run, job, rank)

    monkeypatch.setattr(peers, "_SILENT_S", 0.1)
    monkeypatch.setattr(peers._logger, "warning", record)
    monkeypatch.setattr(commit, "store_part", store_slowly)

    def train_fn(session, rank):
        session.report({}, folder(tmp_path / "files", model="weights") if rank == slow else None)

    assert Attempt(CheckpointStore.open(tmp_path, "run"), 2).run(train_fn) == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_the_leader_says_so(warnings, rank):
    lines, told = warnings
    shared = MemoryKeyValue()

    def lead():
        assert told.wait(20)
        send_verdict(shared, 0, Verdict(goes_on=True))

    leader = threading.Thread(target=lead, daemon=True)
    leader.start()
    Decisions(Peers(shared, rank, 2), EventSender(shared), DecisionPoints()).follow(1, 1, {}, None)
    leader.join(20)
    assert lines[0].startswith(f"rank {rank} has waited 0.1 s in decision 0 for the leader, and still waits: it records ")


def test_a_rank_that_waits_for_an_answer_says_what_every_rank_must_call(tmp_path, warnings):
    lines, told = warnings

    def train_fn(session, rank):
        if rank == 0:
            assert told.wait(20)
        session.context.should_checkpoint()

    assert Attempt(CheckpointStore.open(tmp_path, "run"), 2).run(train_fn) == [None, None]
    assert lines[0].endswith(" for rank 0, and still waits: every rank must call should_checkpoint() equally often")


def test_the_first_rank_that_returned_names_those_that_have_not(tmp_path, warnings, monkeypatch):
    lines, told = warnings

    def record(*arguments):
        if " returned after " in (line := arguments[0] % arguments[1:]):  # a rank may also be late to its report
            lines.append(line)
            told.set()

    monkeypatch.setattr(peers._logger, "warning", record)

    def train_fn(session, rank):
        session.report({})
        if rank != 1:
            assert told.wait(20)  # as in a collective that rank 1 never comes to

    assert Attempt(CheckpointStore.open(tmp_path, "run"), 3).run(train_fn) == [None] * 3
    assert "rank 1 returned after 1 report 0.1 s ago, and waits for rank 0, 2 to return: if it hangs" in lines[0]
    assert all(line.startswith("rank 1 returned after 1 report ") for line in lines)


class LastWord(MemoryKeyValue):
    """Rank 1 sends its message and leaves while rank 0, which found no message yet, looks whether anybody has left."""

    def __init__(self):
        super().__init__()
        self._is_said = False

    def add(self, key, amount):
        if amount == 0 and not self._is_said:
            self._is_said = True
            self.set("topic/1", b"its last word")
            announce_exit(self, RankExit(1, 1, "returned"))
        return super().add(key, amount)


def test_a_message_that_a_peer_sent_before_it_left_counts(monkeypatch):
    monkeypatch.setattr(peers, "_POLL_S", 0.001)
    assert Peers(LastWord(), 0, 2).exchange("topic", b"mine") == [b"mine", b"its last word"]


class LateMessage(MemoryKeyValue):
    """Rank 1 sends its message once rank 0 has looked twice whether anybody has left."""

    def __init__(self):
        super().__init__()
        self._looks = 0

    def add(self, key, amount):
        self._looks += amount == 0
        if self._looks == 2:
            self.set("topic/1", b"late")
        return super().add(key, amount)


def test_a_rank_that_has_announced_its_own_exit_still_waits_for_the_others(monkeypatch):
    monkeypatch.setattr(peers, "_POLL_S", 0.001)
    key_value = LateMessage()
    announce_exit(key_value, RankExit(0, 1, "returned"))
    assert Peers(key_value, 0, 2).exchange("topic", b"mine") == [b"mine", b"late"]


def test_what_a_rank_says_of_its_exit_is_not_replaced_by_what_its_supervisor_saw():
    key_value = MemoryKeyValue()
    said = RankExit(1, 3, "failed", "the cause")
    for end in (said, RankExit(1, None, "died", "exit code 1")):
        announce_exit(key_value, end)
    assert read_exits(key_value) == [said]


def test_messages_that_are_there_are_read_once(monkeypatch):
    key_value = MemoryKeyValue()
    key_value.set("topic/1", b"early")
    reads = []
    get = key_value.get
    monkeypatch.setattr(key_value, "get", lambda keys, timeout_s: (reads.append(keys), get(keys, timeout_s))[1])
    early = []
    assert Peers(key_value, 0, 2).exchange("topic", b"mine", lambda: early.append(1)) == [b"mine", b"early"]
    assert (reads, early) == ([["topic/1"]], [])
