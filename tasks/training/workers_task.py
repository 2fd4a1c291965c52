"""The Prefect task that leads one attempt of a training; Prefect's own retries start the next one."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.machine.lending import Machines
from prefect_torch.tasks.gang.returned import held
from prefect_torch.tasks.gang.termination import Termination
from prefect_torch.tasks.run_logs import library_logs_in_run

from .attempt_leader import AttemptLeader
from .job import TrainJob
from .observers import Observers
from .restarts import Restarts


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
                leader = AttemptLeader(job, observers, termination, restarts, gpus, machines)
                value = leader.lead()
                if not leader.regrows:
                    return held(value)

    return termination.outlast(lead)
