"""The body of a flow that leads a training: its attempts, their observers, and the end of a terminated flow run."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound, Pause
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.states import Cancelled, Crashed, Failed
from prefect_torch.ckpt import CheckpointError, FencedError
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, newest_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.tasks import train_workers
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.machine.lending import Machines
from prefect_torch.tasks.gang.processes.local_rank import prepare_ranks
from prefect_torch.tasks.gang.returned import released
from prefect_torch.tasks.gang.termination import TERMINATIONS, Interruption, Termination
from prefect_torch.tasks.prefect_api.flow_run import has_run_before
from prefect_torch.tasks.prefect_api.outage import outlast_api_outages
from prefect_torch.tasks.prefect_api.tags import tags_beyond_caller
from prefect_torch.tasks.rank.errors import RankFailedError
from prefect_torch.tasks.rank.failures import counts_against
from prefect_torch.tasks.run_logs import get_run_logger
from prefect_torch.tasks.training.job import TrainJob
from prefect_torch.tasks.training.observers import Observer, Observers
from prefect_torch.tasks.training.restarts import Restarts

TIMED_OUT = "TimedOut"  # Prefect's name of the state of a flow run after `timeout_seconds`
_outcomes: dict[str, Outcome] = {}  # by flow run, from the flow's body to its hook in the same process


def _record_termination(outcome: Outcome | None) -> None:
    """Record the outcome of a terminated attempt while the exception passes through the flow's body; costs no request."""
    if outcome is not None and outcome.flow_run_id is not None:
        _outcomes[outcome.flow_run_id] = outcome


def set_terminated_state(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001 - passed by name
    """Give the state of a flow run that crashed, or that its timeout ended, the message that `_record_termination` recorded.

    A cancellation that does not come through Prefect's API, such as a stopped container's, becomes Cancelled here, so that no
    automation runs the flow again.
    """
    outcome = _outcomes.pop(str(flow_run.id), None)
    if outcome is None or outcome.error is None or (state.is_failed() and state.name != TIMED_OUT):
        return
    final: State[Any] = Crashed(message=f"{state.message} {outcome.error}")
    if state.is_failed():
        _, _, safe_work = outcome.error.partition("; ")
        final = Failed(name=TIMED_OUT, message=f"{state.message}; {safe_work}")
    if outcome.ending == "cancelled":
        final = Cancelled(message=outcome.error)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, final, force=True)


def state_if_continued(run: Run) -> State[Any] | None:
    """Return the state of the current flow run if another process of it leads `run` now; None otherwise, or if that is unknown.

    Another process starts if this one was believed dead: for example, the flow run was set to Crashed and run again.
    """
    this = Owner.current(flow_run.id)
    with suppress(CheckpointError, OSError, httpx.HTTPError, ObjectNotFound):
        newest = newest_attempt(run)
        if newest is not None and newest.owner.flow_run_id == flow_run.id and replace(newest.owner, budget=None) != this:
            with get_client(sync_client=True) as client:
                return client.read_flow_run(UUID(flow_run.id)).state
    return None


def lead_training(
    job: TrainJob, gpus: GpuAllocation, machines: Machines | None, termination: Termination, observers: Sequence[Observer]
) -> Any:
    """Run the attempts of a training within the current flow run, and return rank 0's return value.

    Args:
        job: The training.
        gpus: The GPUs of its ranks, which are released at the end.
        machines: The machines of its ranks, which are given back at the end; None for this one.
        termination: Whether the flow run is being terminated.
        observers: They are notified of every event of the training.

    Raises:
        Exception: The last failure.
        Pause: If another process of this flow run has overtaken this one, and is now the one that sets its state.

    """
    if machines is None:
        # In parallel with requests to Prefect's API and the storage.
        prepare_ranks(max(job.scaling.most_workers, job.ranks_at_once))
    restarts = Restarts(job.failure, flow_run.id, is_rerun=has_run_before())

    def is_worth_another_attempt(_task: object, _task_run: object, state: State[Any]) -> bool:
        error = state.result(raise_on_failure=False)
        if termination.cause is not None:  # it may be an error, such as the one that ends a trial's sweep
            return False
        if not isinstance(error, Exception) or not restarts.count_failure(kind := counts_against(error)):
            return False
        is_logged = isinstance(error, RankFailedError) or isinstance(error.__cause__, RankFailedError)  # with its traceback
        reason = "" if is_logged else f"{error or repr(error)}; "
        later = f" in {delay_s:g} s" if (delay_s := round(restarts.delay_s, 1)) else ""
        get_run_logger().warning("%s%s; the training starts again%s", reason, restarts.describe_last(kind), later)
        return True

    led = train_workers.with_options(
        retries=restarts.most_retries,
        retry_delay_seconds=0,  # `train_workers` waits itself, whatever PREFECT_TASKS_DEFAULT_RETRY_DELAY_SECONDS
        retry_condition_fn=is_worth_another_attempt,
    )
    with termination.limit_retries():
        notified = Observers(observers)
        try:
            with outlast_api_outages(termination.has_cause):
                try:
                    with tags_beyond_caller():
                        return released(led(job, notified, termination, restarts, gpus, machines))
                finally:  # before the wait for Prefect's API: others may wait for them
                    gpus.release()
                    if machines is not None:
                        machines.close()
        except FencedError:
            if (state := state_if_continued(job.store)) is None:
                raise
            get_run_logger().warning("another process of this flow run leads the training now, and sets its state")
            raise Pause(state=state) from None
        except TERMINATIONS:
            if not isinstance(termination.cause, Interruption):  # an interruption is no end, and has no hook
                _record_termination(termination.outcome)
            raise
        finally:
            notified.close()
