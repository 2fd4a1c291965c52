"""Automations that run crashed trainings again: one for each deployment, and its resumer."""

import warnings
from contextlib import suppress
from datetime import timedelta
from typing import cast
from uuid import UUID

import httpx
from prefect.automations import Automation, AutomationCore, CompoundTrigger, RunDeployment
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.objects import WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.types.entrypoint import EntrypointType
from prefect_torch.ckpt.text import without_login
from prefect_torch.deployments.concurrency_leases import is_limited, warn_of_lost_lease
from prefect_torch.flows.monitoring.events.heartbeats import frequency_s
from prefect_torch.flows.monitoring.events.signs_of_life import LONGEST_BEGINNING_S, WAIT_FOR_NO_MACHINE, silence_s
from prefect_torch.flows.monitoring.text import show_duration
from prefect_torch.tasks.prefect_api.deployments import read_deployment
from prefect_torch.tasks.prefect_api.outage import is_key_refused
from prefect_torch.tasks.prefect_api.paging import read_pages

from .automations import create_or_update, name_of, to_run
from .jobs import variables_of_resumer
from .resumers import start_resumers
from .resuming import resume
from .run_directory import begin_in_place
from .triggers import absence_of, crash_of, silence_of

MADE_BY_DEPLOY = " The next deploy or serve without max_restarts deletes this automation."
_RESUMES = "Resume {}"  # the name of an automation, with the deployment "flow/name"
_PENDING = timedelta(seconds=LONGEST_BEGINNING_S)
_DELIVERY_S = 20.0  # of a heartbeat, at most
_LEAST_S = 10.0  # that Prefect lets a trigger wait for an event


def resume_crashed(
    deployment: str | UUID,
    *,
    max_restarts: int = 3,
    within: timedelta | float | None = None,
    begins_within: timedelta | float | None = None,
) -> Automation:
    """Make Prefect run `deployment` again, on the same run, whenever one of its flow runs crashes or has no heartbeat.

    Also if a worker has taken a flow run, and vanishes before that begins: Prefect leaves it Pending for ever.

    Creates or updates one automation, "Resume <flow>/<name>", and the deployment "resume/<flow>-<name>" in the same work pool,
    in its default queue if the deployment's own has a concurrency limit. Its flow runs take seconds and no GPU, and in
    Kubernetes reserve neither CPUs nor memory, on any node that can run the image: each reads the state of the flow run again,
    so that none is run twice, while it is alive, or after it ended normally between two heartbeats. A run without a name
    continues under its generated name.

    Args:
        deployment: "flow/deployment", or its id. A served deployment is resumed by `serve(..., max_restarts=n)`.
        max_restarts: The number of restarts of one training, over all of its flow runs.
        within: The time without a heartbeat (a timedelta, or seconds) after which the process counts as dead; three times
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY if None. More than the time between two heartbeats. For the last of these times
            and 20 s, the resumer waits for a heartbeat itself, since the server may have been away: with less than twice as
            much, the process counts as dead that much later.
        begins_within: The time (a timedelta, or seconds) that a flow run may be Pending, from when a worker takes it until it
            begins: images, pull steps, imports. None: 30 minutes in a process or Docker work pool, and no limit in others,
            where it may have to wait for a machine. At least as long as the wait of the resumer, 200 s by default.

    Raises:
        ValueError: If the deployment is served, or `within` or `begins_within` is too short.
        ObjectNotFound: If there is no such deployment.

    """
    return resume_in_pool(deployment, max_restarts, within, begins_within)


