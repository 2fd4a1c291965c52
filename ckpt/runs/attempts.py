"""Ownership of a run: attempts are claimed in order, and the newest claim fences all older ones."""

import os
import re
import reprlib
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from prefect_torch.ckpt.errors import (
    CheckpointError,
    FencedError,
    MalformedRecordError,
    StorageError,
    UnsupportedFormatError,
)
from prefect_torch.ckpt.runs.layout import attempt_number
from prefect_torch.ckpt.runs.manifest import MAX_ATTEMPT, AttemptNumber, is_id
from prefect_torch.ckpt.runs.metrics import to_json
from prefect_torch.ckpt.runs.record_fields import Count, Within
from prefect_torch.ckpt.runs.records import FORMAT_VERSION, decode
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.storage.process_ids import is_alive
from prefect_torch.ckpt.text import utc_now

from .retention import RetentionPolicy

Ending: TypeAlias = Literal["completed", "stopped", "failed", "preempted", "cancelled"]
_RANK = re.compile(r"[0-9]{1,9}")
_REWRITTEN_WITHIN_S = 5.0  # a claim is half there at most so long, on a storage that replaces objects in place
FailureKind: TypeAlias = Literal["user", "infrastructure", "out_of_memory", "preemption", "final"]


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that leads an attempt, with enough detail to check later whether it is alive.

    Attributes:
        flow_run_id: The Prefect flow run, or None outside one.
        host: The machine's name, its boot, and the pid namespace, outside of which a pid means nothing: two containers may
            have one name and one boot. Outside of Linux the name alone; without a namespace where version 0.1 wrote it.
        pid: The process id.
        started: The process's start in kernel ticks, so that a reused pid is not mistaken for it; None outside of Linux.
        budget: The budgets of the flow run that its failures count against: None for the initial ones, else the Prefect
            state in which the flow run had ended when it was run again.

    """

    flow_run_id: str | None
    host: str
    pid: Annotated[int, Within(1, 2**31 - 1)]  # the range of os.kill
    started: Count | None
    budget: str | None = None

    @classmethod
    def current(cls, flow_run_id: str | None = None, budget: str | None = None) -> "Owner":
        """Describe this process."""
        return cls(flow_run_id, _host(), os.getpid(), _start_ticks(os.getpid()), budget)

    def is_earlier_process_of(self, other: "Owner") -> bool:
        """Return whether this is another process of the same flow run, whose failures count against the same budgets."""
        alike = replace(self, host=other.host, pid=other.pid, started=other.started) == other
        return alike and self != other

    @property
    def machine(self) -> str:
        """The machine's name."""
        return self.host.partition("/")[0]

    def is_process_gone(self) -> bool | None:
        """Return whether the process is gone; None if its pid is meaningless here: on another machine, in another container."""
        here = _host()
        if self.host not in (here, here.rpartition("/")[0]):
            return None
        return _start_ticks(self.pid) != self.started or not is_alive(self.pid)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One claim on a run.

    Attributes:
        number: Counted from 1 over the life of the run.
        token: Distinguishes two claims of one number.
        owner: The leader's process.
        world_size: The number of ranks; 0 of a sweep.
        resumed_from: The path or URL of the checkpoint that its ranks restore, or None.
        lineage: The first attempt whose checkpoints this one may restore (`resume="never"` begins a new lineage).
        claimed_at: The time of the claim (UTC, ISO 8601, the owner's clock).
        settings: How the training sorts checkpoints: its retention policy's fields.

    """

    number: AttemptNumber
    token: str
    owner: Owner
    world_size: Count
    resumed_from: str | None
    lineage: AttemptNumber
    claimed_at: str
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
        kind: The kind of the failure, which selects its budget; None unless it failed. "preempted" without a kind was planned,
            such as to go on with more ranks.
        error: The error that ended it, as text, with the rank's own traceback.
        errors: Each failed rank's error.
        return_value: What JSON can hold of rank 0's return value, up to 1 MiB.

    """

    attempt: AttemptNumber
    ending: Ending
    flow_run_id: str | None = None
    kind: FailureKind | None = None
    error: str | None = None
    errors: Annotated[dict[str, str], _check_ranks] = field(default_factory=dict)
    return_value: Any = None

    @property
    def is_done(self) -> bool:
        """Whether the attempt completed, or was stopped by a sweep's decision, so that nothing of it is to be done again."""
        return self.ending in ("completed", "stopped")


@dataclass(frozen=True, slots=True)
class _RunInfo:
    """The part of run.json that readers need: its format, by which a newer version is recognized."""


def list_attempts(run: Run) -> Iterator[Attempt]:
    """Yield every attempt, oldest first; a claim that cannot be read is left out with a warning."""
    for attempt in read_all(_claims(run), lambda key: run.leave_out_newer(partial(read_attempt, run, key))):
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


def newest_claims(run: Run, keys: Sequence[str] | None = None) -> tuple[list[Attempt], list[str]]:
    """Return the attempts with the highest number that can be read, and the keys of newer claims that cannot.

    There are several with one number only if a process was killed between its claim and the withdrawal of it.

    Args:
        run: The run.
        keys: The keys of all claims, sorted, if they were just listed; None lists them.

    Raises:
        UnsupportedFormatError: If a newer version made one.

    """
    readable: list[Attempt] = []
    unreadable: list[str] = []
    number = 0
    for key in reversed(_claims(run) if keys is None else keys):  # keys sort by number, then token
        if attempt_number(key) < number:
            break
        attempt = read_attempt(run, key)
        if attempt is not None:
            readable.append(attempt)
            number = attempt_number(key)
        elif _is_there(run, key):  # else it was withdrawn
            unreadable.append(key)
    return readable, unreadable


def claim_attempt(
    run: Run,
    owner: Owner,
    *,
    world_size: int,
    lineage: int | None = None,
    settings: dict[str, Any] | None = None,
    known: frozenset[str] | None = None,
) -> Attempt:
    """Claim the next attempt number; no two claims end with the same one, on any storage.

    No conditional write is needed: every claim is a key of its own, written and then looked for. Of two claims of the same
    number, the last to list sees the other and moves on to the next number, so exactly one is the newest. A claim that is not
    seen through is removed again, as far as the storage answers: it would fence whoever leads the run.

    Args:
        run: The run.
        owner: The process that is to lead it.
        world_size: The number of ranks; 0 of a sweep.
        lineage: The first attempt whose checkpoints it may restore; None for its own.
        settings: The fields of the retention policy.
        known: For `claim_unless_led`: the keys of the claims that were looked at; None takes the run whoever has claimed it.

    Raises:
        UnsupportedFormatError: If a newer version began the run.

    """
    run.get_record(_RunInfo, run.layout.run_info, "what a run begins with")
    claims = _claims(run)
    if known is not None and not known.issuperset(claims):
        raise _ClaimedMeanwhileError
    number = _next_number(claims)
    if number == 1:
        run_info = {"format": FORMAT_VERSION, "run_id": str(uuid.uuid4()), "created_at": utc_now(), "created_by": owner.host}
        run.put_json(run.layout.run_info, run_info)
    while True:
        if number > MAX_ATTEMPT:
            raise CheckpointError(f"run {run.name!r} in {run.storage.url} has attempt {number - 1}, and {MAX_ATTEMPT} at most")
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
        key = run.layout.attempt(attempt.number, attempt.token)
        claims = _put_claim(run, key, attempt)
        is_newest = [it for it in claims if attempt_number(it) >= number] == [key]
        is_next = known is None or known.issuperset(set(claims) - {key})
        if is_newest and is_next:
            return attempt
        run.storage.delete([key])
        if key not in claims:
            raise StorageError(
                f"{run.storage.url} does not list {key}, which was stored just before: who leads run {run.name!r} cannot be "
                "told from such listings, so no attempt was begun; try again, and give another storage if that does not help"
            )
        if known is not None:
            raise _ClaimedMeanwhileError
        number = _next_number(claims)


class _ClaimedMeanwhileError(Exception):
    """Another process has claimed the run since it was looked at."""


def _put_claim(run: Run, key: str, attempt: Attempt) -> list[str]:
    """Store a claim and return the keys of all claims; after an error, remove it as far as the storage answers."""
    try:
        run.put_json(key, asdict(attempt))
        return _claims(run)
    except BaseException:
        with suppress(StorageError, OSError):
            run.storage.delete([key])
        raise


def claim_unless_led(
    run: Run, refuse_if_led: Callable[[Attempt], None], claim: Callable[[Attempt | None, frozenset[str] | None], Attempt]
) -> Attempt:
    """Claim the next attempt unless a live attempt leads the run; of several concurrent claims exactly one succeeds.

    Whoever finds a claim that it has not looked at came later, and looks again: right before its own claim, since
    `refuse_if_led` may take minutes, or right after, and then it withdraws its own. So the first claim is not fenced by those
    that are refused, or only for the moment between two neighboring requests. Costs a listing and a small read before the
    claim.

    A claim that cannot be read may be that of a live leader who rewrites it at this moment. If it cannot be read after five
    seconds either, its writer was killed, or it is no claim: nobody leads by it.

    Args:
        run: The run.
        refuse_if_led: Raises if the owner of an attempt leads the run.
        claim: Claims a number by `claim_attempt`, given the newest attempt, which does not lead the run, and the known claims.

    Raises:
        RunBusyError: Or any other error of `refuse_if_led`; then nothing is claimed.

    """
    torn: set[str] = set()
    while True:
        keys = _claims(run)
        readable, unreadable = newest_claims(run, keys)
        if not torn.issuperset(unreadable):
            torn = set(unreadable)
            time.sleep(_REWRITTEN_WITHIN_S)
            continue
        for attempt in readable:
            refuse_if_led(attempt)
        with suppress(_ClaimedMeanwhileError):
            return claim(readable[0] if readable else None, frozenset(keys))


def record_resumed_from(run: Run, attempt: Attempt, checkpoint: str) -> None:
    """Record in a claim which checkpoint its ranks restore; no other process writes that key."""
    record = asdict(replace(attempt, resumed_from=checkpoint))
    run.put_json(run.layout.attempt(attempt.number, attempt.token), record)


def record_world_size(run: Run, attempt: Attempt, world_size: int) -> Attempt:
    """Record in a claim, and return, with how many ranks the attempt begins, where that was unknown when it was made."""
    known = replace(attempt, world_size=world_size)
    if known != attempt:
        run.put_json(run.layout.attempt(attempt.number, attempt.token), asdict(known))
    return known


def check_fence(run: Run, attempt: int) -> None:
    """Raise FencedError unless `attempt` is the newest; one listing, usually of this attempt's claim alone.

    Raises:
        FencedError: If a newer attempt owns the run, or the claim is gone.

    """
    after = f"{run.layout.attempts}{attempt:06d}"
    numbers = {attempt_number(info.key) for info in run.storage.list(run.layout.attempts, after=after)}
    if (newest := max(numbers, default=attempt)) > attempt:
        raise FencedError(
            f"attempt {attempt} of run {run.name!r} was overtaken by attempt {newest}: "
            "this process no longer owns the run and must stop"
        )
    if attempt not in numbers:
        raise FencedError(
            f"the claim of attempt {attempt} on run {run.name!r} is gone from {run.storage.url}: somebody deleted or moved "
            "the run while it was being trained, so this process must stop"
        )


def write_outcome(run: Run, outcome: Outcome) -> None:
    """Record how an attempt ended."""
    run.put_json(run.layout.outcome(outcome.attempt), to_json(asdict(outcome)))  # type: ignore[arg-type]  # a dict stays one


def read_outcomes(run: Run) -> list[Outcome]:
    """Return every recorded outcome, oldest first; an attempt whose leader was killed has none, or an unreadable one."""
    keys = run.keys(run.layout.outcomes)
    return [outcome for outcome in read_all(keys, partial(_read_outcome, run)) if outcome is not None]


def read_outcome(run: Run, attempt: int) -> Outcome | None:
    """Return the outcome of one attempt by a small read; None while it runs, if its leader was killed, or with a warning."""
    return _read_outcome(run, run.layout.outcome(attempt))


def read_attempt(run: Run, key: str) -> Attempt | None:
    """Return the claim at `key`; None if it does not exist, or with a warning if it cannot be read.

    Raises:
        UnsupportedFormatError: If a newer version made it.

    """
    return run.get_record(Attempt, key, "the claim of an attempt")


def _claims(run: Run) -> list[str]:
    return [key for key in run.keys(run.layout.attempts) if attempt_number(key)]


def _read_outcome(run: Run, key: str) -> Outcome | None:
    # An attempt without a readable outcome counts as possibly alive, which protects its files; its failure kind is unknown.
    return run.leave_out_newer(lambda: run.get_record(Outcome, key, "the outcome of an attempt"))


def _next_number(claims: Sequence[str]) -> int:
    return max(map(attempt_number, claims), default=0) + 1


def _is_there(run: Run, key: str) -> bool:
    try:
        run.storage.size(key)
    except FileNotFoundError:
        return False
    return True


def _host() -> str:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    named = f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
    return f"{named}/{namespace.stat().st_ino}" if namespace.exists() else named


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold spaces; the start is the 22nd (proc_pid_stat(5)).
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])
