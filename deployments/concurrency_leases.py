"""Deployments with a concurrency limit, whose flow runs a restart of Prefect's server may end."""

import warnings
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError

IN_MEMORY = "prefect.server.concurrency.lease_storage.memory"
LEASES_LOST = (
    "each flow run holds a lease, which the Prefect server keeps in memory and loses at a restart, and Prefect then ends the "
    "flow run within minutes"
)
WITHOUT_LEASE = (
    "limit their work queue or work pool, which needs no lease (prefect work-queue set-concurrency-limit), or let the server "
    "keep leases in files (PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease_storage.filesystem)"
)
_PAGE = 200


def keeps_leases_in_memory(client: SyncPrefectClient) -> bool:
    """Return whether a Prefect server loses its leases at a restart; False for Prefect Cloud, which keeps them."""
    try:
        settings: dict[str, Any] = client.request("GET", "/admin/settings").json()
    except PrefectHTTPStatusError:
        return False
    return bool(settings.get("server", {}).get("concurrency", {}).get("lease_storage") == IN_MEMORY)


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
    names: list[str] = []
    offset = 0
    while page := client.read_deployments(limit=_PAGE, offset=offset):
        names.extend(deployment.name for deployment in page if is_limited(deployment))
        offset += len(page)
    return names
