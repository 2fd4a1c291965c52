"""The agreement on a report: each rank's intent, and the decision of rank 0, with the owner of each file."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from prefect_torch.ckpt.errors import ReportMismatchError, ReportWithdrawnError
from prefect_torch.ckpt.reporting.exchange.remote_error import RemoteError
from prefect_torch.ckpt.runs.manifest import new_id
from prefect_torch.ckpt.state.planner import StateDecision, StateDescription

Upload: TypeAlias = Literal["sync", "async"]
AsksLeader: TypeAlias = Literal["never", "with a checkpoint", "always"]
_OF_EACH_RANK = {"rank", "files", "metadata", "state", "directory", "following"}


@dataclass(frozen=True, slots=True)
class Intent:
    """The contribution of one rank to a report, or of neighbouring ranks that contribute alike.

    Attributes:
        rank: The rank, or the lowest of several.
        step: The step that it reports.
        upload: The upload mode, or None without a checkpoint.
        files: The paths of its files.
        metadata: The user's metadata of its part; that of several ranks is merged, and a lower rank's value wins.
        state: The description of its state, or None.
        directory: The identity of the directory of its files, equal on ranks that share it; "" if they are not adopted.
        error: The reason why it cannot take part in this report, or None.
        num_requests: How often it has called should_checkpoint() so far.
        asks_leader: Whether the leader decides after this report if the training goes on: "with a checkpoint", if any rank
            stores one; only rank 0's value counts.
        awaits_commits: Whether it returns only once the background commits so far are durable, though it stores nothing.
        following: The files, the state and the directory of each of the ranks that follow it.

    """

    rank: int
    step: int
    upload: Upload | None = None
    files: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    state: StateDescription | None = None
    directory: str = ""
    error: str | None = None
    num_requests: int = 0
    asks_leader: AsksLeader = "never"
    awaits_commits: bool = False
    following: list[tuple[list[str], StateDescription | None, str]] = field(default_factory=list)

    @property
    def files_by_rank(self) -> list[list[str]]:
        """The paths of each rank's files."""
        return [self.files, *(files for files, _, _ in self.following)]

    @property
    def states(self) -> list[StateDescription | None]:
        """The description of each rank's state."""
        return [self.state, *(state for _, state, _ in self.following)]

    @property
    def directories(self) -> list[str]:
        """The identity of the directory of each rank's files."""
        return [self.directory, *(directory for _, _, directory in self.following)]

    def encode(self) -> bytes:
        """Return JSON without the fields that have their default, since rank 0 decodes the intents of all ranks."""
        fields = {name: value for name in self.__slots__ if (value := getattr(self, name))}
        if self.state is not None:
            fields["state"] = self.state.fields()
        return json.dumps({**fields, "rank": self.rank, "step": self.step}).encode()


