"""One rank's session of a training: each of its reports, from the user's arguments to the manifest."""

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, NoReturn, SupportsIndex

from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.context import TrainContext
from prefect_torch.ckpt.errors import CheckpointError, PeerGoneError, ReportMismatchError
from prefect_torch.ckpt.files.node_copy import NodeCopy
from prefect_torch.ckpt.reporting.exchange.exits import RankExit
from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue
from prefect_torch.ckpt.reporting.exchange.node import Node
from prefect_torch.ckpt.reporting.exchange.peers import Peers
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.metrics import clean_metrics
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.machine.handover import LentDirectories
from prefect_torch.ckpt.text import utc_now

from .agreement import Agreement, AsksLeader
from .background import BackgroundCommits
from .checkpoint_requests import CheckpointRequests
from .commit import RankCommits, belongs_to
from .decisions import DecisionPoints, Decisions
from .events import EventSender, ReportEvent
from .overhead import OverheadBudget
from .rank_part import stage
from .rank_report import Report, ReportArguments, ReportPreparation, check_step
from .rounds import Rounds

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """The settings of a training's checkpoints.

    Attributes:
        max_in_flight: How many commits may be under way in the background.
        target_overhead: The share of its time that the training may wait, for `should_checkpoint`; None for no target.
        checkpoint_score_attribute: The metric by which checkpoints are sorted, which must be a number; None sorts them by age.
        decisions: The reports at which the leader decides whether the training goes on; None if it always does.
        grace_s: How long the ranks have for a last checkpoint when termination is requested.
        claim: The key of the claim of the attempt, which commits as long as that is the newest; None for an evaluation.

    """

    max_in_flight: int = 1
    target_overhead: float | None = None
    checkpoint_score_attribute: str | None = None
    decisions: DecisionPoints | None = None
    grace_s: float = 20.0
    claim: str | None = None


