from prefect_torch.ckpt.reporting.decisions import DecisionPoints, Decisions, Verdict, answer
from prefect_torch.ckpt.reporting.events import EventSender
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.reporting.exchange.peers import Peers


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
        answer(shared, number, Verdict(goes_on=True))
        rank_0.follow(number, number + 1, {}, None)
    assert [key for key in shared.deleted if key in ("decision 0", "decision 1")] == ["decision 0", "decision 1"]
    assert [shared.check(f"decision {number}") for number in range(3)] == [False, False, True]
