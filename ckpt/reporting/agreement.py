"""The agreement of the ranks before a checkpoint is written, with the owner of each file."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prefect_torch.ckpt.errors import ReportMismatchError, ReportWithdrawnError
from prefect_torch.ckpt.runs.manifest import FileEntry, new_id

from .arguments import Upload
from .remote_error import RemoteError


@dataclass(frozen=True, slots=True)
class Intent:
    """One rank's contribution to a report.

    Attributes:
        rank: The rank.
        step: The step that it reports.
        upload: The upload mode, or None without a checkpoint.
        files: The paths of its files.
        metadata: The user's metadata of its part.
        state: The description of its state, or None.
        error: The reason why it cannot take part in this report, or None.
        asked: How often it has called should_checkpoint() so far.

    """

    rank: int
    step: int
    upload: Upload | None = None
    files: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    error: str | None = None
    asked: int = 0

    def encode(self) -> bytes:
        """Return JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Intent":
        """Undo `encode`."""
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Rank 0's decision from all intents; every rank acts on it in the same way.

    Attributes:
        step: The step of the report.
        checkpoint_id: The id to store under, or None when no rank reported a checkpoint.
        upload: The upload mode.
        owners: For each path that several ranks reported, the rank that stores it; the others only digest theirs, to compare.
        metadata: The ranks' metadata merged; a lower rank's value wins.
        state: The decision on the ranks' states, or None.
        refusal: The error that every rank must raise instead; then nothing is stored.
        is_background_failure: Whether the refusal is the error of a background commit, and not about this report.

    """

    step: int
    checkpoint_id: str | None = None
    upload: Upload = "sync"
    owners: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    refusal: RemoteError | None = None
    is_background_failure: bool = False

    def encode(self) -> bytes:
        """Return JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Agreement":
        """Undo `encode`."""
        fields = json.loads(data)
        refusal = fields.pop("refusal")
        return cls(**fields, refusal=None if refusal is None else RemoteError(**refusal))


def agree(intents: Sequence[Intent], attempt: int) -> Agreement:
    """Return the agreement on the ranks' intents.

    Args:
        intents: One per rank, by rank.
        attempt: The attempt, for the new id.

    """
    step = intents[0].step
    for intent in intents:
        if intent.error is not None:
            refused = ReportWithdrawnError(f"rank {intent.rank} could not report, so no rank did: {intent.error}")
            return Agreement(step, refusal=RemoteError.of(refused))
    bringing = [intent for intent in intents if intent.upload is not None]
    if (mismatch := _mismatch(intents, bringing)) is not None:
        return Agreement(step, refusal=RemoteError.of(ReportMismatchError(mismatch)))
    if not bringing:
        return Agreement(step)
    metadata: dict[str, Any] = {}
    for intent in reversed(bringing):
        metadata.update(intent.metadata)
    return Agreement(
        step,
        checkpoint_id=new_id(attempt, step),
        upload=bringing[0].upload or "sync",
        owners={path: min(ranks) for path, ranks in _ranks_by_path(bringing).items() if len(ranks) > 1},
        metadata=metadata,
    )


def merge_files(parts: Sequence[Sequence[FileEntry]]) -> tuple[FileEntry, ...]:
    """Return the files of all ranks, each path once, sorted by path.

    Raises:
        ReportMismatchError: If two ranks reported different bytes under one path, or a file where another has a directory.

    """
    merged: dict[str, FileEntry] = {}
    for entry in (entry for part in parts for entry in part):
        known = merged.setdefault(entry.path, entry)
        if (known.bytes, known.digest) != (entry.bytes, entry.digest):
            raise ReportMismatchError(
                f"rank {known.rank} and rank {entry.rank} both reported a file {entry.path!r} with different content; "
                'put the rank into its name, such as f"model-rank={rank}.pt"'
            )
    for path, entry in merged.items():
        for parent in _parents(path):
            if parent in merged:
                raise ReportMismatchError(
                    f"rank {merged[parent].rank} reported a file {parent!r} where rank {entry.rank} reported a folder"
                )
    return tuple(merged[path] for path in sorted(merged))


def _mismatch(intents: Sequence[Intent], bringing: Sequence[Intent]) -> str | None:
    first = intents[0]
    for intent in intents:
        if intent.asked not in (0, first.asked):  # a rank that never calls it waits for no answer
            return (
                f"rank {intent.rank} called should_checkpoint() {intent.asked} times but rank {first.rank} "
                f"{first.asked} times; call it equally often on every rank"
            )
        if intent.step != first.step:
            return (
                f"rank {intent.rank} reported step {intent.step} but rank {first.rank} reported step {first.step}; "
                "report the same step on every rank"
            )
    for intent in bringing:
        if intent.upload != bringing[0].upload:
            return (
                f"rank {intent.rank} reported with upload={intent.upload!r} but rank {bringing[0].rank} with "
                f"upload={bringing[0].upload!r}; use one way on every rank"
            )
    return None


def _ranks_by_path(intents: Sequence[Intent]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for intent in intents:
        for path in intent.files:
            ranks[path].append(intent.rank)
    return ranks


def _parents(path: str) -> list[str]:
    names = path.split("/")[:-1]
    return ["/".join(names[: depth + 1]) for depth in range(len(names))]
