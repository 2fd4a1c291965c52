"""One rank's session of a training: each of its reports, from the ranks' agreement to the manifest."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, SupportsIndex

from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.context import TrainContext
from prefect_torch.ckpt.errors import CheckpointError, PeerGoneError, ReportMismatchError
from prefect_torch.ckpt.files.folder import check_apart, scan_files
from prefect_torch.ckpt.runs.history import MetricRecord
from prefect_torch.ckpt.runs.layout import lies_in_checkpoint
from prefect_torch.ckpt.runs.metrics import Metrics, check_score, clean_metrics
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.scratch import scratch_folder
from prefect_torch.ckpt.text import utc_now

from .agreement import Agreement, Intent, agree
from .arguments import Upload, check_progress, check_step, check_upload
from .checkpoint_requests import CheckpointRequests
from .commit import CommitJob, RankPart
from .commits import RankCommits
from .events import EventSender, ReportEvent
from .key_value import KeyValue
from .overhead import OverheadBudget
from .peers import Peers, RankExit
from .remote_error import RemoteError

if TYPE_CHECKING:
    from prefect_torch.ckpt.state.save import StateSnapshot

    from .state_reports import StateReports


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """The settings of a training's checkpoints.

    Attributes:
        max_in_flight: How many commits may be under way in the background.
        target_overhead: The share of its time that the training may wait, for `should_checkpoint`; None for no target.
        checkpoint_score_attribute: The metric by which checkpoints are sorted, which must be a number; None sorts them by age.

    """

    max_in_flight: int = 1
    target_overhead: float | None = None
    checkpoint_score_attribute: str | None = None


_logger = logging.getLogger(__name__)


class RankSession:
    """The reports of one rank in one attempt.

    Args:
        context: The rank's context.
        run: The run.
        key_value: The dictionary that the ranks and the leader share.
        restored: The checkpoint that this attempt begins from.
        settings: The settings of the training's checkpoints.
        ends_soon: Returns whether termination of the training is requested.

    """

    def __init__(
        self,
        context: TrainContext,
        run: Run,
        key_value: KeyValue,
        restored: Checkpoint | None = None,
        settings: ReportSettings = ReportSettings(),
        ends_soon: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.run = run
        self.restored = restored
        self._peers = Peers(key_value, context.world_rank, context.world_size)
        self._events = EventSender(key_value)
        self._reports = 0
        self._rounds = 0
        self._last_step = -1 if restored is None else restored.step
        self._one_report = threading.Lock()
        self._score_attribute = settings.checkpoint_score_attribute
        pace = OverheadBudget(settings.target_overhead)
        self._commits = RankCommits(run, self._peers, self._events, pace, settings.max_in_flight, restored)
        self._requests = CheckpointRequests(self._peers, pace, ends_soon)
        self.context = replace(
            context, _should_checkpoint=self._requests.should_checkpoint, _stop_requested=lambda: self._requests.stop_requested
        )
        self._desynchronized: CheckpointError | None = None
        self._state_reports: StateReports | None = None

    def report(
        self,
        metrics: Mapping[str, object],
        checkpoint: Checkpoint | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        step: SupportsIndex | None = None,
        progress: float | None = None,
        upload: Upload | None = None,
    ) -> None:
        """Report from this rank; see `reporting.report`."""
        started_s = time.monotonic()
        with self._one_report, ExitStack() as cleanup:
            try:
                cleaned = clean_metrics(metrics)
                check_score(cleaned, self._score_attribute)
                check_progress(progress)
                upload = check_upload(upload, checkpoint, state)
                newest = None if upload is None else self._commits.newest_step
                step = check_step(step, following=self._last_step + 1, newest=newest)
                if step == newest:  # the same on every rank, as `newest_step` is
                    self._keep_stored(step, upload)
                    checkpoint = state = upload = None
                brought = self._bring(checkpoint, cleanup)
                snapshot = None if state is None else self._states().capture(_without_files_of_ours(state, brought))
            except Exception as exc:
                self._abstain(exc)
                raise
            told = None if snapshot is None else self._states().describe(snapshot)
            asked = self._requests.asked
            intent = Intent(self.context.world_rank, step, upload, list(brought.files), brought.metadata, told, asked=asked)
            if upload is not None:
                # A state's buffers are reused, and a sync commit comes after the earlier ones.
                self._commits.wait_for_slot(for_another=upload == "async" and state is None)
            agreement = self._agree(intent, snapshot)
            if agreement.refusal is not None:
                raise agreement.refusal.error()
            self._act(agreement, self._finalize(agreement, brought, snapshot), cleaned, progress, started_s)

    def log_metrics(self, metrics: Mapping[str, object], step: SupportsIndex | None = None) -> None:
        """Record metrics without a report; see `reporting.log_metrics`."""
        is_recorded = self.context.world_rank == 0
        cleaned = clean_metrics(metrics, read=is_recorded)
        step = check_step(step, following=self._last_step + 1, newest=None)
        if is_recorded:
            record = MetricRecord(self.context.attempt, step, cleaned, None, utc_now(), is_logged=True)
            self._events.send(ReportEvent(record))

    def finish(self) -> None:
        """Wait until every background commit is durable and every rank has returned after equally many reports.

        Raises:
            CheckpointError: The failure of a background commit that no report has raised yet.
            ReportMismatchError: If ranks reported a different number of times.
            PeerGoneError: If another rank failed.

        """
        self._commits.wait()
        failure = self._commits.take_failure() or self._desynchronized
        if failure is not None:
            raise failure
        self._peers.end(RankExit(self.context.world_rank, self._reports, "returned"))
        ends = self._peers.wait_for_all_exits()
        gone = [end for end in ends if end.ending != "returned"]
        if gone:
            raise PeerGoneError(f"{gone[0]}, so the training of rank {self.context.world_rank} has no result")
        uneven = [end for end in ends if end.reports != self._reports]
        if uneven:
            raise ReportMismatchError(
                f"{uneven[0]}, but rank {self.context.world_rank} returned after {self._reports} reports; "
                "call report() equally often on every rank"
            )

    def fail(self, detail: str, flush_s: float) -> None:
        """Announce to the other ranks that this one's function raised, after a last wait for background commits.

        Args:
            detail: The error in one line.
            flush_s: How long to wait for the commits.

        """
        self._commits.wait(timeout_s=flush_s)
        self._peers.end(RankExit(self.context.world_rank, self._reports, "failed", detail))

    def _keep_stored(self, step: int, upload: Upload | None) -> None:
        """Warn that the checkpoint of `step` stays, and return once it is as durable as `upload` requires."""
        _logger.warning(
            "rank %d reports step %d, whose checkpoint is stored already: the metrics are recorded, and that checkpoint stays; "
            "give a higher step to store another",
            *(self.context.world_rank, step),
        )
        if upload == "sync":
            self._commits.wait()

    def _bring(self, checkpoint: Checkpoint | None, cleanup: ExitStack) -> RankPart:
        if checkpoint is None:
            return RankPart()
        if not isinstance(checkpoint, Checkpoint):
            raise ValueError(f"checkpoint={checkpoint!r}: give Checkpoint.from_directory(folder)")  # noqa: TRY004 - one error
        directory = checkpoint.directory
        if directory is not None:
            check_apart(directory, self.run.storage.local_path(self.run.name))
        if directory is None or lies_in_checkpoint(directory.resolve()):
            # A committed checkpoint is never changed: only a copy of it is moved or stored again.
            directory = cleanup.enter_context(scratch_folder())
            checkpoint.to_directory(directory)
        return RankPart(directory, tuple(scan_files(directory)), checkpoint.get_metadata())

    def _states(self) -> "StateReports":
        if self._state_reports is None:
            from .state_reports import StateReports  # noqa: PLC0415 - torch, for states only

            self._state_reports = StateReports(self._peers)
        return self._state_reports

    def _finalize(self, agreement: Agreement, brought: RankPart, snapshot: "StateSnapshot | None") -> RankPart:
        """Return `brought` with the state staged; the training may change the state when this returns."""
        if agreement.state is None:
            return brought
        decision = self._states().apply(agreement.state, self._topic())
        if snapshot is None:
            return brought
        try:
            return replace(brought, state=self._states().finalize(snapshot, decision))
        except Exception as exc:  # noqa: BLE001 - the other ranks already wait for this one's part: they must receive it
            return replace(brought, problem=exc)

    def _abstain(self, error: Exception) -> None:
        """Take part in the round without a report, or this rank's next one would be paired with this one of the others."""
        intent = Intent(self.context.world_rank, self._last_step, error=f"{type(error).__name__}: {error}")
        try:
            agreement = self._agree(intent)
        except CheckpointError:  # the ranks are desynchronized, which `finish` raises; `error` comes first
            return
        if agreement.refusal is not None and agreement.is_background_failure:
            raise agreement.refusal.error() from error

    def _topic(self) -> str:
        return f"report {self._rounds - 1}"

    def _agree(self, intent: Intent, snapshot: "StateSnapshot | None" = None) -> Agreement:
        """Return rank 0's decision on this round; every rank takes part in all rounds, whatever it reports."""
        previous = self._topic()
        self._rounds += 1
        self._requests.begin_report()
        try:
            agreement = self._decide(self._topic(), intent, snapshot)
        except CheckpointError as exc:
            self._desynchronized = exc
            raise
        self._peers.forget(previous)  # all ranks are in this round, so all have read the previous one
        self._requests.end_report()
        if agreement.is_background_failure and self.context.world_rank != 0:
            self._commits.forget_failure()  # raised now, so not again later
        return agreement

    def _decide(self, topic: str, intent: Intent, snapshot: "StateSnapshot | None") -> Agreement:
        def stage() -> None:
            if snapshot is not None:
                self._states().stage_early(snapshot)

        told = self._peers.exchange(topic, intent.encode(), stage)
        if told is None:
            stage()  # while rank 0 decides
            return Agreement.decode(self._peers.decision(topic))
        intents = [Intent.decode(data) for data in told]
        agreement = agree(intents, self.context.attempt)
        failure = self._commits.take_failure()
        if failure is not None:
            agreement = replace(agreement, refusal=RemoteError.of(failure), is_background_failure=True)
        agreement = self._decide_state(agreement, intents, topic)
        self._peers.decide(topic, agreement.encode())
        return agreement

    def _decide_state(self, agreement: Agreement, intents: list[Intent], topic: str) -> Agreement:
        if all(intent.state is None for intent in intents):
            return agreement
        told = [intent.state for intent in intents]
        try:
            return replace(agreement, state=self._states().decide(told, topic, refused=agreement.refusal is not None))
        except ReportMismatchError as exc:
            return replace(agreement, refusal=RemoteError.of(exc))

    def _act(self, agreement: Agreement, brought: RankPart, metrics: Metrics, progress: float | None, started_s: float) -> None:
        job = CommitJob(self._topic(), agreement, brought, metrics, started_s)
        if agreement.checkpoint_id is not None and agreement.upload == "sync":
            self._commits.commit(job)
        self._last_step = agreement.step
        self._reports += 1
        if self.context.world_rank == 0:
            record = MetricRecord(self.context.attempt, agreement.step, metrics, agreement.checkpoint_id, utc_now())
            self._events.send(ReportEvent(record, progress))
        if agreement.checkpoint_id is not None and agreement.upload != "sync":  # last: from here on two threads want one GIL
            self._commits.commit_in_background(job)


def _without_files_of_ours(state: Mapping[str, Any], brought: RankPart) -> Mapping[str, Any]:
    from prefect_torch.ckpt.state.index import is_own_file  # noqa: PLC0415 - for states only

    for path in filter(is_own_file, brought.files):
        raise ValueError(f"the folder reported beside a state holds {path!r}, as which the state is stored: rename that file")
    return state
