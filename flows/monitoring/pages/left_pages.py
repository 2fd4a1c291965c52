"""The pages that killed flow runs have left: nobody else says that they do not run any more."""

from collections.abc import Iterable
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterType
from prefect_torch.tasks.prefect_api.paging import read_pages

from .head import as_lost


def end_left_pages(client: SyncPrefectClient, flow_run_ids: Iterable[UUID], why: str) -> None:
    """Set those pages of flow runs that say "running" to "lost"; costs a request, and one for each such page.

    Args:
        client: A client of Prefect's API.
        flow_run_ids: Flow runs whose processes are gone, or were overtaken.
        why: What became of them, in a sentence of Markdown.

    """
    wanted = ArtifactFilter(
        type=ArtifactFilterType(any_=["markdown"]), flow_run_id=ArtifactFilterFlowRunId(any_=list(flow_run_ids))
    )
    for artifact in list(read_pages(client.read_artifacts, artifact_filter=wanted)):
        page = str(artifact.data)
        if (ended := as_lost(page, why)) != page:
            client.update_artifact(artifact.id, ArtifactUpdate(data=ended))
