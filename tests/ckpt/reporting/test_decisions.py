import threading

import pytest
from crash_points import open_run
from memory_storage import MemoryStorage
from prefect_torch.ckpt import CommitFailedError
from prefect_torch.ckpt.reporting.decisions import DecisionPoints, Decisions, Verdict, send_verdict
from prefect_torch.ckpt.reporting.events import DecisionRequest, EventReceiver, EventSender
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from ranks import Attempt, folder


class RecordedDeletions(MemoryKeyValue):
    def __init__(self):
        super().__init__()
        self.deleted = []

    def delete(self, key):
        self.deleted.append(key)
        super().delete(key)


def test_a_decision_is_deleted_once_when_the_leader_makes_the_next():
    shared = RecordedDeletions()
    rank_0 = Decisions(Peers(shared, 0, 2), EventSender(shared), DecisionPoints())
    for number in range(3):
        send_verdict(shared, number, Verdict(goes_on=True))
        rank_0.follow(number, number + 1, {}, None)
    assert [key for key in shared.deleted if key in ("decision 0", "decision 1")] == ["decision 0", "decision 1"]
    assert [shared.check(f"decision {number}") for number in range(3)] == [False, False, True]


def test_a_checkpoint_of_any_rank_asks_the_leader(store, tmp_path):
    attempt, asked, returned = Attempt(store, 2, decisions=DecisionPoints(milestone=1)), [], threading.Event()

    def lead():
        receiver = EventReceiver(attempt.key_value)
        while not returned.wait(0.01):
            for event in receiver.drain():
                if isinstance(event, DecisionRequest):
                    asked.append(event)
                    send_verdict(attempt.key_value, event.number, Verdict(goes_on=True, milestone=3))

    def train(session, rank):
        for step in range(5):
            has_checkpoint = rank == 1 and step != 1
            session.report({}, folder(tmp_path / f"{step}", model="x") if has_checkpoint else None, step=step)

    leader = threading.Thread(target=lead, daemon=True)
    leader.start()
    assert attempt.run(train) == [None, None]
    returned.set()
    leader.join(20)
    assert [event.step for event in asked] == [2, 3, 4]
    assert [event.checkpoint for event in asked] == [manifest.id for manifest in store.list()][1:]


def test_no_decision_is_asked_for_on_a_checkpoint_whose_background_commit_fails(tmp_path):
    class NoManifests(MemoryStorage):
        def put_bytes(self, key, data):
            if "/manifests/" in key:
                raise CommitFailedError("no manifest")
            super().put_bytes(key, data)

    attempt = Attempt(open_run(NoManifests()), decisions=DecisionPoints(milestone=0))
    send_verdict(attempt.key_value, 0, Verdict(goes_on=True))  # so that asking would not wait
    with pytest.raises(CommitFailedError, match="no manifest"):
        attempt.session().report({}, folder(tmp_path / "c", model="x"), upload="async")
    assert not [event for event in attempt.events() if isinstance(event, DecisionRequest)]
