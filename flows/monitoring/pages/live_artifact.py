"""An artifact of a flow run that is kept up to date."""

import re
from contextlib import suppress
from hashlib import sha256
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactCollectionFilter,
    ArtifactCollectionFilterKey,
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import ObjectNotFound
from prefect_torch.ckpt.storage.specs.location import canonical
from prefect_torch.ckpt.text import encodable
from prefect_torch.flows.monitoring.text import storable

_NOT_IN_KEYS = re.compile(r"[^a-z0-9]+")
_MOST_VERSIONS = 100  # of a page that several flow runs show


def add_version(
    client: SyncPrefectClient, flow_run_id: UUID | None, key: str, page: str, description: str, *, in_place: bool
) -> None:
    """Add a version of a page that several flow runs show, or update the newest one.

    The newest hundred versions stay: Prefect's server by default deletes none of them, and its database would fill up. A new
    version costs one more request, and in the long run another to delete an old one.

    Args:
        client: A client of Prefect's API.
        flow_run_id: The flow run to which a new version belongs.
        key: The key by which the UI finds it.
        page: Its Markdown.
        description: Markdown above it.
        in_place: Whether the newest version is updated, if there is one: costs one more request, and adds no version.

    """
    page, description = encodable(page), encodable(description)
    if in_place:
        wanted = ArtifactCollectionFilter(key=ArtifactCollectionFilterKey(any_=[key]))
        found = client.read_latest_artifacts(artifact_filter=wanted)
        if found and _update(client, found[0].latest_id, page, description):
            return
    made = ArtifactCreate(key=key, type="markdown", description=description, data=page, flow_run_id=flow_run_id)
    client.create_artifact(made)
    _delete_old_versions(client, key)


class LiveArtifact:
    """An artifact that is created once for a flow run, when there is something to show, and updated from then on.

    Args:
        key: The key by which the UI finds it.
        kind: How the UI shows it.
        may_exist: Whether an earlier process, or try, of the flow run may have created it; costs one request.

    """

    def __init__(self, key: str, kind: Literal["progress", "table", "markdown"], *, may_exist: bool = False) -> None:
        self._key = key
        self._may_exist = may_exist
        self._kind = kind
        self._id: UUID | None = None
        self._shown: object = None

    @property
    def is_shown(self) -> bool:
        """Whether it exists."""
        return self._id is not None

    def show(
        self, client: SyncPrefectClient, flow_run_id: UUID | None, data: Any, description: str, news: object = None
    ) -> None:
        """Show `data` by one request, or by none if the same news is already shown.

        Args:
            client: A client of Prefect's API.
            flow_run_id: The flow run that the artifact belongs to.
            data: The content, in Prefect's form for this kind.
            description: Markdown above it.
            news: The part of `data` and `description` whose change is worth a request; None for all of `data`.

        """
        news = data if news is None else news
        if self._id is not None and news == self._shown:
            return
        if self._may_exist and flow_run_id is not None:
            self._id, self._may_exist = _find(client, self._key, flow_run_id), False
        description, data = encodable(description), storable(data)
        if self._id is None or not _update(client, self._id, data, description):
            made = ArtifactCreate(key=self._key, type=self._kind, description=description, data=data, flow_run_id=flow_run_id)
            self._id = client.create_artifact(made).id
        self._shown = news


def artifact_key(run: str, path: str) -> str:
    """Return the prefix of the keys of a run's artifacts: its name in the letters of Prefect's keys, and a digest of its path.

    Runs with one name in two storages have different keys, and so have runs whose names differ only in letters that no key has.
    A run has one key, however its path is spelled.

    Args:
        run: The run's name.
        path: The run's local path or URL.

    """
    plain = _NOT_IN_KEYS.sub("-", run.lower()).strip("-") or "run"
    return f"{plain}-{sha256(canonical(path).encode()).hexdigest()[:6]}"


def _delete_old_versions(client: SyncPrefectClient, key: str) -> None:
    """Delete up to two versions of a page that are not among the newest hundred, since one has been added."""
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
    newest_first = ArtifactSort.CREATED_DESC
    for artifact in client.read_artifacts(artifact_filter=wanted, sort=newest_first, offset=_MOST_VERSIONS, limit=2):
        with suppress(ObjectNotFound):  # another flow run has deleted it
            client.delete_artifact(artifact.id)


def _find(client: SyncPrefectClient, key: str, flow_run_id: UUID) -> UUID | None:
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=[key]), flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    return next(
        (artifact.id for artifact in client.read_artifacts(artifact_filter=wanted, sort=ArtifactSort.CREATED_DESC)), None
    )


def _update(client: SyncPrefectClient, artifact_id: UUID, data: Any, description: str) -> bool:
    try:
        client.update_artifact(artifact_id, ArtifactUpdate(data=data, description=description))
    except ObjectNotFound:  # it was deleted, or the server has another database now
        return False
    return True
