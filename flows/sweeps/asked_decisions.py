"""Decisions on trials in other processes: requested by the trials' leaders and answered by the sweep, through their storage."""

import reprlib
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from prefect_torch.ckpt.errors import MalformedRecordError, UnsupportedFormatError
from prefect_torch.ckpt.reporting.decisions import TRAINING_ITERATION, DecisionMaker, DecisionPoints, Verdict
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.layout import stem
from prefect_torch.ckpt.runs.metrics import from_json, to_json
from prefect_torch.ckpt.runs.records.fields import decode
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.tasks.rank.errors import StorageNotSeenError
from prefect_torch.tasks.run_logs import get_run_logger

LONGEST_WAIT_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_OVER = ("completed", "failed")


def expect_questions(sweep: Run, *, are_expected: bool) -> None:
    """Record whether the leaders of the sweep's trials send it questions, and delete those that are answered.

    Answers that no leader waits for are deleted, too: the others stay until the next start, for leaders that still wait.
    """
    unread = {stem(key): key for key in sweep.keys(sweep.layout.all_answered)}
    asked = sweep.keys(sweep.layout.all_asked)  # listed after the answers, whose readers delete the question first
    answered = [key for key in asked if unread.pop(stem(key), None) is not None]
    sweep.storage.delete([*unread.values(), *answered])
    if are_expected:
        sweep.records.put_json(sweep.layout.deployed, {"asks": True})
    elif are_questions_expected(sweep):  # a storage may refuse every deletion
        sweep.storage.delete([sweep.layout.deployed])


def forget_questions(sweep: Run, trial: str) -> None:
    """Delete the answered questions of a trial whose leader has ended; another leader that waits still reads its answer.

    Each of them would cost a request at each look. Costs a listing, and a second one if there are any.

    Args:
        sweep: The sweep.
        trial: The trial's name within it.

    """
    asked = [key for key in sweep.keys(sweep.layout.all_asked) if stem(key).rpartition("-")[0] == trial]
    answered = set(map(stem, sweep.keys(sweep.layout.all_answered))) if asked else set()
    sweep.storage.delete([key for key in asked if stem(key) in answered])


def are_questions_expected(sweep: Run) -> bool:
    """Return whether the trials of the sweep are led by other processes, which send it questions."""
    return sweep.records.get_json(sweep.layout.deployed) is not None


def asked_decisions(trial: Run, is_terminated: Callable[[], bool], *, is_takeover: bool = False) -> "AskedDecisions | None":
    """Return the decisions of the sweep of a run; None if the run is no trial, or its sweep answers no questions or has ended.

    Args:
        trial: The run.
        is_terminated: Whether its leader is being terminated, so that it waits for no answer.
        is_takeover: Whether it takes over the run, as every flow run that a sweep starts.

    Raises:
        StorageNotSeenError: If a sweep has started it, and this machine does not see that sweep: nothing would end the trial.

    """
    name, _, leaf = trial.name.partition("/")
    if not leaf:
        return None
    sweep = trial.beside(name)
    if not are_questions_expected(sweep):
        if is_takeover and find_size(sweep.storage, sweep.layout.sweep) is None:
            raise StorageNotSeenError(
                f"this machine cannot see sweep {name!r} of trial {leaf!r} in {sweep.storage.url}: the machines of trials "
                "need the sweep's storage (a shared directory or a URL); without takeover=True, the run trains alone"
            )
        return None
    status = read_status(sweep)
    if status is not None and status.outcome is not None and status.outcome.ending in _OVER:
        return None
    return AskedDecisions(sweep, leaf, is_terminated)