def resume_in_pool(
    deployment: str | UUID,
    max_restarts: int,
    within: timedelta | float | None = None,
    begins_within: timedelta | float | None = None,
    *,
    made_by: str = "",
) -> Automation:
    """Do what `resume_crashed` promises, with a sentence about who made the automation at the end of its description."""
    with get_client(sync_client=True) as client:
        trained = read_deployment(client, deployment)
        if trained.work_pool_name is None:
            raise ValueError(
                f"deployment {trained.name!r} has no work pool in which its resumer could run: "
                "serve it with serve(..., max_restarts=n), or deploy it to a work pool"
            )
        pool = client.read_work_pool(trained.work_pool_name)
        work_queue_name = _unlimited_queue(client, trained, pool)
    if begins_within is None and pool.type in WAIT_FOR_NO_MACHINE:
        begins_within = _PENDING
    if is_limited(trained):
        warn_of_lost_lease(trained.name)
    resumer = make_resumer(name_of(trained))
    resumer.work_pool_name, resumer.work_queue_name = trained.work_pool_name, work_queue_name
    resumer.job_variables = variables_of_resumer(pool, trained.job_variables or {})
    begin_in_place(resumer, pool)
    return resume_by(resumer, trained, max_restarts, within, begins_within, made_by=made_by)


def make_resumer(trained: str) -> RunnerDeployment:
    """Return the deployment of the flow `resume` for the deployment "flow/name"; deployments of two flows may share a name."""
    description = (
        f"Runs crashed or silent flow runs of the deployment {trained} again. The automation of that deployment starts it."
    )
    name = trained.replace("/", "-")
    made = resume.to_deployment(name=name, description=description, entrypoint_type=EntrypointType.MODULE_PATH)
    return cast("RunnerDeployment", made)


def resume_by(
    resumer: RunnerDeployment,
    trained: DeploymentResponse,
    max_restarts: int,
    within: timedelta | float | None = None,
    begins_within: timedelta | float | None = _PENDING,
    *,
    made_by: str = MADE_BY_DEPLOY,
) -> Automation:
    """Register `resumer` and the automation that starts it for `trained`; see `resume_in_pool`.

    Raises:
        ValueError: If `max_restarts` is less than 0, or `within` or `begins_within` is too short.

    """
    if max_restarts < 0:
        raise ValueError(f"max_restarts={max_restarts}: give 0 or more")
    silent = _silence(within)
    confirm_s = frequency_s() + _DELIVERY_S
    pending = _time_to_begin(begins_within, confirm_s)
    full_name = name_of(trained)
    limits = {
        "max_restarts": max_restarts,
        "silent_s": silent.total_seconds(),
        "confirm_s": confirm_s,
        "pending_s": None if pending is None else pending.total_seconds(),
    }
    resumer.parameters = limits  # also of a flow run that somebody starts by hand
    triggers = [
        crash_of(trained.id),
        silence_of(trained.id, max(silent.total_seconds() - confirm_s, confirm_s)),
    ]
    if pending is not None:
        triggers.append(absence_of(trained.id, max(pending.total_seconds() - confirm_s, _LEAST_S)))
    actions = to_run(cast("UUID", resumer.apply()), {"flow_run": "{{ event.resource.id }}", **limits})
    automation, is_replaced = create_or_update(
        AutomationCore(
            name=_RESUMES.format(full_name),
            description=f"Runs {full_name} again, on the same run, when one of its flow runs crashes, has no heartbeat for "
            f"{show_duration(silent.total_seconds())}{_or_pending(pending)}. "
            f"A training is restarted at most {_times(max_restarts)}.{made_by}",
            trigger=CompoundTrigger(require="any", within=None, triggers=[*triggers]),
            actions=actions,
        )
    )
    if is_replaced and automation.enabled:  # it awaits only heartbeats of flow runs that send another one
        start_resumers(trained.id, cast("RunDeployment", actions[0]), also_recent=True)
    return automation


