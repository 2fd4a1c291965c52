"""An artifact of a flow run that is kept up to date, and how often that happens."""

import re
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import ObjectNotFound

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 30.0
_GROWTH = 1.15
_NOT_IN_KEYS = re.compile(r"[^a-z0-9]+")


class LiveArtifact:
    """Is created once for a flow run, when there is something to show, and updated from then on.

    Args:
        key: The key by which the UI finds it.
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
        if self._id is None or not _update(client, self._id, data, description):
            made = ArtifactCreate(key=self._key, type=self._kind, description=description, data=data, flow_run_id=flow_run_id)
            self._id = client.create_artifact(made).id
        self._shown = news


class PublishBackoff:
    """Bounds how often artifacts are published: each pause is 15 % longer than the one before, from 2 s up to 30 s.

    That is 16 times in the first 100 s, while somebody is likely to look, and twice a minute from the fourth minute on.

    Args:
        clock: Returns the time in seconds.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._due_s = clock()

    def wait_s(self) -> float:
        """Return the seconds until the next publication is due; 0 if it is due now."""
        return max(0.0, self._due_s - self._clock())

    def record(self) -> None:
        """Record a publication; a failed one counts too."""
        self._due_s = self._clock() + self._pause_s
        self._pause_s = min(self._pause_s * _GROWTH, LONGEST_PAUSE_S)


def artifact_key(run: str, path: str) -> str:
    """Return the prefix of the keys of a run's artifacts: its name in the letters of Prefect's keys, and a digest of its path.

    Runs with one name in two storages have different keys, and so have runs whose names differ only in letters that no key has.

    Args:
        run: The run's name.
        path: The run's local path or URL.

    """
    plain = _NOT_IN_KEYS.sub("-", run.lower()).strip("-") or "run"
    return f"{plain}-{sha256(path.encode()).hexdigest()[:6]}"


def _update(client: SyncPrefectClient, artifact_id: UUID, data: Any, description: str) -> bool:
    try:
        client.update_artifact(artifact_id, ArtifactUpdate(data=data, description=description))
    except ObjectNotFound:  # it was deleted, or the server has another database now
        return False
    return True
