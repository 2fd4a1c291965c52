"""The observer that shows a training in Prefect's UI, as artifacts of its flow run that are kept up to date."""

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect_torch.ckpt.errors import StorageError
from prefect_torch.ckpt.runs.attempts.attempt import Attempt
from prefect_torch.ckpt.text import show_count
from prefect_torch.flows.monitoring.text import flow_run_page, plain_text, show_time
from prefect_torch.tasks.prefect_api.client import LazyClient
from prefect_torch.tasks.prefect_api.flow_run import has_run_before
from prefect_torch.tasks.prefect_api.settings import without_retries
from prefect_torch.tasks.training.backoff import Backoff
from prefect_torch.tasks.training.job import TrainJob
from prefect_torch.tasks.training.observers import TrainingEvent

from .attempt_log import AttemptLog
from .left_pages import end_left_pages
from .live_artifact import LiveArtifact, artifact_key
from .machine import GpuMonitor
from .run_view import MAX_LINKED_ATTEMPTS, RunView
from .setup import Setup
from .stored_checkpoints import MAX_ROWS, checkpoint_rows
from .summary import SummaryContext, write_summary

_REQUEST_S = 15.0


class PageObserver:
    """Publishes progress, checkpoints and summary of a run as artifacts of its flow run, with a backoff; the last is exact.

    The artifacts' keys are `<run>-<digest>-progress`, `…-checkpoints` and `…-summary`, with a digest of the run's location, so
    that in the UI a key's page lists the flow runs of one run. A flow run creates each of them once and updates it:
    at most 4 requests at a time, 16 times in the first 100 s, and twice a minute in the long run. One that has run before first
    looks for the artifacts that it has, by 3 requests, and one that continues a killed flow run's training says so on the pages
    of that. The progress artifact exists only if the training reports its progress (`report(..., progress=)`).

    Args:
        job: The training.
        setup: What the flow run was started with.
        gpus: Samples the GPUs of the ranks.
        backoff: Bounds how often pages are published.

    """

    def __init__(self, job: TrainJob, setup: Setup, gpus: GpuMonitor, backoff: Backoff | None = None) -> None:
        self._store = job.store
        self._policy = job.policy
        self._setup = setup
        self._gpus = gpus
        self._view = RunView(self._store, job.policy)
        self._backoff = backoff or Backoff()
        self._client = LazyClient(_REQUEST_S)  # one for all pages
        key = artifact_key(job.run, self._store.path)
        is_rerun = has_run_before()  # else an old page, "suspended" or "failed", would stay beside the new one
        self._progress = LiveArtifact(f"{key}-progress", "progress", may_exist=is_rerun)
        self._checkpoints = LiveArtifact(f"{key}-checkpoints", "table", may_exist=is_rerun)
        self._summary = LiveArtifact(f"{key}-summary", "markdown", may_exist=is_rerun)
        self._are_left_ended = False

    def observe(self, event: TrainingEvent) -> None:
        """Record `event`; the first time, read the run's past from its storage."""
        self._view.record(event, time.time())

    def refresh(self, *, final: bool) -> float | None:
        """Publish what has changed if that is due or `final`; otherwise return the seconds until it is due."""
        newest = self._view.newest
        if newest is None:  # no attempt has started
            return None
        if not final and (wait_s := self._backoff.wait_s()) > 0:
            return wait_s
        self._backoff.record()
        problem = self._read_checkpoints() if final else None
        self._gpus.sample()
        # If the API is away, the next publication tries again; retries here would delay the other observers.
        with nullcontext() if final else without_retries():
            self._publish(self._client.open(), newest, problem)
        if final:
            self._client.close()
        return None

    def _read_checkpoints(self) -> str | None:
        """Read the final checkpoints from storage, which others may have pruned or pinned; return a note if that fails."""
        try:
            self._view.read_checkpoints()
        except (StorageError, OSError) as exc:
            return f"from the training's reports, because the storage could not be read at the end: {exc}"
        return None

    def _publish(self, client: SyncPrefectClient, newest: AttemptLog, problem: str | None) -> None:
        flow_run_id = None if newest.attempt.owner.flow_run_id is None else UUID(newest.attempt.owner.flow_run_id)
        now_s = time.time()
        self._publish_summary(client, flow_run_id, now_s)
        self._publish_checkpoints(client, flow_run_id, now_s, problem)
        if self._view.progress is not None:
            about = f"Run {plain_text(self._store.run)}, attempt {newest.number}"
            self._progress.show(client, flow_run_id, round(100 * self._view.progress, 1), about)
        if not self._are_left_ended:
            self._end_left_pages(client, newest.attempt)
            self._are_left_ended = True

    def _end_left_pages(self, client: SyncPrefectClient, attempt: Attempt) -> None:
        own_id, found = attempt.owner.flow_run_id, [it.owner.flow_run_id for it in self._view.lost_before]
        left = [UUID(it) for it in found if it is not None and it != own_id and flow_run_page(it) is not None]
        if left:
            page = flow_run_page(own_id)
            another = "another flow run" if page is None else f"[another flow run]({page})"
            goes_on = "has begun the training anew" if attempt.lineage == attempt.number else "continues the training"
            why = f"Its process was killed or overtaken; {another} {goes_on}."
            end_left_pages(client, left[-MAX_LINKED_ATTEMPTS:], why)

    def _publish_summary(self, client: SyncPrefectClient, flow_run_id: UUID | None, now_s: float) -> None:
        logs = self._view.logs
        context = SummaryContext(
            path=self._store.path,
            first_metric=self._policy.checkpoint_score_attribute,
            order=self._policy.checkpoint_score_order,
            flow_runs={log.number: page for log in logs if (page := flow_run_page(log.attempt.owner.flow_run_id))},
            ranks={log.number: log.ranks for log in logs if log.ranks},
            setup=replace(self._setup, gpus=self._gpus.uses),
        )
        page = write_summary(self._store.run, self._view, context, now_s)
        self._summary.show(client, flow_run_id, page, f"Run {plain_text(self._store.run)}: metrics, time, attempts")

    def _publish_checkpoints(
        self, client: SyncPrefectClient, flow_run_id: UUID | None, now_s: float, problem: str | None
    ) -> None:
        checkpoints = self._view.checkpoints
        rows = checkpoint_rows(checkpoints.held, self._view.kept(), self._policy.checkpoint_score_attribute, now_s)
        if not rows and not self._checkpoints.is_shown:
            return
        parts = [
            f"{show_count(checkpoints.num, 'checkpoint')} of run {plain_text(self._store.run)} in `{self._store.path}`",
            *([f"{MAX_ROWS} of them shown"] if checkpoints.num > MAX_ROWS else []),
            f"ages as of {show_time(now_s)} UTC",
            *([] if problem is None else [problem]),
        ]
        lasting = [{name: cell for name, cell in row.items() if name != "age"} for row in rows]
        self._checkpoints.show(client, flow_run_id, json.dumps(rows), "; ".join(parts), news=[lasting, problem])