def end_restarts(trained: str, *, is_served: bool) -> None:
    """Delete the automation that restarts the flow runs of the deployment "flow/name", and its resumer's deployment.

    In a work pool, an automation that `resume_crashed` made stays: nobody who deploys again has asked for its end. A key that
    may not see automations causes a warning.
    """
    with get_client(sync_client=True) as client:
        try:
            known = client.read_automations_by_name(_RESUMES.format(trained))
        except httpx.HTTPStatusError as exc:
            if not is_key_refused(exc):
                raise
            warnings.warn(
                f"restarts that an earlier call with max_restarts has asked for may go on: Prefect refuses to tell whether "
                f"there is an automation {_RESUMES.format(trained)!r} ({without_login(str(exc))})",
                stacklevel=3,
            )
            return
        ended = [it for it in known if is_served or it.description.endswith(MADE_BY_DEPLOY)]
        for automation in ended:
            client.delete_automation(automation.id)
        if ended:
            with suppress(ObjectNotFound):
                client.delete_deployment(client.read_deployment_by_name(f"{resume.name}/{make_resumer(trained).name}").id)


def restarted_in_pools(client: SyncPrefectClient) -> list[str]:
    """Return the names of the resumers that run in work pools, which are named after what they restart."""
    return [resumer.name for resumer in _resumers_in_pools(client)]


def restarted_behind_limits(client: SyncPrefectClient) -> list[str]:
    """Return those of `restarted_in_pools` whose work queue has a concurrency limit by now; one request per queue."""
    resumers = _resumers_in_pools(client)
    queues = {resumer.work_queue_id for resumer in resumers if resumer.work_queue_id is not None}
    limited = {queue for queue in queues if client.read_work_queue(queue).concurrency_limit is not None}
    return [resumer.name for resumer in resumers if resumer.work_queue_id in limited]


def _resumers_in_pools(client: SyncPrefectClient) -> list[DeploymentResponse]:
    resumers = read_pages(client.read_deployments, flow_filter=FlowFilter(name=FlowFilterName(any_=[resume.name])))
    return [resumer for resumer in resumers if resumer.work_pool_name is not None]


def _or_pending(pending: timedelta | None) -> str:
    return "" if pending is None else f", or is Pending for {show_duration(pending.total_seconds())}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _unlimited_queue(client: SyncPrefectClient, trained: DeploymentResponse, pool: WorkPool) -> str | None:
    """Return the work queue of `trained`, or None, the work pool's default queue, if that queue has a concurrency limit.

    A flow run that died silently occupies a slot of its queue until it is resumed; the resumer must not wait for that slot.
    """
    if trained.work_queue_id is None or client.read_work_queue(trained.work_queue_id).concurrency_limit is None:
        return trained.work_queue_name
    default = None if pool.default_queue_id is None else client.read_work_queue(pool.default_queue_id)
    if default is not None and default.concurrency_limit is not None:
        warnings.warn(
            f"the resumer of {trained.name!r} waits in the work queue {default.name!r}, which has a "
            "concurrency limit: flow runs that died silently keep their slots there until it begins. Let the deployment "
            "have another work queue, and limit that one",
            stacklevel=3,
        )
    return None


def _silence(within: timedelta | float | None) -> timedelta:
    if within is None:
        return timedelta(seconds=silence_s())
    silent = _as_timedelta(within)
    if silent.total_seconds() <= frequency_s():
        raise ValueError(
            f"within={silent} is not longer than the {frequency_s():g} s between two heartbeats of a flow run: give more, or "
            "set PREFECT_FLOWS_HEARTBEAT_FREQUENCY, here and where the flow runs, to fewer seconds (30 at least)"
        )
    return silent


def _time_to_begin(begins_within: timedelta | float | None, confirm_s: float) -> timedelta | None:
    if begins_within is None:
        return None
    pending = _as_timedelta(begins_within)
    if pending.total_seconds() < confirm_s:
        raise ValueError(
            f"begins_within={pending} is shorter than the {confirm_s:g} s for which the resumer waits until the flow run "
            "begins: give more"
        )
    return pending


def _as_timedelta(time: timedelta | float) -> timedelta:
    return time if isinstance(time, timedelta) else timedelta(seconds=time)
