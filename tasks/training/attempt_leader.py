"""Leads one attempt of a training: its claim, its machines, its ranks, and its outcome."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from prefect.transactions import CommitMode, transaction
from prefect_torch.ckpt import FencedError
from prefect_torch.ckpt.reporting.decisions import Verdict, send_verdict
from prefect_torch.ckpt.reporting.events import DecisionRequest
from prefect_torch.ckpt.reporting.exchange.key_value import KeyValue
from prefect_torch.ckpt.reporting.session import ReportSettings
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome, claim_key, record_world_size
from prefect_torch.ckpt.runs.attempts.claims import check_fence
from prefect_torch.ckpt.runs.log_files import LogFiles
from prefect_torch.ckpt.storage.retry import ended_by
from prefect_torch.tasks.gang.gang import Gang
from prefect_torch.tasks.gang.gang_run import GangRun
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.machine.lending import Lease, Machines
from prefect_torch.tasks.gang.machine.regrowth import Regrowth
from prefect_torch.tasks.gang.rank_logs import rank_logs
from prefect_torch.tasks.gang.starting import first_rank, num_ranks_here, start_gang
from prefect_torch.tasks.gang.termination import Termination
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.failures import is_of_gpu
from prefect_torch.tasks.rank.one_line_messages import shorten_message
from prefect_torch.tasks.rank.rendezvous import Address, TcpKeyValue
from prefect_torch.tasks.rank.spec import RankSpec
from prefect_torch.tasks.run_logs import get_run_logger

from .job import TrainJob
from .observers import AttemptEnded, AttemptStarted, Observers, RanksStarted
from .outcomes import (
    count_as_lost,
    log_failure,
    outcome_of_end,
    outcome_of_failure,
    outcome_of_regrowth,
    outcome_of_termination,
    record_outcome,
    safe_work,
    warn_of_failure_at_termination,
)
from .recorder import RunRecorder
from .restarts import Restarts
from .start import Start, choose_start, claim

_FLUSH_S = 30.0
_StartRanks: TypeAlias = Callable[[], tuple[Gang, TcpKeyValue]]


class AttemptLeader:
    """Leads one attempt, in a thread that no signal interrupts.

    Args:
        job: The training.
        observers: They are notified of every event of the attempt.
        termination: Whether the flow run is being terminated.
        restarts: The failures of this flow run, and their budgets.
        gpus: The GPUs of the ranks.
        machines: The machines of the ranks, leased for the attempt; None for this machine.

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
        """Return what rank 0 returns, None if the training was stopped after a report; see the errors of `train_workers`."""
        self._termination.raise_if_requested()
        claimed = claim(self._store, self._job, self._restarts, self._termination.raise_if_requested)
        try:
            value = self._train_on_machines(claimed)
        except Exception as exc:
            if self._termination.is_requested:
                self._record_termination(claimed, exc)
                raise
            if not self._is_stopped:
                self._record_failure(claimed, exc)
                if isinstance(exc, RankFailedError) and exc.original is not None:
                    raise shorten_message(exc.original) from exc
                raise
            # What it has trained is committed, and another attempt would train past that.
            get_run_logger().warning("stopped after a report, and failed on the way out, which changes nothing: %s", exc)
            value = None
        if self.regrows:
            self._record(claimed, outcome_of_regrowth(claimed, self._safe_work()))
        else:
            outcome = outcome_of_end(claimed, "stopped" if self._is_stopped else "completed", value)
            lacks_reports = self._recorder is not None and self._recorder.lacks_reports
            self._record(claimed, replace(outcome, lacks_reports=lacks_reports))
        return value

    def _train_on_machines(self, claimed: Attempt) -> Any:
        self._termination.raise_if_requested()  # who waits may have given up, and releases no GPUs any more
        self._gpus.take(self._termination.raise_if_requested)
        with self._lend() as lease:
            # It may have waited for hours, and another flow run trains by now.
            check_fence(self._store, claim_key(self._store, claimed))
            if self._job.working_dir is not None:
                self._job.working_dir.store(self._store)
            num_ranks = num_ranks_here(self._job.scaling, self._gpus) if lease is None else sum(lease.num_ranks)
            if num_ranks < (most := self._job.scaling.most_workers):
                get_run_logger().info("attempt %d has %d of at most %d ranks", claimed.number, num_ranks, most)
            return self._train(record_world_size(self._store, claimed, num_ranks), lease)

    def _lend(self) -> AbstractContextManager[Lease | None]:
        return nullcontext() if self._machines is None else self._machines.lend(self._termination.raise_if_requested)

    def _train(self, claimed: Attempt, lease: Lease | None) -> Any:
        with ended_by(self._termination.raise_if_requested):  # it may read for minutes
            start = choose_start(self._store, self._job, claimed, self._observers)
        self._observers.notify(AttemptStarted(claimed, start.path))
        try:
            # Without this transaction, Prefect marks the task runs of ranks and prunes as rolled back once this one fails.
            with transaction(commit_mode=CommitMode.EAGER), self._look_for_more(lease) as regrowth:
                return self._run_ranks(_Begun(claimed, start, lease, regrowth))
        finally:
            start.node_copy.release()

    def _look_for_more(self, lease: Lease | None) -> AbstractContextManager[Regrowth | None]:
        return nullcontext() if self._machines is None or lease is None else self._machines.look_for_more(lease)

    def _run_ranks(self, begun: "_Begun") -> Any:
        claimed, config = begun.claimed, self._job.run_config
        files = LogFiles(self._store, self._store.layout.logs(claimed.number))
        with rank_logs(config.log_ranks, config.log_level, files) as logs:  # left last: it waits until the lines are stored
            first_rank_at = partial(_first_rank, self._job, claimed, begun.start.restored, self._gpus)
            start = partial(start_gang, first_rank_at, self._job.failure.hang_timeout_s, self._termination, begun.lease, logs)
            return self._record_ranks(begun, start)

    def _record_ranks(self, begun: "_Begun", start_ranks: _StartRanks) -> Any:
        claimed, start = begun.claimed, begun.start
        recorder = self._recorder = RunRecorder(
            self._store, self._job, claim_key(self._store, claimed), start.own, self._observers
        )
        recorder.on_first_report = start.node_copy.release  # every rank has restored the checkpoint by then
        recorder.on_first_commit = None if start.source_pin is None else start.source_pin.remove
        may_go_on = True
        try:
            value = self._run_gang(begun, recorder, start_ranks)
        except Exception as exc:
            if self._termination.is_requested:  # first: it may be killed before the prune, the logs and the lease have ended
                self._record_termination(claimed, exc)
            raise
        else:
            may_go_on = self.regrows
            return value
        finally:
            recorder.prune(may_go_on=may_go_on)

    def _run_gang(self, begun: "_Begun", recorder: RunRecorder, start_ranks: _StartRanks) -> Any:
        termination = self._termination
        key_value: TcpKeyValue | None = None
        try:
            termination.raise_if_requested()
            gang, key_value = start_ranks()
            try:
                self._observers.notify(RanksStarted(begun.claimed.number, gang.task_runs))
                recorder.on_request = partial(self._decide, key_value)
                gang_run = GangRun(gang, key_value, recorder, termination, begun.regrowth)
                value = gang_run.run()
                self.regrows = gang_run.is_cut_short and not self._is_stopped
                begun.end(regrows=self.regrows)
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
            send_verdict(key_value, request.number, verdict)

    def _record_termination(self, claimed: Attempt, failure: Exception) -> None:
        """Record the outcome of an attempt whose termination is requested, unless that is done."""
        if self._termination.outcome is not None:
            return
        warn_of_failure_at_termination(failure)
        outcome = outcome_of_termination(claimed, self._termination, self._job.failure.grace_s, self._safe_work())
        self._termination.outcome = outcome
        get_run_logger().warning("attempt %d: %s", claimed.number, outcome.error)
        self._record(claimed, outcome)

    def _record_failure(self, claimed: Attempt, failure: Exception) -> None:
        if not isinstance(failure, RankFailedError):
            self._record(claimed, outcome_of_failure(claimed, failure))
            return
        if failure.rank is not None and is_of_gpu(failure.original):
            self._gpus.leave_out(failure.rank)
        if self._recorder is None or not self._recorder.has_committed:
            count_as_lost(failure)
        self._record(claimed, outcome_of_failure(claimed, failure))
        is_fenced = isinstance(failure.original, FencedError)  # then the run may be further, or gone
        log_failure(failure, "" if is_fenced else self._safe_work())

    def _record(self, claimed: Attempt, outcome: Outcome) -> None:
        record_outcome(self._store, claimed, outcome)
        self._observers.notify(AttemptEnded(outcome))

    def _safe_work(self) -> str:
        """Return up to which step work is safe, as far as this process knows: the storage may be unavailable."""
        return "no rank was started" if self._recorder is None else safe_work(self._store.run, self._recorder.newest)


