"""One artifact of a flow run, kept up to date."""

import re
from hashlib import sha256
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import ObjectNotFound

_NOT_IN_KEYS = re.compile(r"[^a-z0-9]+")


class LiveArtifact:
    """Is created when there is something to show, once for a flow run, and then updated.

    Args:
        key: By which the UI finds it.
        kind: How the UI shows it.

    """

    def __init__(self, key: str, kind: Literal["progress", "table", "markdown"]) -> None:
        self._key = key
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
        """Show `data` by one request, or none if its news was shown before.

        Args:
            client: Whom to tell.
            flow_run_id: Whose artifact it is.
            data: As Prefect wants it for this kind.
            description: Markdown above it.
            news: What of `data` and `description` is worth a request when it changes; None for all of `data`.

        """
        news = data if news is None else news
        if self._id is not None and news == self._shown:
            return
        if self._id is None or not _update(client, self._id, data, description):
            made = ArtifactCreate(key=self._key, type=self._kind, description=description, data=data, flow_run_id=flow_run_id)
            self._id = client.create_artifact(made).id
        self._shown = news


def artifact_key(run: str, path: str) -> str:
    """Return what the keys of a run's artifacts begin with: its name as Prefect's keys may be, and a digest of its path.

    Runs of one name in two storages have different keys; so have runs whose names differ in letters that a key may not have.

    Args:
        run: The run's name.
        path: Where the run lies: a local path or a URL.

    """
    plain = _NOT_IN_KEYS.sub("-", run.lower()).strip("-") or "run"
    return f"{plain}-{sha256(path.encode()).hexdigest()[:6]}"


def _update(client: SyncPrefectClient, artifact_id: UUID, data: Any, description: str) -> bool:
    try:
        client.update_artifact(artifact_id, ArtifactUpdate(data=data, description=description))
    except ObjectNotFound:  # somebody deleted it, or the server has another database now
        return False
    return True
