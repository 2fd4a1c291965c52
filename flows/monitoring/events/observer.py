"""The events of a training, for automations: its attempts and checkpoints, and each checkpoint as an asset."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext
from prefect.events import Event, RelatedResource, Resource
from prefect.runtime import flow_run
from prefect.types.names import MAX_ASSET_KEY_LENGTH, RESTRICTED_ASSET_CHARACTERS
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.reporting.events import CommitEvent, ReportEvent
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, Outcome
from prefect_torch.ckpt.runs.manifest import attempt_of, step_of
from prefect_torch.ckpt.runs.metrics import Metrics, flatten_metrics
from prefect_torch.ckpt.runs.retention import score
from prefect_torch.tasks.training.job import TrainJob
from prefect_torch.tasks.training.observers import (
    AttemptEnded,
    AttemptStarted,
    CheckpointQuarantined,
    CheckpointsPruned,
    RanksStarted,
    TrainingEvent,
)

from .outbox import EventOutbox

ATTEMPT_STARTED = "prefect-torch.attempt.started"
ATTEMPT_FAILED = "prefect-torch.attempt.failed"
COMMITTED = "prefect-torch.checkpoint.committed"
PRUNED = "prefect-torch.checkpoint.pruned"
QUARANTINED = "prefect-torch.checkpoint.quarantined"
LONGEST_CLOSE_S = 15.0  # of the 20 for all observers together
_NO_NUMBER = (1, math.inf)  # sorts above missing scores and NaN, below every number
MATERIALIZED_BY = "prefect-torch"


class EventObserver:
    """Sends the events that automations can trigger on; each has the run, the storage and the attempt as labels.

    The resource of an attempt's event is `prefect-torch.run.<path or URL of the run>`, that of a checkpoint's event
    `prefect-torch.checkpoint.<path or URL of the checkpoint>`, with the run as a related resource in the role "run". The labels
    are `run`, `storage`, `attempt` and `prefect.run-count`, for a checkpoint also `checkpoint` (its path or URL) and `step`,
    for a commit also `is_best`: "true" if no checkpoint of the run has a better score by the retention policy (without a
    score, the newest is best). Metrics are in the payload, nested ones as "a/b".

    Args:
        job: The training.

    """

    def __init__(self, job: TrainJob) -> None:
        self._store = job.store
        self._best = _Best(job.policy)
        self._outbox = EventOutbox()
        self._attempt = 0
        self._run_count = flow_run.run_count
        self._upstream: tuple[str, ...] = ()

    def observe(self, event: TrainingEvent) -> None:
        """Send the events of `event`."""
        if isinstance(event, AttemptStarted):
            self._attempt_started(event.attempt, event.resumed_from)
        elif isinstance(event, CommitEvent):
            self._committed(event)
        elif isinstance(event, CheckpointsPruned):
            self._outbox.put(*(self._about_checkpoint(PRUNED, it.id, {"metrics": plain(it.metrics)}) for it in event.plan.drop))
        elif isinstance(event, CheckpointQuarantined):
            self._outbox.put(self._about_checkpoint(QUARANTINED, event.id, {"reason": event.reason}))
        elif isinstance(event, AttemptEnded):
            self._attempt_ended(event.outcome)
        else:
            assert isinstance(event, ReportEvent | RanksStarted)  # the history has the many reports; ranks are task runs

    def refresh(self, *, final: bool) -> None:
        """Send the remaining events if `final`."""
        if final:
            self._outbox.close(LONGEST_CLOSE_S)

    def _attempt_started(self, attempt: Attempt, resumed_from: str | None) -> None:
        self._attempt = attempt.number
        self._upstream = (self._store.path,) if resumed_from is None else (self._store.path, resumed_from)
        payload = {"resumed_from": resumed_from, "world_size": attempt.world_size}
        self._outbox.put(self._about_attempt(ATTEMPT_STARTED, attempt.number, payload), *map(referenced, self._upstream))
        self._best.read(self._store, before=attempt.number)  # last, since it fails with the storage

    def _committed(self, commit: CommitEvent) -> None:
        is_best = self._best.record(commit.metrics)
        metadata = {
            "run": self._store.run,
            "step": commit.step,
            "attempt": attempt_of(commit.id),
            "is_best": is_best,
            "bytes": commit.bytes,
            "duration_s": commit.duration_s,
            "stall_s": commit.stall_s,
            "metrics": plain(commit.metrics),
        }
        event = self._about_checkpoint(COMMITTED, commit.id, metadata, is_best="true" if is_best else "false")
        name = f"{self._store.run} step {commit.step}"
        self._outbox.put(event, materialized(self._store.path_of(commit.id), name, self._upstream, metadata))

    def _attempt_ended(self, outcome: Outcome) -> None:
        if outcome.ending not in ("failed", "preempted") or outcome.kind is None:  # without a kind, it was planned
            return
        payload = {"ending": outcome.ending, "kind": outcome.kind, "error": outcome.error or ""}
        self._outbox.put(self._about_attempt(ATTEMPT_FAILED, outcome.attempt, payload, ending=outcome.ending))

    def _about_attempt(self, event: str, attempt: int, payload: dict[str, Any], **labels: str) -> Event:
        return Event(event=event, resource=Resource({**self._run_labels(attempt), **labels}), payload=payload)

    def _about_checkpoint(self, event: str, checkpoint_id: str, payload: dict[str, Any], **labels: str) -> Event:
        path = self._store.path_of(checkpoint_id)
        run = self._run_labels(attempt_of(checkpoint_id))
        step = step_of(checkpoint_id)
        about = {
            "prefect.resource.id": f"prefect-torch.checkpoint.{path}",
            "prefect.resource.name": f"{self._store.run} step {step}",
            "checkpoint": path,
            "step": str(step),
        }
        related = RelatedResource({**run, "prefect.resource.role": "run"})
        return Event(event=event, resource=Resource({**run, **about, **labels}), related=[related], payload=payload)

    def _run_labels(self, attempt: int) -> dict[str, str]:
        return {
            "prefect.resource.id": f"prefect-torch.run.{self._store.path}",
            "prefect.resource.name": self._store.run,
            "run": self._store.run,
            "storage": self._store.storage.url,
            "attempt": str(attempt),
            "prefect.run-count": str(self._run_count),
        }


class _Best:
    """The best score of a run so far, by its retention policy."""

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._best = _NO_NUMBER

    def read(self, store: CheckpointStore, before: int) -> None:
        """Read the best score of earlier attempts; a small read for each checkpoint, and none without a score."""
        manifests = [] if self._policy.checkpoint_score_attribute is None else store.list()
        self._best = _NO_NUMBER  # the best one may be in quarantine by now
        for manifest in manifests:
            if manifest.attempt < before:
                self.record(manifest.metrics)

    def record(self, metrics: Metrics) -> bool:
        """Record a checkpoint and return whether no earlier one is better; a score that is not a number is never the best."""
        attribute = self._policy.checkpoint_score_attribute
        if attribute is None:
            return True
        found = score(metrics, attribute, self._policy.checkpoint_score_order)
        if found < self._best:
            return False
        self._best = found
        return True


def plain(metrics: Metrics) -> dict[str, Any]:
    """Return nested metrics as one flat dict for strict JSON, with NaN and infinities as text."""
    return {name: finite(value) for name, value in flatten_metrics(metrics)}


def finite(value: object) -> object:
    """Return a value for strict JSON: NaN and infinities as text."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def asset_key(location: str) -> str:
    """Return the asset key of a run or checkpoint: its URL, or file:// and its path.

    Prefect allows no "%" in a key, so a character that it refuses is written "~20" where a URL has "%20". A location that is
    longer than the longest key is replaced by its digest and its end.
    """
    url = location if "://" in location else f"file://{location}"
    key = "".join(f"~{ord(letter):02x}" if letter in RESTRICTED_ASSET_CHARACTERS else letter for letter in url)
    if len(key) <= MAX_ASSET_KEY_LENGTH:
        return key
    beginning = f"{key.partition('://')[0]}://{xxhash.xxh3_128_hexdigest(key.encode())}-"
    return beginning + key[len(beginning) - MAX_ASSET_KEY_LENGTH :]


def referenced(upstream: str) -> Event:
    """Return the event that the asset `upstream`, a run's or checkpoint's path or URL, is used."""
    return Event(
        event="prefect.asset.referenced", resource=Resource(AssetContext.asset_as_resource(Asset(key=asset_key(upstream))))
    )


def materialized(checkpoint: str, name: str, upstream: Sequence[str], metadata: Mapping[str, Any]) -> Event:
    """Return the event that a checkpoint was committed.

    Args:
        checkpoint: Its path or URL.
        name: The asset's name.
        upstream: The paths or URLs that it was made from.
        metadata: The event's payload, JSON-serializable.

    """
    asset = Asset(key=asset_key(checkpoint), properties=AssetProperties(name=name, url=checkpoint))
    related = [AssetContext.asset_as_related(Asset(key=asset_key(location))) for location in upstream]
    related.append(AssetContext.related_materialized_by(MATERIALIZED_BY))
    return Event(
        event="prefect.asset.materialization.succeeded",
        resource=Resource(AssetContext.asset_as_resource(asset)),
        related=[RelatedResource(it) for it in related],
        payload=dict(metadata),
    )
