"""Base job templates for work pools with GPUs: Prefect's own, with additional variables.

- process: `visible_gpus`, as CUDA_VISIBLE_DEVICES; memory and /dev/shm are the machine's. A cancelled flow run has 30 seconds.
- docker: `num_gpus` or `gpu_ids`, `shared_memory`, and an init process that forwards signals; the machine needs NVIDIA's
  container toolkit. Docker gives each container the first `num_gpus` of the machine: for concurrent flow runs, give all of them
  (-1) and `ipc_mode="host"`, so that trainings see each other's locks, or work pools with different `gpu_ids`. A template with
  `num_gpus=0` requests no driver; for AMD's GPUs, also give `devices=["/dev/kfd", "/dev/dri"]`.
  `container_create_kwargs` cannot be merged, so the parts that trainings need are separate variables: `ipc_mode`, `ulimits`,
  `devices`, `cap_add`, ….
- kubernetes: `num_gpus`, `shared_memory`, `termination_grace_s`, `node_selector`, `tolerations`; the cluster needs NVIDIA's
  device plugin.

Containers run `prefect-torch execute`, which leaves a flow the container's whole grace period for a last checkpoint. One
that is cancelled in Prefect has 300 s, a setting of Prefect's server; then its worker ends the container.

From a terminal: `prefect work-pool create gpu-pool --type kubernetes --base-job-template FILE`, with a file of this directory.
"""

import json
from importlib.resources import files
from typing import Any, Literal, TypeAlias, cast
from uuid import UUID

import prefect_torch.tasks.prefect_api.embedded_server  # noqa: F401 - ties a server that starts here, gives it a minute
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import WorkPool
from prefect.exceptions import ObjectAlreadyExists

Kind: TypeAlias = Literal["process", "docker", "kubernetes"]
KINDS: tuple[Kind, ...] = ("process", "docker", "kubernetes")


def job_template(kind: Kind, **defaults: Any) -> dict[str, Any]:
    """Return the base job template for work pools of the type `kind`.

    Args:
        kind: "process", "docker" or "kubernetes".
        defaults: Default values of its variables, such as `num_gpus=8`.

    Raises:
        ValueError: If there is no such template, or it has no such variable.

    """
    if kind not in KINDS:
        raise ValueError(f"there is no template for work pools of the type {kind!r}: give one of {', '.join(KINDS)}")
    template = cast("dict[str, Any]", json.loads(files(__name__).joinpath(f"{kind}.json").read_bytes()))
    variables = template["variables"]["properties"]
    for name, value in defaults.items():
        if name not in variables:
            raise ValueError(f"jobs of {kind} work pools have no variable {name!r}: they have {', '.join(variables)}")
        variables[name]["default"] = value
    if kind == "docker":
        _request_gpus(template, defaults)
    return template


def _request_gpus(template: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Request a driver from Docker only if there are to be GPUs, and a number of GPUs only if they are not named."""
    options, variables = template["job_configuration"]["container_create_kwargs"], template["variables"]["properties"]
    if not defaults.get("num_gpus", 1) and not defaults.get("gpu_ids"):
        del options["device_requests"], variables["num_gpus"], variables["gpu_ids"]
    elif defaults.get("gpu_ids"):
        del options["device_requests"][0]["Count"], variables["num_gpus"]


def create_work_pool(name: str, kind: Kind, **defaults: Any) -> UUID:
    """Create the work pool `name` with this package's template, or update an existing one; return its id.

    Args:
        name: The work pool's name.
        kind: "process", "docker" or "kubernetes"; an existing work pool must have this type.
        defaults: Default values of the template's variables, such as `num_gpus=8`.

    Raises:
        ValueError: If there is no such template, it has no such variable, or the work pool is of another type.

    """
    template = job_template(kind, **defaults)
    with get_client(sync_client=True) as client:
        try:
            return client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=template)).id
        except ObjectAlreadyExists:
            known = client.read_work_pool(name)
        if known.type != kind:
            raise ValueError(f"work pool {name!r} exists already, with the type {known.type!r}: choose another name")
        client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
    return known.id


def has_variable(work_pool: WorkPool, name: str) -> bool:
    """Return whether jobs of `work_pool` have the variable `name`."""
    return name in work_pool.base_job_template.get("variables", {}).get("properties", {})


def default_of(work_pool: WorkPool, name: str) -> Any:
    """Return the default of the variable `name`; None without one."""
    return work_pool.base_job_template.get("variables", {}).get("properties", {}).get(name, {}).get("default")
