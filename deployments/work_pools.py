"""Work pools with this package's job templates."""

import json
from importlib.resources import files
from typing import Any, Literal, TypeAlias, cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import WorkPool
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect_torch.tasks.prefect_api.embedded_server.tying import tie_new_servers

Kind: TypeAlias = Literal["process", "docker", "kubernetes"]
KINDS: tuple[Kind, ...] = ("process", "docker", "kubernetes")
_TEMPLATES = "prefect_torch.deployments.job_templates"


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
    template = cast("dict[str, Any]", json.loads(files(_TEMPLATES).joinpath(f"{kind}.json").read_bytes()))
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
    with _client() as client:
        try:
            return client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=template)).id
        except ObjectAlreadyExists:
            known = client.read_work_pool(name)
        if known.type != kind:
            raise ValueError(f"work pool {name!r} exists already, with the type {known.type!r}: choose another name")
        client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
    return known.id


def read_work_pool(name: str) -> WorkPool:
    """Return the work pool, or raise ValueError with how to create it.

    Raises:
        ValueError: If there is none of that name.

    """
    try:
        with _client() as client:
            return client.read_work_pool(name)
    except ObjectNotFound:  # Prefect's own error has no text
        raise ValueError(
            f"there is no work pool {name!r}: create it with `prefect work-pool create {name} --type process`, or for "
            f"containers with GPUs by create_work_pool({name!r}, 'docker') or 'kubernetes' of prefect_torch.deployments"
        ) from None


def _client() -> SyncPrefectClient:
    tie_new_servers()  # one that starts here has a minute, and ends with this process
    return get_client(sync_client=True)