@dataclass(frozen=True, slots=True)
class Agreement:
    """Rank 0's decision from all intents; every rank acts on it in the same way.

    Attributes:
        step: The step of the report.
        topic: The name of the report among the messages of its commit, unique in the attempt.
        checkpoint_id: The id to store under, or None when no rank reported a checkpoint.
        upload: The upload mode.
        owners: For each path that several ranks reported, the rank that stores it; the others only digest theirs, to compare.
        sharing: The ranks whose directory a lower rank also reported, and adopts.
        metadata: The ranks' metadata merged; a lower rank's value wins.
        state: The decision on the ranks' states, or None.
        error: The error that every rank must raise instead; then nothing is stored.
        is_background_failure: Whether that error is of a background commit, and not about this report.
        ends_training: Whether every rank's function ends with this report, since termination is requested.
        asks_leader: Whether the leader decides after this report if the training goes on.

    """

    step: int
    topic: str = ""
    checkpoint_id: str | None = None
    upload: Upload = "sync"
    owners: dict[str, int] = field(default_factory=dict)
    sharing: list[int] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    state: StateDecision | None = None
    error: RemoteError | None = None
    is_background_failure: bool = False
    ends_training: bool = False
    asks_leader: bool = False

    @property
    def is_background(self) -> bool:
        """Whether a checkpoint is stored in the background."""
        return self.checkpoint_id is not None and self.upload == "async"

    def encode(self) -> bytes:
        """Return JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Agreement":
        """Undo `encode`."""
        fields = json.loads(data)
        error, state = fields.pop("error"), fields.pop("state")
        return cls(
            **fields,
            error=None if error is None else RemoteError(**error),
            state=None if state is None else StateDecision(**state),
        )


def decide(
    intents: Sequence[Intent], attempt: int, topic: str = "", state: StateDecision | ReportMismatchError | None = None
) -> Agreement:
    """Return the agreement on the ranks' intents.

    Args:
        intents: The intents of all ranks, by rank.
        attempt: The attempt, for the new id.
        topic: The name of the report.
        state: The decision on the ranks' states, or the reason why there is none.

    """
    step = intents[0].step
    for intent in intents:
        if intent.error is not None:
            refused = ReportWithdrawnError(f"rank {intent.rank} could not report, so no rank did: {intent.error}")
            return Agreement(step, error=RemoteError.of(refused))
    storing = [intent for intent in intents if intent.upload is not None]
    if (mismatch := _mismatch(intents, storing)) is not None:
        return Agreement(step, error=RemoteError.of(ReportMismatchError(mismatch)))
    if isinstance(state, ReportMismatchError):
        return Agreement(step, error=RemoteError.of(state))
    if not storing:
        return Agreement(step, asks_leader=intents[0].asks_leader == "always")
    metadata: dict[str, Any] = {}
    for intent in reversed(storing):
        metadata.update(intent.metadata)
    return Agreement(
        step,
        topic,
        checkpoint_id=new_id(attempt, step),
        upload=storing[0].upload or "sync",
        owners={path: min(ranks) for path, ranks in _ranks_by_path(storing).items() if len(ranks) > 1},
        sharing=_sharing(storing),
        metadata=metadata,
        state=state,
        asks_leader=intents[0].asks_leader != "never",
    )


def merge_intents(encoded: Sequence[bytes]) -> bytes:
    """Return the encoded intents of neighbouring ranks, by rank, as one message for rank 0, which decodes thousands.

    Ranks that differ in nothing but files, states, and metadata become one intent.
    """
    merged: list[dict[str, Any]] = []
    for fields in map(json.loads, encoded):
        if not merged or _shared(fields) != _shared(merged[-1]):
            merged.append(fields)
            continue
        first = merged[-1]
        first.setdefault("following", []).append([fields.get("files", []), fields.get("state"), fields.get("directory", "")])
        if "metadata" in fields:
            first["metadata"] = fields["metadata"] | first.get("metadata", {})
    return json.dumps(merged).encode()


def decode_intents(data: bytes) -> list[Intent]:
    """Return the intents of a message: that of one rank, or those that `merge_intents` has merged."""
    decoded = json.loads(data)
    return [_intent(fields) for fields in (decoded if isinstance(decoded, list) else [decoded])]


def _shared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are equal for all ranks of one intent."""
    return {name: value for name, value in fields.items() if name not in _OF_EACH_RANK}


def _intent(fields: dict[str, Any]) -> Intent:
    if "state" in fields:
        fields["state"] = StateDescription.of_fields(fields["state"])
    if "following" in fields:
        fields["following"] = [
            (files, None if state is None else StateDescription.of_fields(state), directory)
            for files, state, directory in fields["following"]
        ]
    return Intent(**fields)


def _mismatch(intents: Sequence[Intent], storing: Sequence[Intent]) -> str | None:
    first = intents[0]
    for intent in intents:
        if intent.num_requests not in (0, first.num_requests):  # a rank that never calls it waits for no answer
            return (
                f"rank {intent.rank} called should_checkpoint() {intent.num_requests} times but rank {first.rank} "
                f"{first.num_requests} times; call it equally often on every rank"
            )
        if intent.step != first.step:
            return (
                f"rank {intent.rank} reported step {intent.step} but rank {first.rank} reported step {first.step}; "
                "report the same step on every rank"
            )
    for intent in storing:
        if intent.upload != storing[0].upload:
            return (
                f"rank {intent.rank} reported with upload={intent.upload!r} but rank {storing[0].rank} with "
                f"upload={storing[0].upload!r}; use one way on every rank"
            )
    return None


def _ranks_by_path(intents: Sequence[Intent]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for intent in intents:
        for rank, files in enumerate(intent.files_by_rank, intent.rank):
            for path in files:
                ranks[path].append(rank)
    return ranks


def _sharing(intents: Sequence[Intent]) -> list[int]:
    """Return the ranks whose directory a lower rank has, too."""
    first: dict[str, int] = {}
    by_rank = (pair for intent in intents for pair in enumerate(intent.directories, intent.rank))
    return [rank for rank, directory in by_rank if directory and first.setdefault(directory, rank) != rank]
