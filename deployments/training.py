"""Deployments of the flow `train` for a user's training function."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import prefect
from prefect.automations import Automation
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkPool
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import RunDeployment
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron
from prefect.settings import PREFECT_API_URL
from prefect.types.entrypoint import EntrypointType
from prefect_torch.ckpt import Checkpoint
from prefect_torch.deployments.concurrency_leases import warn_of_lost_lease
from prefect_torch.flows import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, train
from prefect_torch.flows.arguments import name_checkpoint, show_ranks
from prefect_torch.flows.calls.parameters import check_stored, large_parameters_explained
from prefect_torch.tasks.rank.user_code.function_reference import TrainFunction, check_reference, reference_to
from pydantic import BaseModel

from .jobs import grace_in, job_variables_for
from .restarts import MADE_BY_DEPLOY, end_restarts, make_resumer, resume_by, resume_in_pool
from .resumers import start_resumers
from .run_directory import begin_in_place
from .serving import runner_outlasts_outages
from .work_pools import read_work_pool

_RESUMES = "A failed or killed training resumes from its latest checkpoint."
_CRON = "cron"  # the slug of the schedule that a deployment gets here, by which it is distinguished from those added by hand


def make_deployment(
    name: str,
    train_fn: str | TrainFunction,
    config: dict[str, Any] | None = None,
    scaling: ScalingConfig | None = None,
    run: RunConfig | None = None,
    checkpoint: CheckpointConfig | None = None,
    failure: FailureConfig | None = None,
    *,
    resume_from: str | Path | Checkpoint | None = None,
    cron: str | None = None,
    timezone: str | None = None,
    tags: Iterable[str] = (),
) -> RunnerDeployment:
    """Return a deployment of `train` with these parameters as defaults, which can be changed in its Run form.

    Args:
        name: The deployment's name.
        train_fn: "module:function" or "path/to/file.py:function", found where the flow runs, or the function itself, which is
            replaced by its location.
        config: The argument of the function.
        scaling: The number of ranks, and their devices.
        run: The run's name, its storage, and whether it resumes; without a name, each scheduled run is a fresh start.
        checkpoint: The retention policy.
        failure: The budgets for restarts.
        resume_from: The initial checkpoint, of another run: its path or URL, or "run/id" in the same storage.
        cron: The schedule, as in crontab(5), in place of all others. If None, that of an earlier call ends, and schedules
            added by hand stay.
        timezone: The time zone of the cron expression, such as "Europe/Berlin"; UTC if None.
        tags: The deployment's tags.

    Raises:
        ValueError: If the storage is an unsaved block, the function is not at the top level of a module or a file,
            `resume_from` is no committed checkpoint, or a URL that contains a password, or Prefect's API would change a value
            of the config.

    """
    if config is not None:
        check_stored(config)
    given = {"config": config, "scaling": scaling, "run": _with_named_block(run), "checkpoint": checkpoint, "failure": failure}
    begins_from = {} if resume_from is None else {"resume_from": name_checkpoint(resume_from)}
    function, ranks = reference_to(train_fn), show_ranks(scaling or ScalingConfig())
    deployment = train.to_deployment(
        name=name,
        description=f"Trains `{function}` on {ranks}. {_RESUMES}",
        parameters={
            "train_fn": function,
            **{key: _as_json(value) for key, value in given.items() if value is not None},
            **begins_from,
        },
        schedule=None if cron is None else Cron(cron, timezone=timezone, slug=_CRON),
        tags=list(tags),
        entrypoint_type=EntrypointType.MODULE_PATH,  # a path would load a second, different flow object
    )
    made = cast("RunnerDeployment", deployment)
    if cron is None:
        made.model_fields_set.discard("schedules")  # an empty list would delete those that were added by hand
    return made


def deploy(
    name: str,
    train_fn: str | TrainFunction,
    config: dict[str, Any] | None = None,
    scaling: ScalingConfig | None = None,
    run: RunConfig | None = None,
    checkpoint: CheckpointConfig | None = None,
    failure: FailureConfig | None = None,
    *,
    work_pool: str,
    work_queue: str | None = None,
    resume_from: str | Path | Checkpoint | None = None,
    image: str | None = None,
    job_variables: Mapping[str, Any] | None = None,
    max_restarts: int | None = None,
    cron: str | None = None,
    timezone: str | None = None,
    tags: Iterable[str] = (),
) -> UUID:
    """Register a deployment of `train` in a work pool, whose workers run its scheduled and triggered flow runs; return its id.

    A process worker runs it in the current directory, to which `train_fn` and a relative storage are relative, unless the job
    variable `working_dir` is set. In containers, it begins in their own working directory, of which nothing is copied, and
    `train_fn` must be part of the image. If the work pool has the variable `num_gpus`, as in this package's job templates, it
    requests one GPU for each rank (of a range, for the most) with `use_gpu=True` and without a cluster, and none otherwise, or
    if the job variables name `gpu_ids`.

    Args:
        name: The deployment's name; an existing deployment is updated. If somebody has paused it, or its schedule, it stays so.
        train_fn: "module:function" or "path/to/file.py:function", found where the flow runs, or the function itself, which is
            replaced by its location.
        config: The argument of the function.
        scaling: The number of ranks, and their devices.
        run: The run's name, its storage, and whether it resumes; without a name, each scheduled run is a fresh start.
        checkpoint: The retention policy.
        failure: The budgets for restarts within the flow run.
        work_pool: The work pool's name.
        work_queue: The name of its work queue, which is created if there is none; the default queue if None.
        resume_from: The initial checkpoint, of another run: its path or URL, or "run/id" in the same storage.
        image: The image of a container work pool's jobs, as named in the registry; nothing is built. The work pool's own if
            None.
        job_variables: Additional variables of the work pool.
        max_restarts: The number of restarts, on the same run, after a flow run crashed or has no heartbeat, as by
            `resume_crashed`; no restarts if None, also if an earlier `deploy` asked for them. What `resume_crashed` itself has
            made stays.
        cron: The schedule, as in crontab(5), in place of all others. If None, that of an earlier call ends, and schedules
            added by hand stay.
        timezone: The time zone of the cron expression, such as "Europe/Berlin"; UTC if None.
        tags: The deployment's tags.

    Raises:
        ValueError: As of `make_deployment`, or if there is no such work pool, the storage is a relative path, which would be
            lost with the container, or containers would have Prefect's image, since neither the call nor the work pool names
            another one.

    """
    pool = read_work_pool(work_pool)
    deployment = make_deployment(
        name,
        train_fn,
        config,
        scaling,
        run,
        checkpoint,
        failure,
        resume_from=resume_from,
        cron=cron,
        timezone=timezone,
        tags=tags,
    )
    given = {**(job_variables or {}), **({} if image is None else {"image": image})}
    deployment.job_variables = {**job_variables_for(pool, scaling or ScalingConfig(), run or RunConfig(), given), **given}
    deployment.work_queue_name = work_queue
    begin_in_place(deployment, pool)
    _warn_of_short_time(pool, deployment.job_variables, failure or FailureConfig())
    if deployment.job_variables.get("working_dir") == str(Path.cwd()):
        _warn_of_missing_function(deployment)
    _keep_paused(deployment)
    with large_parameters_explained():
        deployment_id = cast("UUID", deployment.apply(work_pool_name=work_pool))
    _end_cron(deployment)
    if max_restarts is None:
        end_restarts(deployment.full_name, is_served=False)
    else:
        resume_in_pool(deployment_id, max_restarts, made_by=MADE_BY_DEPLOY)
    return deployment_id


def serve(*deployments: RunnerDeployment, max_restarts: int | None = None) -> None:
    """Register `deployments` and run their scheduled and triggered flow runs on this machine, until interrupted.

    It goes on while Prefect's API is away, or refuses an expired key: the flow runs that it has started continue, and due ones
    start afterwards. Prefect's own `serve` ends at once if the key is refused, after about four minutes without an answer, and
    ends its flow runs. With `max_restarts`, flow runs that died meanwhile, or since an earlier `serve` ended, are restarted,
    even if the server has missed it, while the automation for this is enabled. A deployment that was in a work pool leaves it.

    Schedules need a server that was started separately: the one that a process starts without PREFECT_API_URL runs none. Warns
    of it.

    Args:
        deployments: Return values of `make_deployment`.
        max_restarts: The number of restarts, on the same run, after a flow run crashed or has no heartbeat; no restarts if
            None, also if an earlier `serve` asked for them. Their resumers, as by `resume_crashed`, are served as well.

    Raises:
        ValueError: If a training function is not found in the current directory or among the installed modules.

    """
    if not PREFECT_API_URL.value() and any(deployment.schedules for deployment in deployments):
        warnings.warn(
            "no schedule runs: without PREFECT_API_URL, this process starts a Prefect server that has none. Start one with "
            "`prefect --no-prompt server start`, and set PREFECT_API_URL",
            stacklevel=2,
        )
    for deployment in deployments:
        if "train_fn" in deployment.parameters:
            check_reference(deployment.parameters["train_fn"])
        if deployment.concurrency_limit is not None:
            warn_of_lost_lease(deployment.name)
        _end_cron(deployment)
        _leave_work_pool(deployment)
    with large_parameters_explained():
        restarted = [] if max_restarts is None else [_restarted(deployment, max_restarts) for deployment in deployments]
        if max_restarts is None:
            for deployment in deployments:
                end_restarts(deployment.full_name, is_served=True)

        def restart() -> None:
            for deployment_id, _, automation in restarted:
                (action,) = automation.actions
                assert isinstance(action, RunDeployment)
                if _is_enabled(automation):
                    start_resumers(deployment_id, action)

        restart()
        with runner_outlasts_outages(after_outage=restart):
            prefect.serve(*deployments, *(resumer for _, resumer, _ in restarted))


def _keep_paused(deployment: RunnerDeployment) -> None:
    """Keep what somebody has paused: the deployment in its work pool, and the schedule of `cron`. An update resumes them.

    A deployment without a work pool was paused by the end of its `serve`.
    """
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        known = client.read_deployment_by_name(deployment.full_name)
        if known.work_pool_name is None:
            return
        deployment.paused = known.paused
        inactive = {it.slug for it in known.schedules if not it.active}
        for schedule in deployment.schedules or ():
            schedule.active = schedule.slug not in inactive


def _leave_work_pool(deployment: RunnerDeployment) -> None:
    """Take a deployment out of the work pool of an earlier `deploy`: what was not set, an update leaves as it is."""
    deployment.work_pool_name = deployment.work_queue_name = None


def _end_cron(deployment: RunnerDeployment) -> None:
    """Delete the schedule of an earlier call with `cron`, unless `deployment` has one; those added by hand stay."""
    if deployment.schedules:
        return
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        known = client.read_deployment_by_name(deployment.full_name)
        for schedule in known.schedules:
            if schedule.slug == _CRON:
                client.delete_deployment_schedule(known.id, schedule.id)


def _as_json(value: BaseModel | dict[str, Any]) -> dict[str, Any]:
    """Return what was given: a worker with an older version refuses settings that it does not know."""
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value


def _with_named_block(run: RunConfig | None) -> RunConfig | None:
    """Return `run` with the name of its block instead of the fields: a deployment's parameters are visible to everybody."""
    if run is None or not isinstance(run.storage, Block):
        return run
    name = run.storage._block_document_name  # noqa: SLF001 - Prefect has no public name for it
    if name is None:
        raise ValueError("the storage is an unsaved block, and a deployment needs its name: call its save(name) first")
    return run.model_copy(update={"storage": f"{run.storage.get_block_type_slug()}/{name}"})


