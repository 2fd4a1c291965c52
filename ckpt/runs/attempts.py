"""Ownership of a run: attempts are claimed in order, and the newest claim fences all older ones."""

import os
import re
import reprlib
import secrets
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from prefect_torch.ckpt.errors import CheckpointError, FencedError, MalformedRecordError, StorageError
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


def _policy(settings: dict[str, Any]) -> RetentionPolicy:
    try:
        return decode(RetentionPolicy, settings, "they", "a retention policy's")
    except MalformedRecordError as exc:
        raise ValueError(str(exc)) from exc


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
    settings: Annotated[dict[str, Any], _policy] = field(default_factory=dict)

    @property
    def is_sweep(self) -> bool:
        """Whether it leads a sweep, which has no ranks of its own, rather than a training."""
        return self.world_size == 0

    @property
    def policy(self) -> RetentionPolicy:
        """The retention policy in `settings`, as far as this version knows its fields."""
        return _policy(self.settings)

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
    readable = (attempt for key in reversed(_claims(run)) if (attempt := read_attempt(run, key)) is not None)
    return next(readable, None)  # keys sort by number, then token


def claim_attempt(
    run: Run,
    owner: Owner,
    *,
    world_size: int,
    lineage: int | None = None,
    settings: dict[str, Any] | None = None,
) -> Attempt:
    """Claim the next attempt number; no two claims end with the same one, on any storage.

    No conditional write is needed: every claim is a key of its own, written and then looked for. Of two claims of the same
    number, the last to list sees the other and moves on to the next number, so exactly one is the newest.

    Raises:
        UnsupportedFormatError: If a newer version began the run.

    """
    run.get_record(_RunInfo, run.layout.run_info, "what a run begins with")
    number = _newest_number(run) + 1
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
        run.put_json(key, asdict(attempt))
        rivals = [it for it in run.keys(run.layout.attempts) if attempt_number(it) >= number]
        if rivals == [key]:
            return attempt
        run.storage.delete([key])
        if not rivals:
            raise StorageError(
                f"{run.storage.url} does not list {key}, which was stored just before: who leads run {run.name!r} cannot be "
                "told from such listings, so no attempt was begun; try again, and give another storage if that does not help"
            )
        number = max(map(attempt_number, rivals)) + 1


def claim_unless_led(run: Run, refuse_if_led: Callable[[Attempt], None], claim: Callable[[Attempt | None], Attempt]) -> Attempt:
    """Claim the next attempt unless a live attempt leads the run; of several concurrent claims exactly one succeeds.

    A claimer that finds claims between the attempt that it looked at and its own number came later: it withdraws, and looks
    again. So the first claim is not fenced by those that are refused. Costs a listing and a small read before the claim,
    and a listing after it.

    Args:
        run: The run.
        refuse_if_led: Raises if the owner of an attempt leads the run.
        claim: Claims a number, given the newest attempt, which does not lead the run.

    Raises:
        RunBusyError: Or any other error of `refuse_if_led`; then nothing is claimed.

    """
    while True:
        previous = newest_attempt(run)
        if previous is not None:
            refuse_if_led(previous)
        claimed = claim(previous)
        seen = 0 if previous is None else previous.number
        numbers = map(attempt_number, run.keys(run.layout.attempts))
        if not any(seen < number < claimed.number for number in numbers):
            return claimed
        run.storage.delete([run.layout.attempt(claimed.number, claimed.token)])


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


def _newest_number(run: Run) -> int:
    return max(map(attempt_number, run.keys(run.layout.attempts)), default=0)


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
