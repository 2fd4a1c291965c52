"""The Prefect task that leads one attempt of a training; Prefect's own retries start the next one."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.transactions import CommitMode, transaction
from prefect_torch.ckpt import FencedError
from prefect_torch.ckpt.reporting.decisions import Verdict, answer
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue
from prefect_torch.ckpt.reporting.session import ReportSettings
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Ending, Outcome, record_world_size
from prefect_torch.ckpt.runs.attempts.claims import check_fence
from prefect_torch.ckpt.runs.log_files import LogFiles
from prefect_torch.ckpt.runs.manifest import step_of
from prefect_torch.ckpt.storage.retry import ended_by
from prefect_torch.tasks.gang.gang import Gang
from prefect_torch.tasks.gang.gang_run import GangRun
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.machine.lending import Lease, Machines
from prefect_torch.tasks.gang.machine.regrowth import Regrowth
from prefect_torch.tasks.gang.rank_logs import rank_logs
from prefect_torch.tasks.gang.returned import held
from prefect_torch.tasks.gang.starting import first_rank, num_ranks_here, start_gang
from prefect_torch.tasks.gang.termination import Termination
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.errors import RankFailedError, show_traceback
from prefect_torch.tasks.rank.failures import CONSEQUENCES, is_of_gpu
from prefect_torch.tasks.rank.one_line_messages import shorten_message
from prefect_torch.tasks.rank.rendezvous import Address, TcpKeyValue
from prefect_torch.tasks.rank.spec import RankSpec
from prefect_torch.tasks.run_logs import get_run_logger, library_logs_in_run

from .job import TrainJob
from .observers import AttemptEnded, AttemptStarted, Observers, RanksStarted
from .outcomes import outcome_of_failure, outcome_of_termination, record_outcome, recorded_value
from .recorder import RunRecorder
from .restarts import Restarts
from .start import Start, choose_start, claim

_FLUSH_S = 30.0


@task(name="train_workers", task_run_name="train-{job.run}", cache_policy=NO_CACHE, persist_result=False)
def train_workers(
    job: TrainJob,
    observers: Observers,
    termination: Termination,
    restarts: Restarts,
    gpus: GpuAllocation | None = None,
    machines: Machines | None = None,
) -> Any:
    """Run one attempt, and the attempts that continue it with more ranks, and return rank 0's return value.

    The attempt begins after the delay of its restart, if it is one.
    A failed attempt is recorded in the run's storage before its error is raised. No rank's process outlives this call, however
    it ends. When termination is requested, the ranks have the grace for a last checkpoint, and `termination.outcome` is set.
    A value that Prefect would take for the end of the task run, such as an exception, is the attribute `value` of the result.

    Args:
        job: The training.
        observers: They are notified of every event of the attempt.
        termination: Whether the flow run is being terminated.
        restarts: The failures of this flow run, and their budgets.
        gpus: The GPUs of the ranks, which stay taken between the attempts of a flow run; None if they use none of this machine.
        machines: The machines of the ranks, leased for each attempt; None for this machine.

    Raises:
        Exception: The exception of the failing rank's function, raised from the RankFailedError that has its traceback.
        RankFailedError: If a rank died, or its exception cannot be rebuilt here.
        CheckpointError: If the attempt could not begin.
        GpusBusyError: If others use the GPUs that the ranks need, longer than the job waits for them.

    """
    gpus = gpus or GpuAllocation(0, None, job.run)

    def lead() -> Any:
        with library_logs_in_run():
            termination.sleep(restarts.delay_s)  # Prefect's own delay is a sleep that only a signal to its thread ends
            while True:
                leader = _Leader(job, observers, termination, restarts, gpus, machines)
                value = leader.lead()
                if not leader.regrows:
                    return held(value)

    return termination.outlast(lead)


class _Leader:
    """Leads one attempt, in a thread that no signal interrupts.

    Attributes:
        regrows: Whether the attempt has ended for another one with more ranks.

    """

    def __init__(
        self,
        job: TrainJob,
        observers: Observers,
        termination: Termination,
        restarts: Restarts,
        gpus: GpuAllocation,
        machines: Machines | None,
    ) -> None:
        self._job = job
        self._machines = machines
        self._gpus = gpus
        self._restarts = restarts
        self._observers = observers
        self._termination = termination
        self._store = job.store
        self._recorder: RunRecorder | None = None
        self._is_stopped = False
        self.regrows = False

    def lead(self) -> Any:
        self._termination.raise_if_requested()
        claimed = claim(self._store, self._job, self._restarts, self._termination.raise_if_requested)
        try:
            self._termination.raise_if_requested()  # who waits may have given up, and releases no GPUs any more
            self._gpus.take(self._termination.raise_if_requested)
            with self._lend() as lease:
                check_fence(self._store, claimed.number)  # it may have waited for hours, and another flow run trains by now
                if self._job.working_dir is not None:
                    self._job.working_dir.store(self._store)
                num_ranks = num_ranks_here(self._job.scaling, self._gpus) if lease is None else sum(lease.num_ranks)
                if num_ranks < (most := self._job.scaling.most_workers):
                    get_run_logger().info("attempt %d has %d of at most %d ranks", claimed.number, num_ranks, most)
                claimed = record_world_size(self._store, claimed, num_ranks)
                value = self._train(claimed, lease)
        except Exception as exc:
            if self._termination.is_requested:
                self._record_termination(claimed, exc)
                raise
            if self._is_stopped:  # what it has trained is committed, and another attempt would train past that
                get_run_logger().warning("stopped after a report, and failed on the way out, which changes nothing: %s", exc)
                self._record(self._outcome(claimed, None))
                return None
            if isinstance(exc, RankFailedError) and exc.rank is not None and is_of_gpu(exc.original):
                self._gpus.leave_out(exc.rank)
            self._judge(exc)
            self._record(outcome_of_failure(claimed, exc))
            if not isinstance(exc, RankFailedError):
                raise
            is_fenced = isinstance(exc.original, FencedError)  # then the run may be further, or gone
            safe_work = "" if is_fenced else self._safe_work()
            get_run_logger().error("%s", f"{_with_traceback(exc)}{safe_work}".rstrip("; \n"))
            if exc.original is not None:
                raise shorten_message(exc.original) from exc
            raise
        self._record(self._outcome(claimed, value))
        return value

    def _judge(self, failure: Exception) -> None:
        """Count a rank that was ended by SIGTERM as lost if the attempt has committed nothing: it may recur forever."""
        if self._recorder is not None and self._recorder.has_committed:
            return
        if isinstance(failure, RankFailedError) and failure.kind == "preemption" and failure.rank is not None:
            failure.kind = "infrastructure"

    def _outcome(self, claimed: Attempt, value: Any) -> Outcome:
        flow_run_id = claimed.owner.flow_run_id
        if self.regrows:
            message = f"it goes on with more ranks; {self._safe_work()}"
            return Outcome(claimed.number, "preempted", flow_run_id, error=message)  # of no kind: it costs no budget
        ending: Ending = "stopped" if self._is_stopped else "completed"
        return Outcome(claimed.number, ending, flow_run_id, return_value=recorded_value(value))

    def _lend(self) -> AbstractContextManager[Lease | None]:
        return nullcontext() if self._machines is None else self._machines.lend(self._termination.raise_if_requested)

    def _train(self, claimed: Attempt, lease: Lease | None) -> Any:
        with ended_by(self._termination.raise_if_requested):  # it may read for minutes
            start = choose_start(self._store, self._job, claimed, self._observers)
        self._observers.notify(AttemptStarted(claimed, start.path))
        try:
            # Without this transaction, Prefect marks the task runs of ranks and prunes as rolled back once this one fails.
            with transaction(commit_mode=CommitMode.EAGER), self._look_for_more(lease) as regrowth:
                return self._run_ranks(claimed, start, lease, regrowth)
        finally:
            start.node_copy.release()

    def _look_for_more(self, lease: Lease | None) -> AbstractContextManager[Regrowth | None]:
        return nullcontext() if self._machines is None or lease is None else self._machines.look_for_more(lease)

    def _run_ranks(self, claimed: Attempt, start: Start, lease: Lease | None, regrowth: Regrowth | None) -> Any:
        config, files = self._job.run_config, LogFiles(self._store, self._store.layout.logs(claimed.number))
        with rank_logs(config.log_ranks, config.log_level, files) as logs:  # left last: it waits until the lines are stored
            first_rank_at = partial(_first_rank, self._job, claimed.number, start.restored, self._gpus)
            start_ranks = partial(start_gang, first_rank_at, self._job.failure.hang_timeout_s, self._termination, lease, logs)
            return self._record_ranks(claimed, start, start_ranks, regrowth)

    def _record_ranks(
        self,
        claimed: Attempt,
        start: Start,
        start_ranks: Callable[[], tuple[Gang, TcpKeyValue]],
        regrowth: Regrowth | None,
    ) -> Any:
        recorder = self._recorder = RunRecorder(self._store, self._job, claimed.number, start.own, self._observers)
        recorder.on_first_report = start.node_copy.release  # every rank has restored the checkpoint by then
        recorder.on_first_commit = None if start.source_pin is None else start.source_pin.remove
        may_go_on = True
        try:
            value = self._run_gang(claimed.number, start, recorder, start_ranks, regrowth)
        except Exception as exc:
            if self._termination.is_requested:  # first: it may be killed before the prune, the logs and the lease have ended
                self._record_termination(claimed, exc)
            raise
        else:
            may_go_on = self.regrows
            return value
        finally:
            recorder.prune(may_go_on=may_go_on)

    def _run_gang(
        self,
        attempt: int,
        start: Start,
        recorder: RunRecorder,
        start_ranks: Callable[[], tuple[Gang, TcpKeyValue]],
        regrowth: Regrowth | None,
    ) -> Any:
        termination = self._termination
        key_value: TcpKeyValue | None = None
        try:
            termination.raise_if_requested()
            gang, key_value = start_ranks()
            try:
                self._observers.notify(RanksStarted(attempt, gang.task_runs))
                recorder.on_request = partial(self._decide, key_value)
                gang_run = GangRun(gang, key_value, recorder, termination, regrowth)
                value = gang_run.run()
                self.regrows = gang_run.is_cut_short and not self._is_stopped
                if regrowth is not None:
                    regrowth.is_used = self.regrows
                if start.source_pin is not None and not self.regrows:  # it is complete, with or without a checkpoint
                    start.source_pin.remove()
                return value
            finally:
                gang.stop("stopped: the training is terminated" if termination.is_requested else "the attempt is over")
        finally:
            if termination.is_requested:
                termination.end_retries()
            recorder.close()
            if key_value is not None:
                key_value.close()

    def _decide(self, key_value: KeyValue, request: DecisionRequest) -> None:
        """Send the ranks the decision on their request; without one, they stop, since they must not wait for it forever."""
        assert self._job.decisions is not None
        verdict = Verdict(goes_on=False)
        try:
            verdict = self._job.decisions.decide(request)
        finally:
            self._is_stopped = not verdict.goes_on
            answer(key_value, request.number, verdict)

    def _warn_of_failure(self, failure: Exception) -> None:
        """Warn of a rank that failed by itself while it was to end: that costs no budget, and may occur at each termination."""
        if isinstance(failure, RankFailedError) and failure.kind not in ("preemption", *CONSEQUENCES):
            get_run_logger().warning("%s", show_traceback(failure) or failure)

    def _record_termination(self, claimed: Attempt, failure: Exception) -> None:
        """Record the outcome of an attempt whose termination is requested, unless that is done."""
        if self._termination.outcome is not None:
            return
        self._warn_of_failure(failure)
        outcome = outcome_of_termination(claimed, self._termination, self._job.failure.grace_s, self._safe_work())
        self._termination.outcome = outcome
        get_run_logger().warning("attempt %d: %s", claimed.number, outcome.error)
        self._record(outcome)

    def _record(self, outcome: Outcome) -> None:
        record_outcome(self._store, outcome)
        self._observers.notify(AttemptEnded(outcome))

    def _safe_work(self) -> str:
        """Return up to which step work is safe, as far as this process knows: the storage may be unavailable."""
        if self._recorder is None:
            return "no rank was started"
        newest = self._recorder.newest
        if newest is None:
            return "nothing was committed yet"
        run = self._store.run
        return f"work is safe up to step {step_of(newest)} ({newest}), where the next training named {run!r} continues"


def _with_traceback(error: RankFailedError) -> str:
    """Return which rank failed, and why, to precede `_safe_work`: its traceback, which ends with the message, or that alone."""
    shown = show_traceback(error)
    return f"{shown}\n" if shown else f"{error}; "


def _first_rank(
    job: TrainJob, attempt: int, restored: CheckpointRef | None, gpus: GpuAllocation, rendezvous: Address
) -> RankSpec:
    checkpoint = job.checkpoint
    return replace(
        first_rank(job, gpus, rendezvous, storage=job.storage, run=job.run, attempt=attempt, restored=restored),
        records_collectives=job.scaling.use_gpu and job.failure.hang_timeout_s is not None,
        reports=ReportSettings(
            checkpoint.max_in_flight,
            checkpoint.target_overhead,
            checkpoint.checkpoint_score_attribute,
            None if job.decisions is None else job.decisions.points(),
            job.failure.grace_s,
        ),
        flush_s=_FLUSH_S,
        ranks_at_once=job.ranks_at_once,
    )
