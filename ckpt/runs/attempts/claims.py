"""Ownership of a run: attempts are claimed in order, and the newest claim fences all older ones."""

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from prefect_torch.ckpt.errors import CheckpointError, FencedError, StorageError
from prefect_torch.ckpt.runs.deletion.reserve import keep_space, put_despite_full_disk
from prefect_torch.ckpt.runs.layout import attempt_number, outcome_number
from prefect_torch.ckpt.runs.manifest import MAX_ATTEMPT, attempt_of
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.local_files.names import find_other_spelling
from prefect_torch.ckpt.storage.machine.clocks import Stopwatch
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.storage.records import FORMAT_VERSION
from prefect_torch.ckpt.storage.retry import with_retries
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.ckpt.text import utc_now

from .attempt import Attempt, claim_key, claim_keys, newest_claims, rewrite_claim
from .begun import lists_anything
from .owner import Owner

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_LISTED_WITHIN_S = 20.0  # how long a gateway may leave out a claim, if the run's first object exists
_RENEWED_AFTER_S = 24 * 3600.0
_REWRITTEN_WITHIN_S = 5.0  # the longest that a claim is partly written, on a storage that replaces objects in place


@dataclass(frozen=True, slots=True)
class _RunInfo:
    """The part of run.json that readers need: its format, by which a newer version is recognized."""


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
    completed is removed again, as far as the storage answers: it would fence the leader of the run.

    Args:
        run: The run.
        owner: The process that is to lead it.
        world_size: The number of ranks; 0 for a sweep.
        lineage: The first attempt whose checkpoints it may restore; None for its own.
        settings: The fields of the retention policy.
        known: For `claim_unless_led`: the keys of the claims that were checked; None claims the run regardless of others.

    Raises:
        ValueError: If the run's directory is that of another run, whose name differs in case alone.
        UnsupportedFormatError: If a newer version began the run.
        StorageError: If the storage fails, or does not list the claim that it has just stored.
        CheckpointError: If the run has no attempt number left.

    """
    _check_spelling(run)
    is_known = run.records.get(_RunInfo, run.layout.run_info, "what a run begins with") is not None
    number = next_number(run, claim_keys(run) if known is None else known)  # before the last look at the claims
    claims = claim_keys(run)
    if known is not None and not known.issuperset(claims):
        raise _ClaimedMeanwhileError
    if not (claims and is_known):
        run_info = {"format": FORMAT_VERSION, "run_id": str(uuid.uuid4()), "created_at": utc_now(), "created_by": owner.host}
        run.records.put_json(run.layout.run_info, run_info)
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
        key = claim_key(run, attempt)
        claims = _put_claim(run, key, attempt)
        is_newest = [it for it in claims if attempt_number(it) >= number] == [key]
        is_next = known is None or known.issuperset(set(claims) - {key})
        if is_newest and is_next:
            keep_space(run)
            return attempt
        run.storage.delete([key])
        if known is not None:
            raise _ClaimedMeanwhileError
        number = _newest_number(claims) + 1


def _check_spelling(run: Run) -> None:
    """Raise ValueError if the run's directory is another run's, since case is ignored there."""
    place = run.storage.local_path(run.name)
    if place is not None and (other := find_other_spelling(place)) is not None:
        raise ValueError(f"run {run.name!r} would be the run {other}, since case is ignored there: give it another name")


class _ClaimNotListedError(StorageError):
    """A listing leaves out the claim of this process, although the run exists."""


class _ClaimedMeanwhileError(Exception):
    """Another process has claimed the run since its claims were checked."""


def _put_claim(run: Run, key: str, attempt: Attempt) -> list[str]:
    """Store a claim and return the keys of all claims; after an error, remove it as far as the storage answers."""

    def list_claims(storage: Storage) -> list[str]:
        claims = claim_keys(replace(run, storage=storage))
        if key not in claims:
            raise StorageError(
                f"{run.storage.url} does not list {key}, which was stored just before: such listings do not show who leads "
                f"run {run.name!r}, so no attempt was begun; try again, and give another storage if that does not help"
            )
        return claims

    try:
        put_despite_full_disk(run, lambda: run.records.put(key, asdict(attempt)))
        return with_retries(run.storage, "listing", run.layout.attempts, list_claims)
    except BaseException:
        with suppress(StorageError, OSError):
            run.storage.delete([key])
        raise


def claim_unless_led(
    run: Run, refuse_if_led: Callable[[Attempt], None], claim: Callable[[Attempt | None, frozenset[str] | None], T]
) -> T:
    """Claim the next attempt unless a live attempt leads the run; of several concurrent claims exactly one succeeds.

    A process that finds a claim that it has not checked came later, and checks again. It lists claims right before its own
    claim, since `refuse_if_led` may take minutes, and right after it; if it finds another then, it withdraws its own. So claims
    that are refused do not fence the first one, except for the moment between two neighboring requests. Costs a listing and a
    small read before the claim.

    A claim that cannot be read may be that of a live leader that is rewriting it. If it still cannot be read after five
    seconds, its writer was killed, or it is no claim, so it is ignored.

    Args:
        run: The run.
        refuse_if_led: Raises if the owner of an attempt leads the run.
        claim: Claims a number by `claim_attempt`, given the newest attempt, which does not lead the run, and the known claims.

    Raises:
        RunBusyError: Or any other error of `refuse_if_led`; then nothing is claimed.

    """
    torn: set[str] = set()
    while True:
        keys = claim_keys(run)
        readable, unreadable = newest_claims(run, keys)
        if not torn.issuperset(unreadable):
            torn = set(unreadable)
            time.sleep(_REWRITTEN_WITHIN_S)
            continue
        for attempt in readable:
            refuse_if_led(attempt)
        with suppress(_ClaimedMeanwhileError):
            return claim(readable[0] if readable else None, frozenset(keys))


class ClaimRenewal:
    """Stores the claim of an attempt again once a day, or what deletes old files would end the attempt.

    Such are systemd-tmpfiles, the purge of a scratch filesystem, and the lifecycle rule of a bucket.

    Args:
        run: The run.
        claim: The key of the claim, which this process has made just now.

    """

    def __init__(self, run: Run, claim: str) -> None:
        self._run, self._claim = run, claim
        self._since_stored = Stopwatch()

    @property
    def is_due(self) -> bool:
        """Whether a day has passed."""
        return self._since_stored.elapsed_s >= _RENEWED_AFTER_S

    def renew(self) -> None:
        """Store the claim, and the run's first object, as they are; log a warning if that fails, since it may do no harm."""
        self._since_stored = Stopwatch()
        run = self._run
        try:
            for attempt in newest_claims(run)[0]:
                if claim_key(run, attempt) == self._claim:
                    rewrite_claim(run, attempt)
            if "run_id" in (info := run.records.get_json(run.layout.run_info) or {}):
                run.records.put_json(run.layout.run_info, info)
        except (CheckpointError, OSError) as exc:
            _logger.warning(
                "the claim of attempt %d on run %r was not stored again, as each day: %s",
                attempt_number(self._claim),
                run.name,
                exc,
            )