@dataclass(slots=True)
class AskedDecisions:
    """Requests the sweep's decisions at the reports of a trial that this process leads; without an answer, the trial stops.

    Attributes:
        sweep: The sweep.
        trial: The trial's name within it.
        is_terminated: Returns whether to stop waiting.
        longest_wait_s: How long to wait for an answer: a sweep that was killed may be started again.
        sleep: Waits between two reads of the answer.
        has_points: Whether the sweep has told the reports at which it decides in this attempt.

    """

    sweep: Run
    trial: str
    is_terminated: Callable[[], bool] = field(default=lambda: False, compare=False)
    longest_wait_s: float = LONGEST_WAIT_S
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False)
    has_points: bool = field(default=True, init=False, compare=False)

    def points(self) -> DecisionPoints | None:
        """Return the reports at which the sweep decides; without an answer the first one, at which the trial stops.

        Raises:
            TimeoutError: If the sweep does not answer before the trial's leader is terminated.

        """
        answer = self._ask({"points": True})
        self.has_points = answer is not None
        if answer is None:
            if self.is_terminated():
                raise TimeoutError(f"sweep {self.sweep.name!r} has not answered trial {self.trial!r} in time")
            return DecisionPoints(TRAINING_ITERATION, 0, asks_always=True)
        found = self._read(answer, "points")
        return None if found is None else decode(DecisionPoints, found, "the answer", "the points of a decision")

    def decide(self, request: DecisionRequest) -> Verdict:
        """Return the sweep's decision; without one, the trial stops here, and the sweep decides when it is started again."""
        answer = self._ask({"request": asdict(request)}) if self.has_points else None
        if answer is None:
            get_run_logger().warning("sweep %r does not answer; trial %r waits in its checkpoint", self.sweep.name, self.trial)
            return Verdict(goes_on=False)
        return decode(Verdict, self._read(answer, "verdict"), "the answer", "a verdict")

    def _read(self, answer: dict[str, Any], name: str) -> Any:
        if name not in answer:
            raise MalformedRecordError(f"sweep {self.sweep.name!r} cannot answer trial {self.trial!r}: {answer.get('refused')}")
        return answer[name]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        token = f"{self.trial}-{secrets.token_hex(8)}"
        self.sweep.records.put_json(self.sweep.layout.asked(token), _plain(question))
        until_s, pause_s = time.monotonic() + self.longest_wait_s, _FIRST_PAUSE_S
        try:
            while (answer := self.sweep.records.get_json(self.sweep.layout.answered(token))) is None:
                if self.is_terminated() or time.monotonic() >= until_s:
                    return None
                self.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:  # in this order: a sweep that answers meanwhile takes its answer back, unless it still sees the question
            self.sweep.storage.delete([self.sweep.layout.asked(token)])
            self.sweep.storage.delete([self.sweep.layout.answered(token)])
        return _read_object(answer)


def answer_questions(sweep: Run, decides_on: Callable[[str], DecisionMaker | None]) -> int:
    """Answer the questions of the trials' leaders, and return how many were answered; costs a listing if there are none.

    Args:
        sweep: The sweep.
        decides_on: Returns the decision maker for the run of that name; None if no trial has that run: its question waits.

    """
    asked = {stem(key): key for key in sweep.keys(sweep.layout.all_asked)}
    answered = 0
    for token, key in asked.items():
        decides = decides_on(token.rpartition("-")[0])
        if decides is None or sweep.records.get_json(sweep.layout.answered(token)) is not None:
            continue  # there is no decision, or the last answer is not read yet
        question = sweep.records.get_json(key)  # after its answer, since a leader that has read that deletes the question first
        if question is None:
            continue
        try:
            answer = _answer(_read_object(question), decides)
        except (MalformedRecordError, UnsupportedFormatError) as exc:  # the others are answered
            get_run_logger().warning("the question %s of a trial cannot be answered: %s", key, exc)
            answer = {"refused": str(exc)}
        sweep.records.put_json(sweep.layout.answered(token), _plain(answer))
        # Its leader stopped waiting, and may have deleted the answer before it was stored.
        if sweep.records.get_json(key) is None:
            sweep.storage.delete([sweep.layout.answered(token)])
        answered += 1
    return answered


def _read_object(record: dict[str, Any]) -> dict[str, Any]:
    try:
        return _object(from_json(record))
    except ValueError as exc:
        raise MalformedRecordError(f"a question or its answer is malformed: {exc}") from exc


def _object(found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise MalformedRecordError(f"a question or its answer has {reprlib.repr(found)} in the place of an object")
    return found


def _answer(question: dict[str, Any], decides: DecisionMaker) -> dict[str, Any]:
    if "request" in question:
        request = decode(DecisionRequest, _object(question["request"]), "the question", "a request for a decision")
        return {"verdict": asdict(decides.decide(request))}
    points = decides.points()
    return {"points": None if points is None else asdict(points)}


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    plain = to_json(value)
    assert isinstance(plain, dict)
    return plain
