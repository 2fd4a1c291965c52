"""Who owns a run: attempts are claimed in order, and the newest claim fences all older ones."""

import os
import secrets
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .clock import utc_now
from .errors import FencedError
from .layout import attempt_number
from .manifest import FORMAT_VERSION, is_id
from .metrics import from_json, to_json
from .parallel_reads import read_all
from .store import CheckpointStore

Ending: TypeAlias = Literal["completed", "failed", "preempted", "cancelled"]
FailureKind: TypeAlias = Literal["user", "infrastructure", "preemption", "final"]


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that leads an attempt, told well enough to ask later whether it is alive.

    Attributes:
        flow_run_id: The Prefect flow run, or None outside one.
        host: The machine's name and boot.
        pid: The process.
        started: The process's start in kernel ticks, so that a reused pid is not mistaken for it; None outside of Linux.

    """

    flow_run_id: str | None
    host: str
    pid: int
    started: int | None

    @classmethod
    def current(cls, flow_run_id: str | None = None) -> "Owner":
        """Describe this process."""
        return cls(flow_run_id, _host(), os.getpid(), _start_ticks(os.getpid()))

    def is_dead(self) -> bool | None:
        """Say whether the process is gone; None when it ran on another machine."""
        if self.host != _host():
            return None
        return _start_ticks(self.pid) != self.started or not _exists(self.pid)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One claim on a run.

    Attributes:
        number: Counted from 1 over the life of the run.
        token: Tells two claimers of one number apart.
        owner: Who leads it.
        world_size: The number of ranks.
        resumed_from: The path or URL of the checkpoint that its ranks restore, or None.
        lineage: The first attempt whose checkpoints this one may restore (`resume="never"` begins a new lineage).
        claimed_at: When (UTC, ISO 8601, the owner's clock).
        settings: How the training ranks checkpoints: its retention policy's fields.

    """

    number: int
    token: str
    owner: Owner
    world_size: int
    resumed_from: str | None
    lineage: int
    claimed_at: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def restored_id(self) -> str | None:
        """The id of the checkpoint that its ranks restore, or None; while it lives, nobody may delete it."""
        checkpoint_id = (self.resumed_from or "").rpartition("/")[2]
        return checkpoint_id if is_id(checkpoint_id) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        attempt: Its number.
        ending: "completed", "failed", "preempted" or "cancelled".
        flow_run_id: The flow run that led it: retry budgets are counted per flow run.
        kind: What the failure counts against; None unless it failed.
        error: The error that ended it, as text, with the rank's own traceback.
        errors: Each failed rank's error.
        return_value: Rank 0's, where JSON can hold it in 1 MiB.

    """

    attempt: int
    ending: Ending
    flow_run_id: str | None = None
    kind: FailureKind | None = None
    error: str | None = None
    errors: dict[str, str] = field(default_factory=dict)
    return_value: Any = None


def list_attempts(store: CheckpointStore) -> Iterator[Attempt]:
    """Yield every attempt, oldest first."""
    keys = [info.key for info in store.storage.list(store.layout.attempts)]
    yield from (attempt for attempt in read_all(keys, partial(_read_attempt, store)) if attempt is not None)


def newest_attempt(store: CheckpointStore) -> Attempt | None:
    """Return the attempt that owns the run, or None before the first; a listing and one small read."""
    keys = [info.key for info in store.storage.list(store.layout.attempts)]
    readable = (attempt for key in reversed(keys) if (attempt := _read_attempt(store, key)) is not None)
    return next(readable, None)  # keys sort by number, then token


def claim_attempt(
    store: CheckpointStore,
    owner: Owner,
    *,
    world_size: int,
    lineage: int | None = None,
    settings: dict[str, Any] | None = None,
) -> Attempt:
    """Claim the next attempt number; no two claims end with the same one, on any storage.

    No conditional write is needed: every claim is a key of its own, written and then looked for. Of two that chose the
    same number, whichever lists last sees the other and moves on to the next number, so exactly one is the newest.
    """
    number = _newest_number(store) + 1
    if number == 1:
        run_info = {"format": FORMAT_VERSION, "run_id": str(uuid.uuid4()), "created_at": utc_now(), "created_by": owner.host}
        store.put_json(store.layout.run_info, run_info)
    while True:
        attempt = Attempt(
            number=number,
            token=secrets.token_hex(4),
            owner=owner,
            world_size=world_size,
            resumed_from=None,
            lineage=number if lineage is None else lineage,
            claimed_at=utc_now(),
            settings=settings or {},
        )
        key = store.layout.attempt(attempt.number, attempt.token)
        store.put_json(key, asdict(attempt))
        rivals = [info.key for info in store.storage.list(store.layout.attempts) if attempt_number(info.key) >= number]
        if rivals == [key]:
            return attempt
        store.storage.delete([key])
        number = max(attempt_number(rival) for rival in rivals) + 1


def record_resumed_from(store: CheckpointStore, attempt: Attempt, checkpoint: str) -> None:
    """Add to a claim which checkpoint its ranks restore; nobody else writes that key."""
    record = asdict(replace(attempt, resumed_from=checkpoint))
    store.put_json(store.layout.attempt(attempt.number, attempt.token), record)


def check_fence(store: CheckpointStore, attempt: int) -> None:
    """Return only if `attempt` is still the newest; one listing, with this attempt's claim alone as a rule.

    Raises:
        FencedError: If a newer attempt owns the run, or the claim is gone.

    """
    after = f"{store.layout.attempts}{attempt:06d}"
    numbers = {attempt_number(info.key) for info in store.storage.list(store.layout.attempts, after=after)}
    if max(numbers, default=attempt) > attempt:
        raise FencedError(
            f"attempt {attempt} of run {store.run!r} was overtaken by attempt {max(numbers)}: "
            "this process no longer owns the run and must stop"
        )
    if not numbers:
        raise FencedError(
            f"the claim of attempt {attempt} on run {store.run!r} is gone from {store.storage.url}: somebody deleted or moved "
            "the run while it was being trained, so this process must stop"
        )


def write_outcome(store: CheckpointStore, outcome: Outcome) -> None:
    """Record how an attempt ended."""
    store.put_json(store.layout.outcome(outcome.attempt), to_json(asdict(outcome)))  # type: ignore[arg-type]  # a dict stays one


def read_outcomes(store: CheckpointStore) -> list[Outcome]:
    """Return every recorded ending, oldest first; an attempt whose leader was killed has none."""
    keys = [info.key for info in store.storage.list(store.layout.outcomes)]
    return [outcome for outcome in read_all(keys, partial(_read_outcome, store)) if outcome is not None]


def read_outcome(store: CheckpointStore, attempt: int) -> Outcome | None:
    """Return how one attempt ended, by one small read; None while it runs, or if its leader was killed."""
    return _read_outcome(store, store.layout.outcome(attempt))


def _read_attempt(store: CheckpointStore, key: str) -> Attempt | None:
    record = store.get_json(key)
    return None if record is None else Attempt(**{**record, "owner": Owner(**record["owner"])})


def _read_outcome(store: CheckpointStore, key: str) -> Outcome | None:
    record = store.get_json(key)
    return None if record is None else Outcome(**from_json(record))  # type: ignore[arg-type]  # a dict stays one


def _newest_number(store: CheckpointStore) -> int:
    return max((attempt_number(info.key) for info in store.storage.list(store.layout.attempts)), default=0)


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold spaces; the start is the 22nd (proc_pid_stat(5)).
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
