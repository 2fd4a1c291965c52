"""The checkpoints of a run in storage, in bounded memory, and the table of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from prefect_torch.ckpt import Manifest, RetentionPolicy
from prefect_torch.ckpt.runs.metrics import Metrics, find_metric, flatten_metrics
from prefect_torch.ckpt.runs.retention import sort_by_score
from prefect_torch.ckpt.text import show_age, show_bytes
from prefect_torch.flows.monitoring.text import shorten, show_number, show_time

MAX_HELD = 2000
MAX_ROWS = 100
_MAX_METRICS = 8
_SHOWN_FIRST = ("best", "pinned", "in use")  # if there are more checkpoints than rows
_COLUMNS = ("id", "step", "kept because", "size", "age", "committed (UTC)")  # a metric of such a name gets a longer column name
_NOT_KEPT = "not kept; the next prune deletes it"


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint in storage.

    Attributes:
        id: Its id.
        step: Its step.
        metrics: Its metrics.
        bytes: The total size of its files.
        created_s: The time of its commit, in seconds since the epoch.

    """

    id: str
    step: int
    metrics: Metrics
    bytes: int
    created_s: float

    @property
    def created_at(self) -> datetime:
        """The time of its commit."""
        return datetime.fromtimestamp(self.created_s, timezone.utc)

    @classmethod
    def of(cls, manifest: Manifest) -> "StoredCheckpoint":
        """Return the checkpoint of a manifest."""
        return cls(manifest.id, manifest.step, manifest.metrics, manifest.total_bytes, manifest.created_at.timestamp())


class StoredCheckpoints:
    """Counts all checkpoints and holds up to 2,000 of them: of more, the newest, the best and the pinned.

    Args:
        policy: The retention policy, which defines the best.

    Attributes:
        num: The number of all checkpoints.
        bytes: The total size of all checkpoints.
        pinned: The ids of the pinned checkpoints.

    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._held: dict[str, StoredCheckpoint] = {}
        self.num = 0
        self.bytes = 0
        self.pinned: frozenset[str] = frozenset()

    @property
    def held(self) -> list[StoredCheckpoint]:
        """The held checkpoints, oldest first."""
        return [self._held[key] for key in sorted(self._held)]

    def replace(self, checkpoints: Iterable[StoredCheckpoint], pinned: Collection[str]) -> None:
        """Replace all checkpoints by those in storage."""
        self.num = self.bytes = 0
        self.pinned = frozenset(pinned)
        self._held.clear()
        for checkpoint in checkpoints:
            self.add(checkpoint)

    def add(self, checkpoint: StoredCheckpoint) -> None:
        """Record a committed checkpoint."""
        self.num += 1
        self.bytes += checkpoint.bytes
        self._held[checkpoint.id] = checkpoint
        if len(self._held) > MAX_HELD:
            self._drop_half()

    def remove(self, checkpoint_id: str, num_bytes: int) -> None:
        """Record that a checkpoint of that size is deleted; no effect if it is unknown."""
        if self._held.pop(checkpoint_id, None) is not None or self.num > len(self._held):
            self.num -= 1
            self.bytes -= num_bytes

    def discard(self, checkpoint_id: str) -> None:
        """Record that a checkpoint is deleted if it is held, since the size of others is unknown."""
        if (held := self._held.get(checkpoint_id)) is not None:
            self.remove(checkpoint_id, held.bytes)

    def _drop_half(self) -> None:
        best = sort_by_score(self.held, self._policy.checkpoint_score_attribute, self._policy.checkpoint_score_order)
        kept = {it.id for it in (*best[: MAX_HELD // 4], *self.held[-MAX_HELD // 4 :])} | self.pinned
        self._held = {key: it for key, it in self._held.items() if key in kept}


def checkpoint_rows(
    checkpoints: Sequence[StoredCheckpoint],
    kept: Mapping[str, Sequence[str]],
    first_metric: str | None,
    now_s: float,
) -> list[dict[str, str | int]]:
    """Return a row for each checkpoint, newest first; of more than `MAX_ROWS`, the best, pinned, used and newest ones.

    Args:
        checkpoints: The checkpoints in storage, oldest first.
        kept: The reasons to keep each, by id.
        first_metric: The score, whose column comes first; "a/b" for a nested one; None without a score.
        now_s: The time to which ages are counted.

    """
    shown = _choose(checkpoints, kept)
    names = _metric_names(shown, first_metric)

    def cells(checkpoint: StoredCheckpoint, names: Sequence[str]) -> dict[str, str | int]:
        columns = (f"metric {name}" if name in _COLUMNS else name for name in names)
        shown = [shorten(show_number(find_metric(checkpoint.metrics, name))) for name in names]
        return dict(zip(columns, shown, strict=True))

    return [
        {
            "id": checkpoint.id,
            "step": checkpoint.step,
            "kept because": ", ".join(kept.get(checkpoint.id, ())) or _NOT_KEPT,
            **cells(checkpoint, names[:1]),
            "size": show_bytes(checkpoint.bytes),
            "age": show_age(now_s - checkpoint.created_s),
            **cells(checkpoint, names[1:]),
            "committed (UTC)": show_time(checkpoint.created_s),
        }
        for checkpoint in shown
    ]


def _choose(checkpoints: Sequence[StoredCheckpoint], kept: Mapping[str, Sequence[str]]) -> list[StoredCheckpoint]:
    newest_first = sorted(checkpoints, key=lambda it: it.id, reverse=True)
    by_priority = sorted(newest_first, key=lambda it: not set(kept.get(it.id, ())) & set(_SHOWN_FIRST))
    return sorted(by_priority[:MAX_ROWS], key=lambda it: it.id, reverse=True)


def _metric_names(checkpoints: Sequence[StoredCheckpoint], first: str | None) -> list[str]:
    names = dict.fromkeys(name for checkpoint in checkpoints for name, _ in flatten_metrics(checkpoint.metrics))
    return sorted(names, key=lambda name: name != first)[:_MAX_METRICS]
