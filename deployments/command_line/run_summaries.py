"""The runs in a storage, told from its listing: no manifest is read."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from prefect_torch.ckpt import CheckpointStore, ObjectInfo, Storage
from prefect_torch.ckpt.attempts import Owner
from prefect_torch.ckpt.evaluations import manifest_id
from prefect_torch.ckpt.layout import Layout, attempt_number, stem
from prefect_torch.ckpt.manifest import step_of
from prefect_torch.ckpt.runs import list_runs

from .run_state import State, ending_of, state_of
from .terminal import note


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a listing tells of a run; the fields are the keys of `ls --json`.

    Attributes:
        name: The run's name.
        attempts: How many attempts it has had.
        latest_step: The step of the newest checkpoint, or None.
        checkpoints: How many are committed.
        bytes: What all data of checkpoints takes, committed or not.
        state: How the newest attempt ended; else "running", "lost" (its process is gone) or "unknown" (it runs, or ran, on
            another machine).

    """

    name: str
    attempts: int
    latest_step: int | None
    checkpoints: int
    bytes: int
    state: State


def summarize_runs(storage: Storage) -> Iterator[RunSummary]:
    """Yield the runs by name; costs a listing of each, and four small requests."""
    for name in sorted(list_runs(storage)):
        seen = _Seen(Layout(name))
        try:
            for info in storage.list(f"{name}/"):
                seen.add(info)
            if seen.is_run:
                yield seen.summary(CheckpointStore.open(storage, name))
        except PermissionError as exc:
            note(f"left out: {exc}")


@dataclass(slots=True)
class _Seen:
    layout: Layout
    newest_attempt: str | None = None
    newest_id: str | None = None
    num_attempts: int = 0
    num_checkpoints: int = 0
    data_bytes: int = 0
    outcomes: set[str] = field(default_factory=set)

    def add(self, info: ObjectInfo) -> None:
        """Count one object; they come ordered by key, so the last of a kind is the newest."""
        if info.key.startswith(self.layout.checkpoints):
            self.data_bytes += info.bytes
        elif info.key.startswith(self.layout.manifests):
            if (checkpoint_id := manifest_id(self.layout, info.key)) is not None:
                self.num_checkpoints += 1
                self.newest_id = checkpoint_id
        elif info.key.startswith(self.layout.attempts):
            if number := attempt_number(info.key):
                self.num_attempts, self.newest_attempt = number, info.key
        elif info.key.startswith(self.layout.outcomes):
            self.outcomes.add(stem(info.key))

    @property
    def is_run(self) -> bool:
        return self.newest_attempt is not None or self.newest_id is not None

    def summary(self, store: CheckpointStore) -> RunSummary:
        return RunSummary(
            name=store.run,
            attempts=self.num_attempts,
            latest_step=None if self.newest_id is None else step_of(self.newest_id),
            checkpoints=self.num_checkpoints,
            bytes=self.data_bytes,
            state=self._state(store),
        )

    def _state(self, store: CheckpointStore) -> State:
        claim = None if self.newest_attempt is None else store.get_json(self.newest_attempt)
        if claim is None:
            return "unknown"
        ended = stem(self.layout.outcome(self.num_attempts)) in self.outcomes
        try:
            return state_of(Owner(**claim["owner"]), ending_of(store, self.num_attempts) if ended else None)
        except (KeyError, TypeError):  # written by something else
            return "unknown"
