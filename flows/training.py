"""The flow `train`: a training with restarts, to be called, scheduled and triggered."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.client.orchestration import get_client
from prefect_torch.ckpt import Checkpoint, CheckpointStore
from prefect_torch.flows.calls.cluster_runner import with_cluster_of_runner
from prefect_torch.flows.calls.log_filter import shorten_logs
from prefect_torch.flows.calls.short_tracebacks import short_tracebacks
from prefect_torch.flows.monitoring.parameters import as_shown
from prefect_torch.flows.monitoring.restarted import Restart
from prefect_torch.flows.result import Result, read_result, summarize
from prefect_torch.flows.sweeps.asked_decisions import asked_decisions
from prefect_torch.tasks import (
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from prefect_torch.tasks.gang.gang import ONE_THREAD_PER_RANK
from prefect_torch.tasks.gang.gpus.allocation import GpuAllocation
from prefect_torch.tasks.gang.machine.lending import Machines
from prefect_torch.tasks.gang.machine.working_dir import pack_directory
from prefect_torch.tasks.gang.termination import Termination, TerminationSwitch
from prefect_torch.tasks.options.run_form import PathObject, WithoutNull, none_if_empty, shown_as
from prefect_torch.tasks.options.storage import configured_storage
from prefect_torch.tasks.prefect_api.embedded_server.tying import tie_running_servers
from prefect_torch.tasks.prefect_api.final_state import completed
from prefect_torch.tasks.prefect_api.flow_run import current_flow_run
from prefect_torch.tasks.prefect_api.outage import outlast_api_outages
from prefect_torch.tasks.rank.user_code.function import pack_function
from prefect_torch.tasks.run_logs import get_run_logger
from prefect_torch.tasks.training.job import TrainJob
from pydantic import BeforeValidator
from pydantic.json_schema import SkipJsonSchema

from .arguments import committed_checkpoint, gpus_for, machines_for, restarted_by_this
from .interruptions import interruptible
from .leading import lead_training, set_terminated_state
from .monitoring.console import console_progress
from .monitoring.events.observer import EventObserver
from .monitoring.messages import LocationObserver, flow_run_name, portable_storage, tag_of
from .monitoring.notebook_cell import notebook_progress
from .monitoring.pages.machine import GpuMonitor, describe_machine
from .monitoring.pages.observer import PageObserver
from .monitoring.pages.runs_page import refresh_runs_page
from .monitoring.pages.setup import Setup
from .run_names import name_of_flow_run


@short_tracebacks
@flow(
    name="train",
    description="Trains a PyTorch function on several ranks. A failed or killed training resumes from its latest checkpoint.",
    flow_run_name=flow_run_name,
    task_runner=ONE_THREAD_PER_RANK,
    persist_result=False,
    on_crashed=[set_terminated_state],
    on_failure=[set_terminated_state],
)
def train(
    train_fn: Annotated[
        str | SkipJsonSchema[Callable[..., Any]],
        shown_as(
            "Training function",
            "The function that every rank runs: 'module:function' or 'path/to/file.py:function'.",
            pattern="^.+:[A-Za-z_][A-Za-z0-9_]*$",
        ),
    ],
    config: Annotated[
        dict[str, Any] | None,
        WithoutNull(),
        shown_as("Config", "The function's argument, if it takes one, as JSON.", default={}),
    ] = None,
    scaling: Annotated[
        ScalingConfig | None, WithoutNull(), shown_as("Scaling", "How many ranks train together, and on what.")
    ] = None,
    run: Annotated[
        RunConfig | None, WithoutNull(), shown_as("Run", "The run's name, the location of its checkpoints, and how it starts.")
    ] = None,
    checkpoint: Annotated[
        CheckpointConfig | None,
        WithoutNull(),
        shown_as("Checkpoints", "Which checkpoints are kept in addition to the latest, and how they are stored."),
    ] = None,
    failure: Annotated[
        FailureConfig | None,
        WithoutNull(),
        shown_as("Failures", "How often the training is restarted, from its latest checkpoint."),
    ] = None,
    resume_from: Annotated[
        str | PathObject | SkipJsonSchema[Checkpoint] | None,
        WithoutNull(),
        BeforeValidator(none_if_empty),
        shown_as(
            "Begin from",
            "The initial checkpoint, of another run, used while this run has none of its own: its path or URL, or 'run/id' in "
            "the same storage. A fresh start when empty.",
            default="",
        ),
    ] = None,
) -> Result:
    """Train on several ranks; after a failure, restart all of them from the latest checkpoint.

    Each rank is a process of its own and a Prefect task run (if there are more than 64, those of one machine share a task run);
    `report` and `get_checkpoint` of `prefect_torch.ckpt` work inside the function. A killed training continues when it is
    started again with the same run name. The result can be read from storage at any time, also after a failure:
    `Result.from_storage(storage, run)`.

    Args:
        train_fn: The function that every rank runs, or its location ("module:function", "path/to/file.py:function").
        config: The function's argument, if it takes one.
        scaling: The number of ranks and their devices. One rank without a GPU if None.
        run: The run's name, the location of its checkpoints, and how it starts. If None, "./checkpoints" and a name made from
            this flow run.
        checkpoint: Which checkpoints are kept. All if None.
        failure: How often the training is restarted. If None, never for the function's own exceptions, and three times for lost
            processes or storage.
        resume_from: The initial checkpoint, of another run, used while this run has none of its own.

    Raises:
        Exception: The last failure: the function's own exception, from a RankFailedError with the rank's traceback, or that
            RankFailedError itself, if the rank's process died or pickle cannot rebuild the exception.
        ValueError: If an argument is invalid; nothing was started.
        RunBusyError: If another flow run that is alive trains this run.
        CheckpointError: If the run cannot be resumed.
        GpusBusyError: If the GPUs that the ranks need stay in use for longer than `wait_for_gpus_s`.
        NotEnoughMachinesError: If too few ranks fit on the cluster.
        StorageNotSeenError: If a rank's machine sees another storage than this process, such as its own directory, or this
            process another one than the sweep that has started it.
        RestartsUsedUpError: If this flow run was started again though it had used up a budget of `failure`.
        CancelledRun: If its flow run is cancelled in Prefect, and no flow run that calls it.

    """
    shorten_logs()
    tie_running_servers()
    with outlast_api_outages(TerminationSwitch.is_thrown):  # also of an embedded server that dies while the page is made
        scaling, failure = with_cluster_of_runner(scaling or ScalingConfig()), failure or FailureConfig()
        gpus, machines = gpus_for(scaling), machines_for(scaling)
        job = _job(train_fn, config, scaling, run or RunConfig(), checkpoint or CheckpointConfig(), failure, resume_from)
        return _train(job, config, gpus, machines)


def _train(job: TrainJob, config: dict[str, Any] | None, gpus: GpuAllocation, machines: Machines | None) -> Result:
    _introduce(job)
    termination = Termination(job.failure.grace_s)
    decisions = asked_decisions(job.store, lambda: termination.is_requested, is_takeover=job.run_config.takeover)
    job = replace(job, decisions=decisions)
    setup = Setup(
        portable_storage(job.run_config, job.storage), as_shown(config), describe_machine(), Restart.of(current_flow_run())
    )
    pages = PageObserver(job, setup, GpuMonitor(lambda: gpus.uuids))
    location = LocationObserver(job)
    try:
        with interruptible(termination, yields_to_urgent=job.run_config.yields_to_urgent):
            return_value = lead_training(
                job,
                gpus,
                machines,
                termination,
                # Pages last: they may take long, and others wait for the events.
                [*console_progress(job.run), *notebook_progress(job.run), location, EventObserver(job), pages],
            )
    finally:
        # A terminated process may be killed soon; then the end of the next training refreshes the page.
        is_on_page = "/" not in job.run  # else it is a trial
        if is_on_page and location.has_begun and termination.cause is None:
            refresh_runs_page(job.storage)
    result = replace(read_result(job.store), return_value=return_value)
    location.log_completed(summary := summarize(result, job.policy))
    return completed(summary, result)


def _introduce(job: TrainJob) -> None:
    """Show in Prefect which training this flow run belongs to; one request."""
    this = current_flow_run()
    restart = Restart.of(this)
    if restart is not None:
        text = "restart %d of flow run %r by an automation: %s"
        get_run_logger().info(text, restart.number, restart.first_name, restart.url)
    with get_client(sync_client=True) as client:
        client.update_flow_run(this.id, tags={*this.tags, tag_of(job.run)})


def _job(
    train_fn: str | Callable[..., Any],
    config: dict[str, Any] | None,
    scaling: ScalingConfig,
    run: RunConfig,
    checkpoint: CheckpointConfig,
    failure: FailureConfig,
    resume_from: str | Path | Checkpoint | None,
) -> TrainJob:
    storage = configured_storage(run.storage, run.storage_deadline_s, run.sync)
    working_dir = None if run.working_dir is None else pack_directory(run.working_dir, storage.url)
    return TrainJob(
        function=pack_function(train_fn, config, run.working_dir),
        store=CheckpointStore.open(storage, run.name or name_of_flow_run()),
        initial_checkpoint=None if resume_from is None else committed_checkpoint(resume_from, storage),
        scaling=scaling,
        run_config=run,
        checkpoint=checkpoint,
        failure=failure,
        working_dir=working_dir,
        restarted=restarted_by_this(run),
    )
