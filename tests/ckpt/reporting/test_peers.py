import threading

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.reporting import peers
from prefect_torch.ckpt.reporting.key_value import MemoryKeyValue
from prefect_torch.ckpt.reporting.peers import Peers, RankExit, announce_exit
from ranks import Attempt


def test_a_rank_that_is_waited_for_is_named(tmp_path, monkeypatch):
    lines, told = [], threading.Event()

    def record(*arguments):
        lines.append(arguments[0] % arguments[1:])
        told.set()

    monkeypatch.setattr(peers, "_SILENT_S", 0.1)
    monkeypatch.setattr(peers._logger, "warning", record)

    def train_fn(session, rank):
        if rank == 1:
            assert told.wait(20)  # as in a collective that rank 0 never comes to
        session.report({})

    assert Attempt(CheckpointStore.open(tmp_path, "run"), 2).run(train_fn) == [None, None]
    assert "rank 0 has waited 0.1 s in report 0 for rank 1, and goes on" in lines[0]


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
