"""The plan of a deployment's next flow run."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound, ParameterTypeError, SignatureMismatchError
from prefect.settings import PREFECT_API_URL
from prefect_torch.ckpt.errors import PAGE_OF_PROXY
from prefect_torch.ckpt.text import without_login
from prefect_torch.flows import FailureConfig, PlanLine, RunConfig, ScalingConfig, TrainingPlan, plan, train
from prefect_torch.flows.monitoring.temporary_storage import has_relative_storage, lost_with_container
from prefect_torch.tasks.prefect_api.deployments import read_deployment
from prefect_torch.tasks.prefect_api.work_pools import default_of, has_variable

from .jobs import grace_in
from .run_directory import is_here, run_directory, working_in
from .work_pools import read_work_pool

_OF_RUN = ("damaged", "start", "retention")


def plan_deployment(deployment: str, parameters: Mapping[str, Any] | None = None) -> TrainingPlan:
    """Return what the next flow run of a deployment of `train` would do; starts nothing.

    Its grace is compared with its work pool's, and with that of the pods of its ranks. In a work pool of processes, what is
    relative is looked for where the flow run begins, which is this process's working directory meanwhile. If this machine has
    no such directory, the function, the code directory and a relative storage are warnings. In a work pool of containers,
    neither the function, nor the code directory, nor the GPUs are looked for on this machine, and a storage that would be lost
    with the container is a warning. Any other storage is checked from this machine.

    Args:
        deployment: Its name, such as "train/nightly"; without "train/", that of a deployment of `train`.
        parameters: Parameters that replace those of the deployment, as JSON has them.

    Raises:
        ValueError: If there is no such deployment, or a parameter is invalid.
        ConnectionError: If Prefect's API does not answer, or refuses.

    """
    found = _find(deployment if "/" in deployment else f"train/{deployment}")
    given = {**found.parameters, **(parameters or {})}
    if found.work_pool_name is None:
        return plan_parameters(given)
    pool = read_work_pool(found.work_pool_name)
    directory = run_directory(found, pool) if has_variable(pool, "working_dir") else None
    with working_in(directory) if directory is not None and is_here(directory) else nullcontext():
        planned = plan_parameters(given)
    in_pool = {line.subject: line for line in _look_at_pool(pool, found.job_variables or {}, _arguments(given), directory)}
    lines = tuple(chain.from_iterable(_with_pool(line, in_pool) for line in planned.lines))
    if "storage" not in in_pool:
        return replace(planned, lines=lines)
    return TrainingPlan(tuple(line for line in lines if line.subject not in _OF_RUN))  # it is not seen from here


def _with_pool(line: PlanLine, in_pool: Mapping[str, PlanLine]) -> Iterator[PlanLine]:
    """Yield what replaces a line of the plan; the graces of the ranks' pods and of the flow run both have to be long enough."""
    if line.subject == "grace" and line.status == "warning":
        yield line
    yield in_pool.get(line.subject, line)


def plan_parameters(parameters: Mapping[str, Any]) -> TrainingPlan:
    """Return what `train` would do with parameters as JSON has them.

    Raises:
        ValueError: If one of them is invalid.

    """
    if "train_fn" not in parameters:
        raise ValueError('the parameters lack the training function: give at least {"train_fn": "module:function"}')
    return plan(**_arguments(parameters))


def _arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return train.validate_parameters(dict(parameters))
    except (SignatureMismatchError, ParameterTypeError) as exc:
        raise ValueError(str(exc)) from exc


def _find(name: str) -> DeploymentResponse:
    try:
        with get_client(sync_client=True) as client:
            return read_deployment(client, name)
    except ObjectNotFound as exc:
        raise ValueError(str(exc)) from None
    except (httpx.HTTPError, *PAGE_OF_PROXY, RuntimeError) as exc:  # RuntimeError: it was not reached at all
        api = PREFECT_API_URL.value() or "a Prefect server that was started here"
        said = without_login(f"{api} does not give deployment {name!r}: {exc or type(exc).__name__}")
        raise ConnectionError(f"{said}; set PREFECT_API_URL, and PREFECT_API_AUTH_STRING if it asks for it") from exc


def _look_at_pool(
    pool: WorkPool, variables: Mapping[str, Any], arguments: Mapping[str, Any], directory: Path | None = None
) -> Iterator[PlanLine]:
    scaling, run = arguments.get("scaling") or ScalingConfig(), arguments.get("run") or RunConfig()
    yield grace_in(pool, variables, arguments.get("failure") or FailureConfig())
    if has_variable(pool, "working_dir"):
        yield from () if is_here(directory) else _not_here(directory, run)
        return
    in_image = f"looked for in the image of work pool {pool.name!r} alone"
    yield PlanLine("function", "ok", in_image)
    yield PlanLine("working_dir", "ok", in_image)
    if scaling.cluster is None and scaling.use_gpu:
        yield _gpus_in(pool, variables, scaling.most_workers)
    if (loss := lost_with_container(pool, run)) is not None:
        yield PlanLine("storage", "warning", loss)


def _not_here(directory: Path | None, run: RunConfig) -> Iterator[PlanLine]:
    """Yield what replaces the lines on what is in the directory of the flow run, which this machine lacks."""
    place = "a directory that each flow run makes itself" if directory is None else f"{directory}, which this machine lacks"
    for subject in ("function", "working_dir"):
        yield PlanLine(subject, "warning", f"not looked for: the flow run begins in {place}")
    if has_relative_storage(run):
        text = f"storage {run.storage!r} was not checked: it is in {place}"
        yield PlanLine("storage", "warning", f"{text}; give RunConfig(storage=...) an absolute path, a URL or a block")


def _gpus_in(pool: WorkPool, variables: Mapping[str, Any], needed: int) -> PlanLine:
    """Return a plan's line on whether a container of `pool` requests enough GPUs; this machine's GPUs do not count."""
    ids, number = (variables.get(name, default_of(pool, name)) for name in ("gpu_ids", "num_gpus"))
    if ids:
        given, text = len(ids), f"is asked for {len(ids)} (gpu_ids)"
    elif number is None:
        given, text = needed, "has no variable that says how many a container has"
    elif int(number) < 0:
        given, text = needed, f"is asked for all of a machine (num_gpus={number})"
    else:
        given, text = int(number), f"is asked for {number} (num_gpus)"
    return PlanLine("gpus", "ok" if given >= needed else "wrong", f"{needed} needed, and work pool {pool.name!r} {text}")