def _restarted(deployment: RunnerDeployment, max_restarts: int) -> tuple[UUID, RunnerDeployment, Automation]:
    """Register `deployment` and its resumer; return its id, the resumer, and its automation."""
    deployment_id = cast("UUID", deployment.apply())
    with get_client(sync_client=True) as client:
        trained = client.read_deployment(deployment_id)
    resumer = make_resumer(deployment.full_name)
    _leave_work_pool(resumer)
    return deployment_id, resumer, resume_by(resumer, trained, max_restarts)


def _is_enabled(automation: Automation) -> bool:
    """Return whether an automation is enabled by now; somebody may have paused or deleted it."""
    with get_client(sync_client=True) as client:  # by its name, since Prefect's client raises for an id that is gone
        return any(it.id == automation.id and it.enabled for it in client.read_automations_by_name(automation.name))


def _warn_of_missing_function(deployment: RunnerDeployment) -> None:
    try:
        check_reference(deployment.parameters["train_fn"])
    except ValueError as exc:
        warnings.warn(f"{exc}; flow runs fail unless the worker's machine has it in {Path.cwd()}", stacklevel=3)


def _warn_of_short_time(pool: WorkPool, job_variables: Mapping[str, Any], failure: FailureConfig) -> None:
    if (line := grace_in(pool, job_variables, failure)).status != "ok":
        warnings.warn(line.text, stacklevel=3)
