"""Deployments as Prefect's server knows them."""

from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from .paging import read_pages


def read_deployment(client: SyncPrefectClient, deployment: str | UUID) -> DeploymentResponse:
    """Return a deployment.

    Args:
        client: A client of the server.
        deployment: "flow/deployment", or its id.

    Raises:
        ObjectNotFound: If there is no such deployment; the message names the existing ones.

    """
    try:
        if isinstance(deployment, UUID):
            return client.read_deployment(deployment)
        return client.read_deployment_by_name(deployment)
    except ObjectNotFound as exc:  # Prefect's own has no text
        known = ", ".join(_full_names(client)) or "none"
        raise ObjectNotFound(exc.http_exc, f"there is no deployment {str(deployment)!r}; those deployed are: {known}") from None


def _full_names(client: SyncPrefectClient) -> list[str]:
    deployments = list(read_pages(client.read_deployments))
    flows = {flow_id: client.read_flow(flow_id).name for flow_id in {it.flow_id for it in deployments}}
    return sorted(f"{flows[it.flow_id]}/{it.name}" for it in deployments)
