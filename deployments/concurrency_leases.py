"""Deployments with a concurrency limit, whose flow runs a restart of Prefect's server may end."""

import warnings

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect_torch.tasks.prefect_api.paging import read_pages

from .server_settings import keeps_leases_in_memory

LEASES_LOST = (
    "each flow run holds a lease, which the Prefect server keeps in memory and loses at a restart, and Prefect then ends the "
    "flow run within minutes"
)
WITHOUT_LEASE = (
    "limit their work queue or work pool, which needs no lease (prefect work-queue set-concurrency-limit), or let the server "
    "keep leases in files (PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem)"
)


def warn_of_lost_lease(name: str) -> None:
    """Warn that a deployment has a concurrency limit if its server loses leases at a restart."""
    with get_client(sync_client=True) as client:
        if keeps_leases_in_memory(client):
            warnings.warn(f"deployment {name!r} has a concurrency limit: {LEASES_LOST}; {WITHOUT_LEASE}", stacklevel=3)


def is_limited(deployment: DeploymentResponse) -> bool:
    """Return whether the flow runs of a deployment hold a lease."""
    return deployment.global_concurrency_limit is not None


def limited_deployments(client: SyncPrefectClient) -> list[str]:
    """Return the names of all deployments with a concurrency limit; one request per 200 deployments."""
    return [deployment.name for deployment in read_pages(client.read_deployments) if is_limited(deployment)]
