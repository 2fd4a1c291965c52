"""The agreement of the ranks before a checkpoint is written, with the owner of each file."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from prefect_torch.ckpt.errors import CheckpointError, ReportMismatchError, ReportWithdrawnError
from prefect_torch.ckpt.runs.manifest import FileEntry, new_id
from prefect_torch.ckpt.state.plan import WriteItem
from prefect_torch.ckpt.state.planner import StateDecision, StateDescription, StatePlanner

from .background import BackgroundCommits
from .peers import Peers
from .remote_error import RemoteError

Upload: TypeAlias = Literal["sync", "async"]
_OF_EACH_RANK = {"rank", "files", "metadata", "state", "place", "following"}


@dataclass(frozen=True, slots=True)
class Intent:
    """The contribution of one rank to a report, or of neighbouring ranks that contribute alike.

    Attributes:
        rank: The rank, or the lowest.
        step: The step that it reports.
        upload: The upload mode, or None without a checkpoint.
        files: The paths of its files.
        metadata: The user's metadata of its part; that of several ranks is merged, and a lower rank's value wins.
        state: The description of its state, or None.
        place: Which directory of which machine has its files, the same for ranks that share it; "" if they are not adopted.
        error: The reason why it cannot take part in this report, or None.
        num_requests: How often it has called should_checkpoint() so far.
        asks_leader: Whether the leader decides after this report if the training goes on; rank 0's counts.
        awaits_commits: Whether it returns only once the background commits so far are durable, though it stores nothing.
        following: The files, the state and the place of each of the ranks that follow it.

    """

    rank: int
    step: int
    upload: Upload | None = None
    files: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    state: StateDescription | None = None
    place: str = ""
    error: str | None = None
    num_requests: int = 0
    asks_leader: bool = False
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
    def places(self) -> list[str]:
        """The place of each rank's files."""
        return [self.place, *(place for _, _, place in self.following)]

    def encode(self) -> bytes:
        """Return JSON, without the fields that have their default: rank 0 decodes those of all ranks."""
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
        sharing: The ranks whose directory a lower rank has reported, too, and adopts.
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


def never() -> bool:
    """Return that no termination is requested."""
    return False


