"""The rounds in which the ranks agree on their reports, before a checkpoint is written."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from prefect_torch.ckpt.context import never
from prefect_torch.ckpt.errors import CheckpointError, ReportMismatchError
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from prefect_torch.ckpt.reporting.exchange.remote_error import RemoteError
from prefect_torch.ckpt.state.plan import WriteItem
from prefect_torch.ckpt.state.planner import StateDecision, StatePlanner
from prefect_torch.ckpt.text import clip

from .agreement import Agreement, Intent, Upload, decide, decode_intents, merge_intents
from .background import BackgroundCommits


class Rounds:
    """The rounds in which the ranks agree on their reports; every rank takes part in each, whatever it reports.

    Args:
        peers: The ranks.
        attempt: The attempt's number, for the ids of checkpoints.
        background: This rank's background commits.
        is_terminating: Returns whether termination of the training is requested; called on rank 0.

    Attributes:
        number: How many rounds this rank has begun.
        writes: What this rank writes of a state, by the plan of the newest agreement.
        desynchronized: The error because of which the ranks are no longer in the same round, or None.
        has_last_checkpoint: On rank 0, whether a checkpoint was agreed on since termination is requested and has not failed.

    """

    def __init__(
        self, peers: Peers, attempt: int, background: BackgroundCommits, is_terminating: Callable[[], bool] = never
    ) -> None:
        self.number = 0
        self.writes: list[WriteItem] = []
        self.desynchronized: CheckpointError | None = None
        self.has_last_checkpoint = False
        self._peers = peers
        self._attempt = attempt
        self._background = background
        self._is_terminating = is_terminating
        self._plan = 0
        self._planner = StatePlanner()

    @property
    def next_name(self) -> str:
        """The name of the round that this rank has not begun, equal on all ranks and of no other round of the run."""
        return f"{self._attempt}-{self.number + 1}"

    @property
    def next_begun(self) -> str:
        """The topic that rank 0 sets when it begins the round that this rank has not begun."""
        return f"{_topic(self.number)}/begun"

    def agree(self, intent: Intent, meanwhile: Callable[[], None]) -> Agreement:
        """Return rank 0's decision, on which every rank acts in the same way.

        A report with a checkpoint first waits until its commit may begin: a synchronous commit comes after the earlier ones,
        and a state's buffer is reused.

        Args:
            intent: This rank's intent.
            meanwhile: Called once, while the ranks wait for each other.

        Raises:
            CheckpointError: The reason why every rank must raise instead, or why the ranks are desynchronized.

        """
        if intent.upload is not None:
            self._wait_for_slot(intent.upload, has_state=intent.state is not None)
        agreement = self._take_part(intent, meanwhile)
        if agreement.error is not None:
            raise agreement.error.exception()
        if agreement.checkpoint_id is not None and intent.upload is None:  # this rank takes part in a commit of the others
            self._wait_for_slot(agreement.upload, has_state=agreement.state is not None)
        return agreement

    def _wait_for_slot(self, upload: Upload, *, has_state: bool) -> None:
        if self._background.commits:
            self._background.wait_for_slot(for_another=upload == "async" and not has_state)

    def abstain(self, error: Exception, step: int) -> None:
        """Take part in the round without a report, or this rank's next report would be paired with the others' current one.

        Args:
            error: The reason.
            step: The step of this rank's previous report.

        Raises:
            CheckpointError: From `error`, the failure of a background commit.

        """
        intent = Intent(self._peers.rank, step, error=clip(f"{type(error).__name__}: {error}"))
        try:
            agreement = self._take_part(intent, lambda: None)
        except CheckpointError:  # the ranks are desynchronized, which `finish` raises; `error` comes first
            return
        if agreement.error is not None and agreement.is_background_failure:
            raise agreement.error.exception() from error

    def _take_part(self, intent: Intent, meanwhile: Callable[[], None]) -> Agreement:
        peers, topic, begun = self._peers, _topic(self.number), self.next_begun
        if peers.rank == 0:
            peers.decide(begun, b"")  # a rank that waits for an answer of `should_checkpoint` gets none before this round
        self.number += 1
        try:
            encoded = peers.exchange(topic, intent.encode(), meanwhile, merge_intents)
            if encoded is None:
                meanwhile()  # while rank 0 decides
                agreement = Agreement.decode(peers.decision(topic))
            else:
                agreement = self._decide([each for data in encoded for each in decode_intents(data)], topic)
                peers.decide(topic, agreement.encode())
            self._receive_plan(agreement.state, topic)
        except CheckpointError as exc:
            self.desynchronized = exc
            raise
        if self.number > 1:
            previous = _topic(self.number - 2)  # all ranks are in this round, so all have read the previous one
            peers.forget_message(previous)
            peers.forget_decision(previous)
        if peers.rank == 0:
            peers.forget_decision(begun)
        elif agreement.is_background_failure:
            self._background.forget_failure()  # raised now, so not again later
        return agreement

    def _decide(self, intents: Sequence[Intent], topic: str) -> Agreement:
        state: StateDecision | ReportMismatchError | None
        try:
            state = self._decide_state(intents)
        except ReportMismatchError as exc:
            state = exc
        failure = self._take_failure(intents) if self._background.commits else None
        if failure is not None:
            self.has_last_checkpoint = False  # it may be the one that failed
            return Agreement(intents[0].step, error=RemoteError.of(failure), is_background_failure=True)
        return self._end_if_requested(decide(intents, self._attempt, topic, state), intents[0].num_requests)

    def _take_failure(self, intents: Sequence[Intent]) -> CheckpointError | None:
        """Return the failure that this report raises, after the waits of all ranks: rank 0 may have none of its own."""
        if any(intent.awaits_commits for intent in intents):
            self._background.wait()
        for intent in intents:
            if intent.upload is not None:
                self._wait_for_slot(intent.upload, has_state=any(state is not None for state in intent.states))
        return self._background.take_failure()

    def _end_if_requested(self, agreement: Agreement, num_requests: int) -> Agreement:
        """Let the first checkpoint after a request of termination be the last.

        A function that calls should_checkpoint() may go on after that checkpoint and return by itself.
        """
        if agreement.checkpoint_id is None or not (self.has_last_checkpoint or self._is_terminating()):
            return agreement
        if self.has_last_checkpoint:
            return Agreement(agreement.step, ends_training=True)
        self.has_last_checkpoint = True
        return replace(agreement, ends_training=num_requests == 0)

    def _decide_state(self, intents: Sequence[Intent]) -> StateDecision | None:
        described = [state for intent in intents for state in intent.states]
        return None if all(state is None for state in described) else self._planner.decide(described)

    def _receive_plan(self, decision: StateDecision | None, topic: str) -> None:
        """Receive this rank's part of a new plan, also on a rank that reports no state."""
        if decision is None or decision.plan == self._plan:
            return
        if self._peers.rank == 0:
            parts = [
                [[write.shard, write.start, write.stop, write.holders] for write in writes] for writes in self._planner.writes
            ]
            self._peers.scatter(f"{topic}/plan", [json.dumps(part).encode() for part in parts])
        self.writes = [WriteItem(*fields) for fields in json.loads(self._peers.scattered(f"{topic}/plan"))]
        self._plan = decision.plan


def _topic(number: int) -> str:
    return f"report {number + 1}"  # errors say it: rank 1 has returned after 1 report, and rank 0 waits in report 2
