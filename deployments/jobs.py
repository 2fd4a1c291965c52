"""What the jobs of a work pool give a training: their variables, time for a last checkpoint, and files that outlast them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkPool
from prefect_torch.flows import FailureConfig, RunConfig, ScalingConfig
from prefect_torch.flows.monitoring.temporary_storage import lost_with_container
from prefect_torch.flows.planning import TO_END_S, PlanLine, compare_grace
from prefect_torch.tasks.prefect_api.work_pools import default_of, has_variable

from .server_settings import CANCELLATION_LIMIT, longest_cancellation_s

_WORKERS_GIVE_S = 30.0  # of process workers, after a cancellation
_RESERVED = ("cpu", "memory")
_NODES = "node_selector"
_OF_IMAGE = ("kubernetes.io/arch", "kubernetes.io/os")  # labels of the nodes that can run it
_NAME_AN_IMAGE = ("image", "task_definition_arn")  # the second in ECS


def job_variables_for(pool: WorkPool, scaling: ScalingConfig, run: RunConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a training's jobs in `pool`, beside those that are `given`.

    Raises:
        ValueError: If the checkpoints would be lost with the container, or the container would have Prefect's image.

    """
    variables: dict[str, Any] = {}
    if has_variable(pool, "working_dir"):  # the default is a temporary directory of the flow run
        variables["working_dir"] = str(Path.cwd())
    elif (loss := lost_with_container(pool, run)) is not None:
        raise ValueError(loss)
    if has_variable(pool, "image") and not any(given.get(name) or default_of(pool, name) for name in _NAME_AN_IMAGE):
        raise ValueError(
            f"containers of work pool {pool.name!r} would have Prefect's image, which lacks this package and the function: "
            "give image=..., or the work pool's variable `image` a default, as by create_work_pool(..., image=...)"
        )
    if has_variable(pool, "num_gpus"):
        are_named = "gpu_ids" in given and has_variable(pool, "gpu_ids")  # Docker takes their number or their names
        is_here = scaling.use_gpu and scaling.cluster is None
        variables["num_gpus"] = scaling.most_workers if is_here and not are_named else 0
    return variables


def variables_of_resumer(pool: WorkPool, trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the jobs that restart a training, which take seconds: its own, without a GPU.

    In Kubernetes, also without what only the node of a training may have: another such node may have to be awaited or booted.

    Args:
        pool: The work pool of both.
        trained: The job variables of the training's deployment.

    """
    variables = dict(trained)
    if has_variable(pool, "num_gpus"):
        variables["num_gpus"] = 0
    for resource in _RESERVED:
        request, limit = f"{resource}_request", f"{resource}_limit"
        if has_variable(pool, request) and any(trained.get(name) or default_of(pool, name) for name in (request, limit)):
            variables[request] = "0"  # left out, it is the limit
    selected = trained.get(_NODES) or default_of(pool, _NODES)
    if isinstance(selected, dict) and selected:  # and not the name of a variable of Prefect
        variables[_NODES] = {label: value for label, value in selected.items() if label in _OF_IMAGE}
    return variables


def grace_in(pool: WorkPool, job_variables: Mapping[str, Any], failure: FailureConfig) -> PlanLine:
    """Return a plan's line on whether ranks have their grace before a flow run of `pool` that is told to end is killed."""
    line = _grace_of_process(pool, job_variables, failure)
    with get_client(sync_client=True) as client:
        limit_s = longest_cancellation_s(client)
    if line.status != "ok" or limit_s is None:
        return line
    remedy = f"a larger {CANCELLATION_LIMIT} to Prefect's server"
    cancelled = compare_grace(failure, limit_s, f"a cancelled flow run of work pool {pool.name!r}", remedy)
    return line if cancelled.status == "ok" else cancelled


def _grace_of_process(pool: WorkPool, job_variables: Mapping[str, Any], failure: FailureConfig) -> PlanLine:
    command = job_variables.get("command") or default_of(pool, "command") or ""
    if pool.type == "docker" and "prefect-torch execute" in command:  # whoever stops it sets the limit
        least = f"`docker stop` needs --time {failure.grace_s + TO_END_S:g} for a container of work pool {pool.name!r}"
        return PlanLine("grace", "ok", f"ranks have {failure.grace_s:g} s for a last checkpoint, and {least}")
    given_s = job_variables.get("termination_grace_s", default_of(pool, "termination_grace_s") or _WORKERS_GIVE_S)
    remedy = "in a Kubernetes work pool of create_work_pool() a larger termination_grace_s"
    return compare_grace(failure, given_s, f"a flow run of work pool {pool.name!r}", remedy)