class RankSession:
    """The reports of one rank in one attempt.

    Args:
        context: The rank's context.
        run: The run.
        key_value: The dictionary that the ranks and the leader share.
        restored: The checkpoint that this attempt begins from; None on a fresh start.
        settings: The settings of the training's checkpoints.
        is_terminating: Returns whether termination of the training is requested.
        node: The ranks of this rank's machine; None if all ranks share one.

    Attributes:
        takes_reports: Whether its function may report.
        context: The rank's context, which knows the session's requests for checkpoints.
        run: The run.
        restored: The checkpoint that this attempt begins from; None on a fresh start.
        grace_s: How long the ranks have for a last checkpoint when termination is requested.
        lent: The directories that are lent to the training function.

    """

    takes_reports = True

    def __init__(
        self,
        context: TrainContext,
        run: Run,
        key_value: KeyValue,
        restored: Checkpoint | None,
        settings: ReportSettings,
        is_terminating: Callable[[], bool],
        node: Node | None,
    ) -> None:
        self.run = run
        self.restored = restored
        self.grace_s = settings.grace_s
        self._node_copy: NodeCopy | None = None
        if restored is not None and context.local_world_size > 1:
            restored.node_copy = self._node_copy = NodeCopy(context.local_world_size)
        self._peers = peers = Peers(key_value, context.world_rank, context.world_size, node)
        self._events = EventSender(key_value)
        self._background = background = BackgroundCommits(settings.max_in_flight)
        self.lent = LentDirectories(run.storage, partial(run.layout.unreported, context.attempt))
        self._preparation = ReportPreparation(
            run, context.world_rank, context.world_size, settings.checkpoint_score_attribute, self.lent
        )
        self._rounds = Rounds(peers, context.attempt, background, is_terminating)
        self._commits = RankCommits(run, settings.claim, peers, background, self._events, context, restored)
        budget = OverheadBudget(settings.target_overhead, self._commits.costs)
        self._requests = CheckpointRequests(peers, self._rounds, budget, is_terminating)
        self.context = replace(
            context, _should_checkpoint=self._requests.should_checkpoint, _stop_requested=lambda: self._requests.stop_requested
        )
        self._decisions = None if settings.decisions is None else Decisions(peers, self._events, settings.decisions)
        self._one_report = Lock()
        self._num_reports = 0
        self._has_resumed = False
        self._last_step = -1 if restored is None else restored.step

    def report(self, given: ReportArguments) -> None:
        """Report from this rank; see `api.report`.

        Raises:
            SystemExit: If termination is requested and a checkpoint was agreed on since, on every rank; the function's
                `finally` blocks run, and background commits become durable.

        """
        with self._one_report, ExitStack() as cleanup:
            self._warn_if_begun_anew()
            if self._decisions is not None:
                self._decisions.raise_if_stopped()
            following = self._last_step + 1
            newest = max([self._commits.committed_step, *(commit.step for commit in self._background.commits)])
            try:
                report = self._preparation.prepare(given, cleanup, following=following, newest=newest)
                asks: AsksLeader = "never"
                if self._decisions is not None:
                    asks = self._decisions.asks_leader(report.step, self._num_reports + 1, report.metrics)
                among = self._rounds.next_name if self.context.world_size > 1 else None
                intent = report.intent(self.context.world_rank, self._requests.num_requests, among=among, asks_leader=asks)
            except Exception as exc:
                self._rounds.abstain(exc, self._last_step)
                raise
            try:
                agreement = self._rounds.agree(intent, meanwhile=report.stage_early)
            finally:
                report.forget_identity(among)
            if self._node_copy is not None:
                self._node_copy.release()  # every rank has restored the checkpoint by now
            staged = stage(report, agreement, self._rounds.writes, self.context.world_rank)
            try:
                self._commits.commit(staged)
                self._last_step, self._num_reports = report.step, self._num_reports + 1
                if agreement.asks_leader and not agreement.ends_training:
                    self._follow_decision(report, agreement)
            except CheckpointError:
                self._rounds.has_last_checkpoint = False  # it failed, so the next one is stored
                raise
            finally:
                if staged.owns_directory:
                    self._preparation.remember_emptied(report)
        if agreement.ends_training:
            raise SystemExit

    def get_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint that this attempt begins from, for the training function; None on a fresh start."""
        self._has_resumed = True
        return self.restored

    def _warn_if_begun_anew(self) -> None:
        """Warn, once, of a function that resumes nothing: its steps, and its trial's rungs, would be those of other weights."""
        if self._has_resumed or self.restored is None or self.context.world_rank != 0:
            return
        self._has_resumed = True
        _logger.warning(
            "the function has not called get_checkpoint(), so it trains from the beginning, though its attempt continues from "
            "%s: its steps count on from there",
            self.restored.id,
        )

    @property
    def newest_step(self) -> int:
        """The step of the newest report, or of the run's own restored checkpoint before the first; -1 if there is none."""
        return self._last_step if self._num_reports or self.continues_own_run else -1

    @property
    def continues_own_run(self) -> bool:
        """Whether the restored checkpoint is one of this run, and not the initial one of another run."""
        return self.restored is not None and belongs_to(self.run, self.restored)

    @property
    def is_cut_short(self) -> bool:
        """Whether rank 0 was notified that termination is requested, or has made a checkpoint the last one because of it."""
        return self._requests.stop_requested or self._rounds.has_last_checkpoint

    def _follow_decision(self, report: Report, agreement: Agreement) -> None:
        """Follow the leader's decision, once the report's checkpoint is durable: no decision is based on one that is not."""
        self._background.wait_and_raise()
        assert self._decisions is not None
        self._decisions.follow(report.step, self._num_reports, report.metrics, agreement.checkpoint_id)

    def _release_node_copy(self) -> None:
        if self._node_copy is not None:
            self._node_copy.release()

    def log_metrics(self, metrics: Mapping[str, object], step: SupportsIndex | None = None) -> None:
        """Record metrics without a report; see `api.log_metrics`."""
        is_recorded = self.context.world_rank == 0
        cleaned = clean_metrics(metrics, read=is_recorded)
        step = check_step(step, following=self._last_step + 1, newest=None)
        if is_recorded:
            record = MetricRecord(self.context.attempt, step, cleaned, None, utc_now(), is_logged=True)
            self._events.send(ReportEvent(record))

    def wait_for_commits(self, timeout_s: float | None = None) -> None:
        """Wait until no background commit is under way, or for `timeout_s`."""
        self._background.wait(timeout_s)

    def finish(self) -> None:
        """Wait until every background commit is durable and every rank has returned after equally many reports.

        Raises:
            CheckpointError: The failure of a background commit that no report has raised yet.
            ReportMismatchError: If ranks reported a different number of times.
            PeerGoneError: If another rank failed.

        """
        self._release_node_copy()
        self._background.wait_and_raise()
        if self._rounds.desynchronized is not None:
            raise self._rounds.desynchronized
        own = RankExit(self.context.world_rank, self._num_reports, "returned")
        self._peers.leave(own)
        exits = self._peers.wait_for_all_exits()
        self._requests.forget_answers()
        lost = [it for it in exits if not it.has_returned]
        if lost:
            raise PeerGoneError(f"{lost[0]}, so the training of rank {self.context.world_rank} has no result")
        uneven = [it for it in exits if it.reports != self._num_reports]
        if uneven:
            raise ReportMismatchError(f"{uneven[0]}, but {own}; call report() equally often on every rank")

    def fail(self, detail: str, flush_s: float, *, is_consequence: bool = False) -> None:
        """Announce to the other ranks that this one's function raised, after a last wait for background commits.

        Args:
            detail: The error in one line.
            flush_s: How long to wait for the commits.
            is_consequence: Whether another rank's failure is the cause.

        """
        self._release_node_copy()
        self.wait_for_commits(flush_s)
        self._peers.leave(RankExit(self.context.world_rank, self._num_reports, "failed", detail, is_consequence))


class EvaluationSession(RankSession):
    """A rank among others that evaluates the restored checkpoint; its function returns metrics instead of reporting them."""

    takes_reports = False

    def report(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: a report belongs to a training, and this run may have a live one.

        Raises:
            RuntimeError: Always.

        """
        raise RuntimeError(
            "report() was called inside an evaluation, which adds nothing to the run: return the metrics, as a dict, from the "
            "function instead"
        )

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """Record nothing: a framework's logger may log here as in a training."""
