"""What a deployment's next flow run would do."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkPool
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound, ParameterTypeError, SignatureMismatchError
from prefect.settings import PREFECT_API_URL
from prefect_torch.flows import FailureConfig, PlanLine, ScalingConfig, TrainingPlan, plan, train
from prefect_torch.flows.prefect_api.deployments import read_deployment

from .job_templates import default_of, has_variable
from .training import grace_in, read_work_pool


def plan_deployment(deployment: str, parameters: Mapping[str, Any] | None = None) -> TrainingPlan:
    """Return what the next flow run of a deployment of `train` would do; starts nothing.

    Its grace is compared with its work pool's. In a work pool of containers, neither the function nor the GPUs are looked for
    on this machine. The storage is looked at from here.

    Args:
        deployment: Its name, such as "train/nightly"; without "train/", that of a deployment of `train`.
        parameters: Parameters that replace those of the deployment, as JSON has them.

    Raises:
        ValueError: If there is no such deployment, or a parameter is invalid.
        ConnectionError: If Prefect's API does not answer, or refuses.

    """
    found = _find(deployment if "/" in deployment else f"train/{deployment}")
    given = {**found.parameters, **(parameters or {})}
    planned = plan_parameters(given)
    if found.work_pool_name is None:
        return planned
    arguments = _arguments(given)
    pool, variables = read_work_pool(found.work_pool_name), found.job_variables or {}
    in_pool = {
        line.subject: line
        for line in _look_at_pool(
            pool, variables, arguments.get("scaling") or ScalingConfig(), arguments.get("failure") or FailureConfig()
        )
    }
    return replace(planned, lines=tuple(in_pool.get(line.subject, line) for line in planned.lines))


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
    except (httpx.HTTPError, RuntimeError) as exc:  # RuntimeError: it was not reached at all
        said = f"{PREFECT_API_URL.value()} does not give deployment {name!r}: {exc or type(exc).__name__}"
        raise ConnectionError(f"{said}; set PREFECT_API_URL, and PREFECT_API_AUTH_STRING if it asks for it") from exc


def _look_at_pool(
    pool: WorkPool, variables: Mapping[str, Any], scaling: ScalingConfig, failure: FailureConfig
) -> Iterator[PlanLine]:
    yield grace_in(pool, variables, failure)
    if not has_variable(pool, "working_dir"):
        yield PlanLine("function", "ok", f"looked for in the image of work pool {pool.name!r} alone")
    if has_variable(pool, "num_gpus") and scaling.cluster is None:
        needed = scaling.most_workers if scaling.use_gpu else 0
        given = int(variables.get("num_gpus", default_of(pool, "num_gpus") or 0))
        text = f"{needed} needed, and work pool {pool.name!r} is asked for {given} (num_gpus)"
        yield PlanLine("gpus", "ok" if given >= needed else "wrong", text)
