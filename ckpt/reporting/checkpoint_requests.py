"""Requests for a checkpoint: decided by rank 0, sent to all ranks, call by call."""

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise, takewhile
from typing import Literal, TypeAlias

from prefect_torch.ckpt.context import refuse_in_fork
from prefect_torch.ckpt.reporting.exchange.peers import Peers

from .overhead import OverheadBudget
from .rounds import Rounds

Answer: TypeAlias = Literal["no", "checkpoint", "end"]
_SPAN_S = 0.5  # one message in that time, and the wait for a slower rank 0, costs well below 1 % of it
_SPAN_CALLS = 16  # a loop that suddenly becomes slow receives a request late by at most this many of its steps
_BLOCK = 1024  # answers without a report until ranks tell that they have read them: some 17 s of a very quick loop
_DELETED_AT_ONCE = 2  # of read answers, at each new one: a thousand at once would stall a step
_CALL_EQUALLY = "every rank must call should_checkpoint() equally often"


class Answers:
    """The answers of rank 0 that a rank keeps, until every rank has read them.

    All have after a round of reports. A loop may go on for days without one, so each rank counts itself when it has read
    another block of answers, and rank 0 says with a later one that all have.

    Args:
        peers: The ranks.

    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._topics: deque[str] = deque()  # that somebody may not have read
        self._read: deque[str] = deque()
        self._counters: deque[str] = deque()  # of the blocks among `_topics`
        self._num_added = 0

    def add(self, topic: str) -> bool:
        """Keep one more, and delete one or two that all have read; return whether it is the last of a block."""
        for _ in range(min(_DELETED_AT_ONCE, len(self._read))):
            self._peers.forget_decision(self._read.popleft())
        self._topics.append(topic)
        self._num_added += 1
        return self._num_added % _BLOCK == 0

    def end_block(self, last: str) -> int:
        """As rank 0, return how many of the blocks before the one that ends with the topic `last` all have read."""
        num_read = sum(1 for _ in takewhile(self._peers.have_all_noted, self._counters))
        self._counters.append(_counter(last))
        return num_read

    def note_block(self, last: str) -> None:
        """As another rank, count this one among those that have read the block that ends with the topic `last`."""
        self._peers.note(_counter(last))

    def release_blocks(self, number: int) -> None:
        """Let the oldest blocks be deleted, which all have read."""
        self._read.extend(self._topics.popleft() for _ in range(number * _BLOCK))
        self._read.extend(self._counters.popleft() for _ in range(min(number, len(self._counters))))

    def release_all(self) -> None:
        """Let all be deleted, since a round of reports came after them."""
        self._read += [*self._topics, *self._counters]
        self._topics.clear()
        self._counters.clear()
        self._num_added = 0

    def delete_all(self) -> None:
        """Delete all."""
        self.release_all()
        while self._read:
            self._peers.forget_decision(self._read.popleft())


def _counter(last: str) -> str:
    return f"{last} read"


class CheckpointRequests:
    """The answers to `TrainContext.should_checkpoint` on one rank; the n-th is the same on all ranks.

    For a loop that calls it often, one message answers the calls of half a second, so that a call costs next to nothing.

    Args:
        peers: The ranks.
        rounds: The rounds of their reports.
        budget: The overhead budget, which determines when the next checkpoint is due.
        is_terminating: Returns whether termination of the training is requested.
        clock: A monotonic clock in seconds.

    Attributes:
        num_requests: How often this rank has called `should_checkpoint`.
        stop_requested: Whether the last answer was that termination is requested.

    """

    def __init__(
        self,
        peers: Peers,
        rounds: Rounds,
        budget: OverheadBudget,
        is_terminating: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._rounds = rounds
        self._budget = budget
        self._is_terminating = is_terminating
        self._clock = clock
        self.num_requests = 0
        self.stop_requested = False
        self._answered = 0  # the calls before this number have their answer
        self._answers = Answers(peers)
        self._round = 0
        self._called_at_s: deque[float] = deque(maxlen=_SPAN_CALLS + 1)

    def should_checkpoint(self) -> bool:
        """Return rank 0's answer to its call of the same number; the other ranks wait for it.

        Raises:
            ReportMismatchError: If rank 0 reports instead of calling this.
            RuntimeError: In a process that the rank has forked.

        """
        refuse_in_fork("should_checkpoint")
        number, self.num_requests = self.num_requests, self.num_requests + 1
        if self._peers.rank == 0:
            self._called_at_s.append(self._clock())
        if number < self._answered:
            return False
        answer, num_calls = self._answer_to(number)
        self._answered = number + num_calls
        self.stop_requested = answer == "end"
        return answer != "no"

    def forget_answers(self) -> None:
        """Delete the answers so far: every rank has read them, since all have taken part in a round after them."""
        self._answers.delete_all()

    def _answer_to(self, number: int) -> tuple[Answer, int]:
        """Return the answer to call `number`, and the number of calls from there for which it is valid."""
        topic = f"checkpoint now {number}"
        if self._rounds.number != self._round:
            self._answers.release_all()
            self._round = self._rounds.number
        ends_block = self._answers.add(topic)
        if self._peers.rank != 0:
            decision = self._peers.decision(topic, unless=self._rounds.next_begun, reason=_CALL_EQUALLY)
            answer, num_calls, num_read = decision.decode().split()
            self._answers.release_blocks(int(num_read))
            if ends_block:
                self._answers.note_block(topic)
            return _known(answer), int(num_calls)
        if self._is_terminating():
            answer_of_span: tuple[Answer, int] = ("end", 1)
        elif self._budget.is_due():
            answer_of_span = ("checkpoint", 1)
        else:
            answer_of_span = ("no", self._num_calls_of_a_span())
        num_blocks_read = self._answers.end_block(topic) if ends_block else 0
        self._peers.decide(topic, f"{answer_of_span[0]} {answer_of_span[1]} {num_blocks_read}".encode())
        self._answers.release_blocks(num_blocks_read)
        return answer_of_span

    def _num_calls_of_a_span(self) -> int:
        times = list(self._called_at_s)
        if len(times) <= _SPAN_CALLS:  # too few for an estimate
            return 1
        slowest_s = max(after - before for before, after in pairwise(times))
        return max(1, min(_SPAN_CALLS, int(_SPAN_S / slowest_s) if slowest_s > 0 else _SPAN_CALLS))


def _known(answer: str) -> Answer:
    assert answer in ("no", "checkpoint", "end")
    return answer  # type: ignore[return-value]  # the assertion says so
