"""Requests for a checkpoint: decided by rank 0, sent to all ranks, call by call."""

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, TypeAlias

from prefect_torch.ckpt.context import refuse_in_fork
from prefect_torch.ckpt.reporting.exchange.peers import Peers

from .overhead import OverheadBudget
from .rounds import Rounds

Answer: TypeAlias = Literal["no", "checkpoint", "end"]
_SPAN_S = 0.5  # one message in that time, and the wait for a slower rank 0, costs well below 1 % of it
_SPAN_QUESTIONS = 16  # a loop that suddenly becomes slow receives a request late by at most this many of its steps


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
        self._topics: list[str] = []  # those of the answers since round `_round`
        self._round = 0
        self._asked_at_s: deque[float] = deque(maxlen=_SPAN_QUESTIONS + 1)

    def should_checkpoint(self) -> bool:
        """Return rank 0's answer to its call of the same number; the other ranks wait for it.

        Raises:
            ReportMismatchError: If rank 0 reports instead of calling this.
            RuntimeError: In a process that the rank has forked.

        """
        refuse_in_fork("should_checkpoint")
        number, self.num_requests = self.num_requests, self.num_requests + 1
        if self._peers.rank == 0:
            self._asked_at_s.append(self._clock())
        if number < self._answered:
            return False
        answer, num_questions = self._answer_to(number)
        self._answered = number + num_questions
        self.stop_requested = answer == "end"
        return answer != "no"

    def forget_answers(self) -> None:
        """Drop the answers so far: every rank has read them, since all have taken part in a round after them."""
        for topic in self._topics:
            self._peers.forget_decision(topic)
        self._topics.clear()

    def _answer_to(self, number: int) -> tuple[Answer, int]:
        """Return the answer to call `number`, and the number of calls from there for which it is valid."""
        topic = f"checkpoint now {number}"
        if self._rounds.number != self._round:
            self.forget_answers()
            self._round = self._rounds.number
        self._topics.append(topic)
        if self._peers.rank != 0:
            answer, _, num_questions = self._peers.decision(topic, unless=self._rounds.next_begun).decode().partition(" ")
            return _known(answer), int(num_questions)
        if self._is_terminating():
            answer_of_span: tuple[Answer, int] = ("end", 1)
        elif self._budget.is_due():
            answer_of_span = ("checkpoint", 1)
        else:
            answer_of_span = ("no", self._num_questions_of_a_span())
        self._peers.decide(topic, f"{answer_of_span[0]} {answer_of_span[1]}".encode())
        return answer_of_span

    def _num_questions_of_a_span(self) -> int:
        times = list(self._asked_at_s)
        if len(times) <= _SPAN_QUESTIONS:  # too few for an estimate
            return 1
        slowest_s = max(after - before for before, after in pairwise(times))
        return max(1, min(_SPAN_QUESTIONS, int(_SPAN_S / slowest_s) if slowest_s > 0 else _SPAN_QUESTIONS))


def _known(answer: str) -> Answer:
    assert answer in ("no", "checkpoint", "end")
    return answer  # type: ignore[return-value]  # the assertion says so
