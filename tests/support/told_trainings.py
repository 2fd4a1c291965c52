"""What observers of checkpoints need of a training, and the events that a Prefect server has of it."""

from dataclasses import dataclass, field
from datetime import datetime, timezone

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events import Event
from prefect.events.filters import EventFilter
from prefect.runtime import flow_run
from prefect_servers import wait_until
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.reporting.events import CommitEvent
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest, new_id
from prefect_torch.flows.monitoring.events.observer import EventObserver


@dataclass
class Job:
    """The part of a TrainJob that observers of checkpoints look at."""

    folder: str
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    run: str = "run"

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore.open(self.folder, self.run)

    def claim(self):
        return claim_attempt(self.store, Owner.current(), world_size=2)

    def commit(self, attempt: int, step: int, **metrics) -> CommitEvent:
        """Put a manifest into the storage, as ranks do, and return what the leader is told of it."""
        store, checkpoint_id = self.store, new_id(attempt, step)
        files = (FileEntry("state", 7, "0" * 32, 0),)
        manifest = Manifest(checkpoint_id, step, attempt, metrics, files, 2, None, datetime.now(timezone.utc))
        store.storage.put_bytes(store.layout.manifest(checkpoint_id), manifest.encode())
        return CommitEvent(checkpoint_id, step, metrics, bytes=7, duration_s=0.5, stall_s=0.25)


def tell_all(job: Job, *events) -> str:
    """Let an observer see `events` in a flow run, whose id is returned."""

    @flow(name="told")
    def told() -> str:
        observer = EventObserver(job)
        for event in events:
            observer.observe(event)
        observer.refresh(final=True)
        return str(flow_run.id)

    return told()


def events_about(resource: str, num_expected: int) -> list[Event]:
    """Return the server's events about resources whose id begins so, as they happened, once it has as many as expected."""
    chosen = EventFilter.model_validate({"resource": {"id_prefix": [resource]}, "order": "ASC"})
    events: list[Event] = []

    def have_come() -> bool:
        events[:] = client.read_events(chosen, limit=50).events
        return len(events) >= num_expected

    with get_client(sync_client=True) as client:
        wait_until(have_come, lambda: [event.event for event in events])
    return events