def check_fence(run: Run, claim: str) -> None:
    """Raise FencedError unless the attempt with this claim is the newest; one listing, usually of this claim alone.

    By the claim's key, not by its number: once a claim is deleted, another attempt may get the same number.

    Raises:
        FencedError: If a newer attempt owns the run, or the claim is gone.
        StorageError: If nothing of the run is listed, although it exists, until the retries end.

    """
    attempt, listed = attempt_number(claim), _claims_from(claim, run, run.storage)
    if claim not in listed:
        with suppress(_ClaimNotListedError):  # without retries, it is raised by the first listing
            listed = _list_claim_again(run, claim)
    if (newest := _newest_number(listed)) > attempt:
        raise FencedError(
            f"attempt {attempt} of run {run.name!r} was overtaken by attempt {newest}: "
            "this process no longer owns the run and must stop"
        )
    if claim not in listed:
        raise FencedError(
            f"the claim of attempt {attempt} on run {run.name!r} is gone from {run.storage.url}: somebody deleted, moved "
            "or unmounted the run while it was being trained, or a cleaner deleted its old files, so this process must stop; "
            "if it was unmounted, mount it again and start the same run: nothing is lost"
        )


def _claims_from(claim: str, run: Run, storage: Storage) -> set[str]:
    """Return the keys of the claims with the number of `claim`, and of newer ones."""
    after = f"{run.layout.attempts}{attempt_number(claim):06d}"
    return {info.key for info in storage.list(run.layout.attempts, after=after) if attempt_number(info.key)}


def _list_claim_again(run: Run, claim: str) -> set[str]:
    """Return the claims from the number of `claim` on, by listings that are repeated for a while if all show none."""
    until_s = time.monotonic() + _LISTED_WITHIN_S

    def list_again(storage: Storage) -> set[str]:
        found = _claims_from(claim, run, storage) if lists_anything(run, storage) else set()
        if not found and time.monotonic() < until_s and find_size(storage, run.layout.run_info) is not None:
            raise _ClaimNotListedError(f"{storage.url} does not list {claim}")
        return found

    return with_retries(run.storage, "listing", run.layout.attempts, list_again)


def next_number(run: Run, claims: Collection[str]) -> int:
    """Return the number of the next attempt; costs two listings, of checkpoints and outcomes newer than the claims.

    Claims may have been deleted, so newer checkpoints and outcomes count, too. Checkpoints of a lower attempt would never be
    the latest, and would be pruned first. The outcome of an earlier attempt with the same number would count as the new one's.

    Args:
        run: The run.
        claims: The keys of all claims.

    """
    newest = _newest_number(claims)
    committed = (attempt_of(listed.id) for listed in run.listed(since=f"{newest + 1:06d}-"))
    ended = (outcome_number(info.key) for info in run.storage.list(run.layout.outcomes, after=run.layout.outcome(newest)))
    return max([newest, *committed, *ended]) + 1


def _newest_number(claims: Collection[str]) -> int:
    return max(map(attempt_number, claims), default=0)
