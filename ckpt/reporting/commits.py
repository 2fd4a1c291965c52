"""One rank's commits, immediate or in the background: in order, each continuing the previous one."""

import time
from dataclasses import replace

from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.errors import CheckpointError
from prefect_torch.ckpt.files.folder import adopt_files
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.scratch import remove_scratch

from .background import BackgroundCommits
from .commit import CommitJob, commit
from .events import CommitEvent, EventSender
from .overhead import OverheadBudget
from .peers import Peers


class RankCommits:
    """The commits of one rank in one attempt.

    Args:
        run: The run.
        peers: The ranks.
        events: The sender that reports commits to the leader.
        pace: The overhead budget that measures them.
        max_in_flight: How many may be under way in the background.
        restored: The checkpoint that the attempt begins from, which the first commit continues.

    Attributes:
        newest_step: The step of the newest checkpoint that is committed, or about to be; -1 before the first.

    """

    def __init__(
        self,
        run: Run,
        peers: Peers,
        events: EventSender,
        pace: OverheadBudget,
        max_in_flight: int,
        restored: Checkpoint | None,
    ) -> None:
        self._run = run
        self._peers = peers
        self._events = events
        self._pace = pace
        self._max_in_flight = max_in_flight
        self._background = BackgroundCommits()
        self._decided: list[str] = []  # on rank 0, the topics of the previous commit
        self._parent = None if restored is None else _name_from(run, restored)
        self.newest_step = self._committed_step = -1 if restored is None else restored.step

    def wait_for_slot(self, *, for_another: bool) -> None:
        """Wait until one more commit may run beside those under way, or, if not `for_another`, until none is under way."""
        self._background.wait(leave=self._max_in_flight - 1 if for_another else 0)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no commit is under way, or for `timeout_s`."""
        self._background.wait(timeout_s=timeout_s)

    def commit(self, job: CommitJob) -> None:
        """Commit the checkpoint of `job`; it is durable when this returns."""
        self._pace.begin()
        self._commit(job)
        self.newest_step = job.agreement.step

    def commit_in_background(self, job: CommitJob) -> None:
        """Begin to commit `job`, whose files are adopted when this returns; `take_failure` returns a failure."""
        self._pace.begin()
        self.newest_step = job.agreement.step
        job = replace(job, stall_s=time.monotonic() - job.started_s)
        staged = job.brought
        if staged.directory is not None:
            try:
                staged = replace(staged, directory=adopt_files(staged.directory, staged.files))
            except OSError as exc:  # the other ranks already wait for this one's part: they must receive it
                staged = replace(staged, directory=None, problem=exc)

        def work() -> None:
            try:
                self._commit(replace(job, brought=staged))
            finally:
                if staged.directory is not None:
                    remove_scratch(staged.directory)

        self._background.submit(job.agreement.step, work)

    def take_failure(self) -> CheckpointError | None:
        """Return the error of a background commit that ended, once; its step may be reported again."""
        failure = self._background.take_failure()
        if failure is not None:
            self._forget_failed_step()
        return failure

    def forget_failure(self) -> None:
        """Forget a background failure that another rank has already reported."""
        self._background.wait_for_failure()
        self._forget_failed_step()

    def _commit(self, job: CommitJob) -> None:
        started_s = time.monotonic()
        stall_s: float | None = None
        try:
            manifest = commit(self._run, self._peers, replace(job, parent=self._parent))
            stall_s = None if manifest is None else manifest.timings["stall_s"]
        finally:
            self._pace.end(stall_s)
            self._forget_decisions(job.decided)
        self._parent, self._committed_step = job.checkpoint_id, job.agreement.step
        if manifest is not None:
            costs = (manifest.total_bytes, time.monotonic() - started_s, manifest.timings["stall_s"])
            self._events.send(CommitEvent(manifest.id, manifest.step, manifest.metrics, *costs))

    def _forget_decisions(self, decided: list[str]) -> None:
        """As rank 0, drop the decisions on the previous commit: every rank has read them, since all have reached this one."""
        if decided:
            for topic in self._decided:
                self._peers.forget(topic)
            self._decided = decided

    def _forget_failed_step(self) -> None:
        self.newest_step = max(self._committed_step, self._background.newest_step)


def _name_from(run: Run, checkpoint: Checkpoint) -> str | None:
    """Return the checkpoint's id, or its path where it belongs to another run."""
    own = checkpoint.store is not None and checkpoint.store.path == run.path
    return checkpoint.id if own else checkpoint.path