@dataclass(frozen=True, slots=True)
class _Begun:
    """An attempt whose start is chosen, on its machines."""

    claimed: Attempt
    start: Start
    lease: Lease | None
    regrowth: Regrowth | None

    def end(self, *, regrows: bool) -> None:
        """Record whether the next attempt has more ranks; if not, the checkpoint that this one began with is needed no more."""
        if self.regrowth is not None:
            self.regrowth.is_used = regrows
        if self.start.source_pin is not None and not regrows:  # it is complete, with or without a checkpoint
            self.start.source_pin.remove()


def _first_rank(
    job: TrainJob, claimed: Attempt, restored: CheckpointRef | None, gpus: GpuAllocation, rendezvous: Address
) -> RankSpec:
    checkpoint = job.checkpoint
    return replace(
        first_rank(job, gpus, rendezvous, storage=job.storage, run=job.run, attempt=claimed.number, restored=restored),
        records_collectives=job.scaling.use_gpu and job.failure.hang_timeout_s is not None,
        reports=ReportSettings(
            checkpoint.max_in_flight,
            checkpoint.target_overhead,
            checkpoint.checkpoint_score_attribute,
            None if job.decisions is None else job.decisions.points(),
            job.failure.grace_s,
            claim_key(job.store, claimed),
        ),
        flush_s=_FLUSH_S,
        ranks_at_once=job.ranks_at_once,
        verify=job.run_config.verify,
    )
