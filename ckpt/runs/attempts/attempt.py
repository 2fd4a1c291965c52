"""The records of a run's attempts: what each began with, and how it ended."""

import logging
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from prefect_torch.ckpt.errors import MalformedRecordError, UnsupportedFormatError
from prefect_torch.ckpt.runs.deletion.reserve import put_despite_full_disk
from prefect_torch.ckpt.runs.layout import attempt_number, outcome_number
from prefect_torch.ckpt.runs.manifest import AttemptNumber, is_id
from prefect_torch.ckpt.runs.metrics import to_json
from prefect_torch.ckpt.runs.records.fields import Count, Time, decode
from prefect_torch.ckpt.runs.records.small_records import left_out_if_newer
from prefect_torch.ckpt.runs.retention import RetentionPolicy
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.storage.retry import is_refusal
from prefect_torch.ckpt.storage.sizes import find_size

from .owner import Owner

Ending: TypeAlias = Literal["completed", "stopped", "failed", "preempted", "cancelled"]
EndState: TypeAlias = Ending | Literal["suspended", "yielded"]
FailureKind: TypeAlias = Literal["user", "infrastructure", "out_of_memory", "preemption", "final"]
_logger = logging.getLogger(__name__)
_RANK = re.compile(r"[0-9]{1,9}")
# The first words of the error of an attempt that was interrupted, by which `Outcome.state` determines the reason.
SUSPENDED, GAVE_WAY = "suspended", "gave way"
_INTERRUPTIONS: dict[str, EndState] = {SUSPENDED: "suspended", GAVE_WAY: "yielded"}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One claim on a run.

    Attributes:
        number: Counted from 1 over the life of the run.
        token: Distinguishes two claims of one number.
        owner: The leader's process.
        world_size: The number of ranks; 0 for a sweep.
        resumed_from: The path or URL of the checkpoint that its ranks restore, or None.
        lineage: The first attempt whose checkpoints this one may restore (`resume="never"` begins a new lineage).
        claimed_at: The time of the claim (UTC, ISO 8601, the owner's clock).
        settings: The fields of the training's retention policy, by which it also sorts checkpoints.

    """

    number: AttemptNumber
    token: str
    owner: Owner
    world_size: Count
    resumed_from: str | None
    lineage: AttemptNumber
    claimed_at: Time
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_sweep(self) -> bool:
        """Whether it leads a sweep, which has no ranks of its own, rather than a training."""
        return self.world_size == 0

    @property
    def policy(self) -> RetentionPolicy:
        """The retention policy in `settings`, as far as this version knows its fields; else one that keeps everything."""
        try:
            return decode(RetentionPolicy, self.settings, "they", "a retention policy's")
        except (MalformedRecordError, UnsupportedFormatError):
            return RetentionPolicy()

    @property
    def restored_id(self) -> str | None:
        """The id of the checkpoint that its ranks restore, or None; it must not be deleted while the attempt lives."""
        checkpoint_id = (self.resumed_from or "").rpartition("/")[2]
        return checkpoint_id if is_id(checkpoint_id) else None


def _check_ranks(errors: dict[str, str]) -> None:
    for rank in errors:
        if not _RANK.fullmatch(rank):
            raise ValueError(f"{reprlib.repr(rank)} is no rank")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        attempt: Its number.
        ending: "completed", "stopped" (a sweep's decision ended it after a report), "failed", "preempted" or "cancelled".
        flow_run_id: The flow run that led it: retry budgets are counted per flow run.
        kind: The kind of the failure, which selects its budget; None unless it failed or was preempted. A preemption
            without a kind was planned, such as to continue with more ranks.
        error: The error that ended it, as text, with the rank's own traceback.
        errors: Each failed rank's error, with the traceback of the first 16.
        return_value: Rank 0's return value as far as JSON can represent it, up to 1 MiB.
        lacks_reports: Whether its last reports could not be stored: those with a checkpoint are in its manifest alone.

    """

    attempt: AttemptNumber
    ending: Ending
    flow_run_id: str | None = None
    kind: FailureKind | None = None
    error: str | None = None
    errors: Annotated[dict[str, str], _check_ranks] = field(default_factory=dict)
    return_value: Any = None
    lacks_reports: bool = False

    @property
    def state(self) -> EndState:
        """The ending as shown: "suspended" or "yielded" (to a more urgent flow run) if that was the reason, else `ending`."""
        if self.ending == "preempted" and self.kind is None:
            for words, state in _INTERRUPTIONS.items():
                if (self.error or "").startswith(words):
                    return state
        return self.ending

    @property
    def is_done(self) -> bool:
        """Whether the attempt completed, or was stopped by a sweep's decision, so that none of its work must be repeated."""
        return self.ending in ("completed", "stopped")


def list_attempts(run: Run, since: int = 0) -> Iterator[Attempt]:
    """Yield attempt `since` and all later ones, oldest first; a claim that cannot be read is left out with a warning."""
    keys = [key for key in claim_keys(run) if attempt_number(key) >= since]
    for attempt in read_all(keys, lambda key: left_out_if_newer(partial(read_attempt, run, key))):
        if attempt is not None:
            yield attempt


def newest_attempt(run: Run) -> Attempt | None:
    """Return the attempt that owns the run, or None before the first; a listing and one small read.

    A claim that is torn or malformed is skipped with a warning.

    Raises:
        UnsupportedFormatError: If a newer version made it: whether it lives, and which checkpoint it restores, is unknown.

    """
    readable, _ = newest_claims(run)
    return readable[0] if readable else None


def read_attempt(run: Run, key: str) -> Attempt | None:
    """Return the claim at `key`; None if it does not exist, or with a warning if it cannot be read.

    Raises:
        UnsupportedFormatError: If a newer version made it.

    """
    return run.records.get(Attempt, key, "the claim of an attempt", key_of=partial(claim_key, run))


def claim_key(run: Run, attempt: Attempt) -> str:
    """Return the key of an attempt's claim, which no other attempt ever has, whatever was deleted of the run."""
    return run.layout.attempt(attempt.number, attempt.token)


def claim_keys(run: Run) -> list[str]:
    """Return the keys of all claims, sorted: by number, then by token."""
    return [key for key in run.keys(run.layout.attempts) if attempt_number(key)]


def newest_claims(run: Run, keys: Sequence[str] | None = None) -> tuple[list[Attempt], list[str]]:
    """Return the attempts with the highest number that can be read, and the keys of newer claims that cannot.

    Several attempts have the same number only if a process was killed before it withdrew its claim.

    Args:
        run: The run.
        keys: The keys of all claims, sorted, if they were just listed; None lists them.

    Raises:
        UnsupportedFormatError: If a newer version made one.

    """
    readable: list[Attempt] = []
    unreadable: list[str] = []
    number = 0
    for key in reversed(claim_keys(run) if keys is None else keys):
        if attempt_number(key) < number:
            break
        attempt = read_attempt(run, key)
        if attempt is not None:
            readable.append(attempt)
            number = attempt_number(key)
        elif find_size(run.storage, key) is not None:  # else it was withdrawn
            unreadable.append(key)
    return readable, unreadable


def rewrite_claim(run: Run, attempt: Attempt) -> None:
    """Store a claim again, with a digest: one changed digit could begin a new lineage, or make a prune keep less."""
    put_despite_full_disk(run, lambda: run.records.put(claim_key(run, attempt), asdict(attempt)))


def record_resumed_from(run: Run, attempt: Attempt, checkpoint: str) -> None:
    """Record in a claim which checkpoint its ranks restore, if it may be replaced; no other process writes that key."""
    _rewrite_if_allowed(run, replace(attempt, resumed_from=checkpoint))


def record_world_size(run: Run, attempt: Attempt, world_size: int) -> Attempt:
    """Record in a claim the number of ranks that the attempt begins with, if that was unknown before; return the attempt.

    A claim that may not be replaced stays as it is.
    """
    known = replace(attempt, world_size=world_size)
    if known != attempt:
        _rewrite_if_allowed(run, known)
    return known


def _rewrite_if_allowed(run: Run, attempt: Attempt) -> None:
    """Store a claim again, or log a warning: who may replace no object may delete none, so no prune needs to know more.

    So it is at Google, and at Azure under a policy of immutability; S3 keeps versions, and asks for no right to delete.
    """
    try:
        rewrite_claim(run, attempt)
    except PermissionError as exc:
        if not is_refusal(exc):
            raise
        _logger.warning("the claim of attempt %d on run %r stays as it was stored at first: %s", attempt.number, run.name, exc)


def write_outcome(run: Run, outcome: Outcome) -> None:
    """Record how an attempt ended."""
    run.records.put(run.layout.outcome(outcome.attempt), to_json(asdict(outcome)))  # type: ignore[arg-type]  # a dict stays one


def read_outcomes(run: Run, since: int = 0) -> list[Outcome]:
    """Return the recorded outcomes of attempt `since` and of all later ones, oldest first.

    An attempt whose leader was killed has none, or an unreadable one.
    """
    keys = [key for key in run.keys(run.layout.outcomes) if outcome_number(key) >= since]
    return [outcome for outcome in read_all(keys, partial(_read_outcome, run)) if outcome is not None]


def read_outcome(run: Run, attempt: int) -> Outcome | None:
    """Return the outcome of one attempt by a small read; None, with a warning, if it cannot be read.

    It is also None while the attempt runs, or if its leader was killed.
    """
    return _read_outcome(run, run.layout.outcome(attempt))


def _read_outcome(run: Run, key: str) -> Outcome | None:
    # An attempt without a readable outcome counts as possibly alive, which protects its files; its failure kind is unknown.
    def key_of(outcome: Outcome) -> str:
        return run.layout.outcome(outcome.attempt)

    return left_out_if_newer(lambda: run.records.get(Outcome, key, "the outcome of an attempt", key_of=key_of))