class Rounds:
    """The rounds in which the ranks agree on their reports; every rank takes part in each, whatever it reports.

    Args:
        peers: The ranks.
        attempt: The attempt's number, for the ids of checkpoints.
        background: This rank's background commits.
        is_terminating: Returns whether termination of the training is requested; called on rank 0.

    Attributes:
        number: How many rounds this rank has begun.
        writes: What this rank writes of a state, by the plan of the newest agreement.
        desynchronized: The error because of which the ranks are no longer in the same round, or None.
        has_last_checkpoint: On rank 0, whether a checkpoint was agreed on since termination is requested.

    """

    def __init__(
        self, peers: Peers, attempt: int, background: BackgroundCommits, is_terminating: Callable[[], bool] = never
    ) -> None:
        self.number = 0
        self.writes: list[WriteItem] = []
        self.desynchronized: CheckpointError | None = None
        self.has_last_checkpoint = False
        self._peers = peers
        self._attempt = attempt
        self._background = background
        self._is_terminating = is_terminating
        self._plan = 0
        self._planner = StatePlanner()

    @property
    def next_begun(self) -> str:
        """The topic that rank 0 sets when it begins the round that this rank has not begun."""
        return f"{_topic(self.number)}/begun"

    def agree(self, intent: Intent, meanwhile: Callable[[], None]) -> Agreement:
        """Return rank 0's decision, on which every rank acts in the same way.

        A report with a checkpoint first waits until its commit may begin: a synchronous commit comes after the earlier ones,
        and a state's buffer is reused.

        Args:
            intent: This rank's.
            meanwhile: Called once, while the ranks wait for each other.

        Raises:
            CheckpointError: The reason why every rank must raise instead, or why the ranks are desynchronized.

        """
        if intent.upload is not None:
            self._wait_for_slot(intent.upload, has_state=intent.state is not None)
        agreement = self._take_part(intent, meanwhile)
        if agreement.error is not None:
            raise agreement.error.exception()
        if agreement.checkpoint_id is not None and intent.upload is None:  # this rank takes part in a commit of the others
            self._wait_for_slot(agreement.upload, has_state=agreement.state is not None)
        return agreement

    def _wait_for_slot(self, upload: Upload, *, has_state: bool) -> None:
        if self._background.commits:
            self._background.wait_for_slot(for_another=upload == "async" and not has_state)

    def abstain(self, error: Exception, step: int) -> None:
        """Take part in the round without a report, or this rank's next one would be paired with this one of the others.

        Args:
            error: The reason.
            step: The step of this rank's previous report.

        Raises:
            CheckpointError: From `error`, the failure of a background commit.

        """
        intent = Intent(self._peers.rank, step, error=f"{type(error).__name__}: {error}")
        try:
            agreement = self._take_part(intent, lambda: None)
        except CheckpointError:  # the ranks are desynchronized, which `finish` raises; `error` comes first
            return
        if agreement.error is not None and agreement.is_background_failure:
            raise agreement.error.exception() from error

    def _take_part(self, intent: Intent, meanwhile: Callable[[], None]) -> Agreement:
        peers, topic, begun = self._peers, _topic(self.number), self.next_begun
        if peers.rank == 0:
            peers.decide(begun, b"")  # a rank that waits for an answer of `should_checkpoint` gets none before this round
        self.number += 1
        try:
            encoded = peers.exchange(topic, intent.encode(), meanwhile, merge_intents)
            if encoded is None:
                meanwhile()  # while rank 0 decides
                agreement = Agreement.decode(peers.decision(topic))
            else:
                agreement = self._decide([each for data in encoded for each in decode_intents(data)], topic)
                peers.decide(topic, agreement.encode())
            self._receive_plan(agreement.state, topic)
        except CheckpointError as exc:
            self.desynchronized = exc
            raise
        if self.number > 1:
            previous = _topic(self.number - 2)  # all ranks are in this round, so all have read the previous one
            peers.forget_message(previous)
            peers.forget_decision(previous)
        if peers.rank == 0:
            peers.forget_decision(begun)
        elif agreement.is_background_failure:
            self._background.forget_failure()  # raised now, so not again later
        return agreement

    def _decide(self, intents: Sequence[Intent], topic: str) -> Agreement:
        state: StateDecision | ReportMismatchError | None
        try:
            state = self._decide_state(intents)
        except ReportMismatchError as exc:
            state = exc
        failure = self._take_failure(intents) if self._background.commits else None
        if failure is not None:
            return Agreement(intents[0].step, error=RemoteError.of(failure), is_background_failure=True)
        return self._end_if_requested(decide(intents, self._attempt, topic, state), intents[0].num_requests)

    def _take_failure(self, intents: Sequence[Intent]) -> CheckpointError | None:
        """Return the failure that this report raises, after the waits of all ranks: rank 0 may have none of its own."""
        if any(intent.awaits_commits for intent in intents):
            self._background.wait()
        for intent in intents:
            if intent.upload is not None:
                self._wait_for_slot(intent.upload, has_state=any(state is not None for state in intent.states))
        return self._background.take_failure()

    def _end_if_requested(self, agreement: Agreement, num_requests: int) -> Agreement:
        """Let the first checkpoint after a request of termination be the last.

        A function that calls should_checkpoint() may go on after that checkpoint and return by itself.
        """
        if agreement.checkpoint_id is None or not (self.has_last_checkpoint or self._is_terminating()):
            return agreement
        if self.has_last_checkpoint:
            return Agreement(agreement.step, ends_training=True)
        self.has_last_checkpoint = True
        return replace(agreement, ends_training=num_requests == 0)

    def _decide_state(self, intents: Sequence[Intent]) -> StateDecision | None:
        described = [state for intent in intents for state in intent.states]
        return None if all(state is None for state in described) else self._planner.decide(described)

    def _receive_plan(self, decision: StateDecision | None, topic: str) -> None:
        """Receive this rank's part of a new plan, also on a rank that reports no state."""
        if decision is None or decision.plan == self._plan:
            return
        if self._peers.rank == 0:
            parts = [[[write.shard, write.start, write.stop] for write in writes] for writes in self._planner.writes]
            self._peers.scatter(f"{topic}/plan", [json.dumps(part).encode() for part in parts])
        self.writes = [WriteItem(*fields) for fields in json.loads(self._peers.scattered(f"{topic}/plan"))]
        self._plan = decision.plan


def _topic(number: int) -> str:
    return f"report {number}"


def decide(
    intents: Sequence[Intent], attempt: int, topic: str = "", state: StateDecision | ReportMismatchError | None = None
) -> Agreement:
    """Return the agreement on the ranks' intents.

    Args:
        intents: Those of all ranks, by rank.
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
        return Agreement(step, asks_leader=intents[0].asks_leader)
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
        asks_leader=intents[0].asks_leader,
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
        first.setdefault("following", []).append([fields.get("files", []), fields.get("state"), fields.get("place", "")])
        if "metadata" in fields:
            first["metadata"] = fields["metadata"] | first.get("metadata", {})
    return json.dumps(merged).encode()


def decode_intents(data: bytes) -> list[Intent]:
    """Return the intents of a message: that of one rank, or those that `merge_intents` has merged."""
    decoded = json.loads(data)
    return [_intent(fields) for fields in (decoded if isinstance(decoded, list) else [decoded])]


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
                    f"rank {merged[parent].rank} reported a file {parent!r} where rank {entry.rank} reported a directory"
                )
    return tuple(merged[path] for path in sorted(merged))


def _shared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is equal in all ranks of one intent."""
    return {name: value for name, value in fields.items() if name not in _OF_EACH_RANK}


def _intent(fields: dict[str, Any]) -> Intent:
    if "state" in fields:
        fields["state"] = StateDescription.of_fields(fields["state"])
    if "following" in fields:
        fields["following"] = [
            (files, None if state is None else StateDescription.of_fields(state), place)
            for files, state, place in fields["following"]
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
    """Return the ranks whose place a lower rank has, too."""
    first: dict[str, int] = {}
    ranks = ((rank, place) for intent in intents for rank, place in enumerate(intent.places, intent.rank) if place)
    return [rank for rank, place in ranks if first.setdefault(place, rank) != rank]


def _parents(path: str) -> list[str]:
    names = path.split("/")[:-1]
    return ["/".join(names[: depth + 1]) for depth in range(len(names))]
