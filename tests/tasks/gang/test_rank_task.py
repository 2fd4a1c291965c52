"""What a rank that is stopped, or fails by itself, is sent."""

import logging
import pickle
import sys
from types import SimpleNamespace

import pytest
from left_behind import begun_threads
from prefect_servers import wait_until
from prefect_torch.tasks.gang import rank_task
from prefect_torch.tasks.gang.rank_logs import RankLog
from prefect_torch.tasks.gang.stop_order import StopOrder
from prefect_torch.tasks.rank.spec import RankResult
from rank_specs import rank_spec


def test_a_log_that_nobody_reads_stops_no_heartbeat(monkeypatch):
    """A terminal that is stopped by Ctrl-S blocks whoever writes to it."""
    monkeypatch.setattr(rank_task, "RANK_HEARTBEAT_S", 0.01)
    sent = []
    store = SimpleNamespace(add=lambda key, by: sent.append(key))
    heartbeat = rank_task.Heartbeat(lambda: store, 3)
    with begun_threads() as begun, heartbeat.kept_up():
        wait_until(lambda: len(sent) > 5, "heartbeats", every_s=0.01)
    (sender,) = begun
    sender.join(30)
    assert not sender.is_alive()


class Rank:
    """A rank that exits after `exits_s`, or once it is sent a signal that it is `killed_by`; it has its own clock."""

    def __init__(self, exits_s: float, killed_by: str, *, is_recording: bool = False) -> None:
        self.now_s, self.sent = 0.0, []
        self._exits_s, self._killed_by, self._is_recording = exits_s, killed_by, is_recording

    def lines(self, poll_s: float):
        while self.now_s < self._exits_s and self._killed_by not in [name for name, _ in self.sent]:
            self.now_s += 0.25
            yield []

    def monotonic(self) -> float:
        return self.now_s

    def write_stack_traces(self) -> bool:
        self.sent.append(("stack traces", self.now_s))
        return self._is_recording

    def terminate(self) -> None:
        self.sent.append(("SIGTERM", self.now_s))

    def kill(self) -> None:
        self.sent.append(("SIGKILL", self.now_s))


@pytest.mark.parametrize(
    ("has_failed", "rank", "sent", "reason"),
    [
        (False, Rank(60, "SIGTERM"), [("SIGTERM", 0.25)], "another failed"),
        (False, Rank(60, "SIGKILL"), [("SIGTERM", 0.25), ("SIGKILL", 3.25)], "another failed"),
        (True, Rank(1, "SIGKILL"), [], None),
        (True, Rank(60, "SIGKILL"), [("SIGKILL", 3.25)], None),
    ],
)
def test_a_rank_that_has_announced_its_failure_is_not_terminated_before_its_error_is_known(
    has_failed, rank, sent, reason, monkeypatch
):
    monkeypatch.setattr(rank_task, "time", rank)
    stop = StopOrder()
    stop.give("another failed")
    assert rank_task._supervise(rank, stop, lambda: None, lambda: has_failed, RankLog(0)) == reason
    assert rank.sent == sent


@pytest.mark.parametrize(("is_recording", "waits_s"), [(True, 5.0), (False, 1.0)])
def test_a_rank_that_hangs_has_the_time_to_write_before_it_is_terminated(is_recording, waits_s, monkeypatch):
    rank, stop = Rank(60, "SIGTERM", is_recording=is_recording), StopOrder()
    monkeypatch.setattr(rank_task, "time", rank)
    stop.give("it hangs", wants_stack_traces=True)
    assert rank_task._supervise(rank, stop, lambda: None, lambda: False, RankLog(0)) == "it hangs"
    (_, asked_s), (_, terminated_s) = rank.sent
    assert [name for name, _ in rank.sent] == ["stack traces", "SIGTERM"]
    assert terminated_s - asked_s == waits_s


class ExitsWhereItIsRebuilt:
    """As what is defined in a script that parses its arguments when it is imported."""

    def __reduce__(self):
        return sys.exit, (2,)


def test_what_exits_when_it_is_rebuilt_ends_no_supervisor(monkeypatch):
    monkeypatch.setattr(rank_task, "get_run_logger", lambda: logging.getLogger("ranks"))
    pickled = pickle.dumps(ExitsWhereItIsRebuilt())
    assert rank_task._load_value(pickled) is None
    error = rank_task._error(rank_spec(), RankResult(kind="user", error="boom", exception=pickled))
    assert (error.kind, error.original) == ("user", None)
