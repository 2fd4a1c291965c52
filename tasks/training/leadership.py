"""The leadership of a run, a training or a sweep: one flow run leads at a time."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from prefect_torch.ckpt import FencedError, RunBusyError
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, claim_keys, list_attempts, newest_attempt
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt, claim_unless_led
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.attempts.status import status_of
from prefect_torch.ckpt.runs.layout import attempt_number
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.retry import ended_by
from prefect_torch.ckpt.storage.synced.first_download import download_run, is_synced
from prefect_torch.ckpt.text import printable
from prefect_torch.tasks.options.config import RunConfig
from prefect_torch.tasks.prefect_api.flow_run import is_unknown

from .liveness import may_be_led
from .unusable_storage import unusable_storage_explained


@dataclass(frozen=True, slots=True)
class Claimant:
    """A process that is to lead a run, a training or a sweep.

    Attributes:
        owner: The process.
        run_config: How the run starts. `takeover` takes over a run that another flow run leads, unless the owner's flow run,
            or one that it restarts, has led it before: neither a retry nor a restart takes the run back.
        restarted: The flow runs that the owner's restarts.
        world_size: The number of ranks; 0 for a sweep.
        settings: The fields of the training's retention policy.
        is_alone: Whether all ranks are on the owner's machine.

    """

    owner: Owner
    run_config: RunConfig
    restarted: Container[str | None]
    world_size: int = 0
    settings: dict[str, Any] | None = None
    is_alone: bool = False


def claim_run(
    run: Run, claimant: Claimant, check: Callable[[], None], raise_if_requested: Callable[[], None] = lambda: None
) -> tuple[Attempt, Attempt | None]:
    """Claim the next attempt of a run, which fences the process that led it before.

    Returns the attempt, and the one before it if its leader is known to be gone, else None.

    Args:
        run: The run.
        claimant: The process that is to lead it.
        check: Raises if the process must not lead the run; called when the run's records are on this machine.
        raise_if_requested: Raises if a termination is requested; called while these are downloaded, which may take minutes. Who
            has claimed an attempt ends it with an outcome.

    Raises:
        RunBusyError: If another flow run that is alive leads the run, unless it is taken over.
        FencedError: If a later process of the same flow run has taken over from this one.
        ValueError: If the run is a sweep and a training is to begin, or the other way round.
        OSError: If access to the storage is denied, or its directory cannot be created.

    """
    with unusable_storage_explained(claimant.run_config.storage, run.storage.url):
        with ended_by(raise_if_requested):
            _download(run, claimant)
        check()
        return _claim(run, claimant)


def _download(run: Run, claimant: Claimant) -> None:
    """Download a run that is also elsewhere, but only claims of one that this process has led last if it is alone.

    All of the run would bring back what was deleted here since, of which nothing is deleted there.
    """
    if claimant.is_alone and is_synced(run.spec):
        last = newest_attempt(run)
        if last is not None and last.owner.is_same_process(claimant.owner):
            download_run(run.spec, run.name, run.layout.attempts)
            if all(attempt_number(key) <= last.number for key in claim_keys(run)):
                return
    download_run(run.spec, run.name)


def _claim(run: Run, claimant: Claimant) -> tuple[Attempt, Attempt | None]:
    owner, restarted = claimant.owner, claimant.restarted

    def claim_after(previous: Attempt | None, known: frozenset[str] | None) -> tuple[Attempt, Attempt | None]:
        refuse_other_kind(run, previous, is_sweep=claimant.world_size == 0)
        _refuse_if_overtaken(run, previous, owner)
        is_own = previous is not None and previous.owner.flow_run_id == owner.flow_run_id
        claimed = claim_attempt(
            run,
            owner,
            world_size=claimant.world_size,
            lineage=lineage_of(previous, claimant.run_config, (owner.flow_run_id,) if is_own else restarted),
            settings=claimant.settings,
            known=known,
        )
        return claimed, previous

    if claimant.run_config.takeover:
        previous = newest_attempt(run)

        def is_of_owner(attempt: Attempt) -> bool:
            return _are_tries_of_one(attempt.owner, owner) or attempt.owner.flow_run_id in restarted

        if previous is None or is_of_owner(previous) or not any(map(is_of_owner, list_attempts(run))):
            claimed, _ = claim_after(previous, None)
            if previous is None or previous.owner.flow_run_id == owner.flow_run_id or previous.owner.is_process_gone():
                return claimed, previous
            return claimed, None  # another one's leader may live
    return claim_unless_led(run, lambda attempt: refuse_if_alive(run, attempt, owner.flow_run_id), claim_after)


def lineage_of(previous: Attempt | None, run: RunConfig, continued: Container[str | None]) -> int | None:
    """Return the first attempt whose checkpoints the next one may restore; None if that is the next one itself.

    Args:
        previous: The newest attempt of the run that can be read; None if there is none. Claims that cannot be read, or that are
            gone, are no reason for a fresh start, which would in time delete the checkpoints.
        run: How the run starts.
        continued: The flow run of the next attempt, and those that it restarts.

    """
    if previous is None:
        return None if run.resume == "never" else 1
    is_new_lineage = run.resume == "never" and previous.owner.flow_run_id not in continued
    return None if is_new_lineage else previous.lineage


def _refuse_if_overtaken(run: Run, previous: Attempt | None, owner: Owner) -> None:
    """Raise FencedError if this process has led the run before, and a later one of the same flow run has since."""
    if previous is None or previous.owner.flow_run_id != owner.flow_run_id or previous.owner.is_same_process(owner):
        return
    if any(attempt.owner.is_same_process(owner) for attempt in list_attempts(run)):
        raise FencedError(
            f"another process of this flow run, {previous.owner.pid} on {previous.owner.machine}, leads run {run.name!r} since "
            f"{previous.claimed_at}, so this one does not go on"
        )


def _are_tries_of_one(one: Owner, other: Owner) -> bool:
    """Return whether two owners are of one flow run, which nobody has run again after its end."""
    return one.flow_run_id is not None and (one.flow_run_id, one.budget) == (other.flow_run_id, other.budget)


def refuse_other_kind(run: Run, previous: Attempt | None, *, is_sweep: bool) -> None:
    """Raise ValueError if the newest attempt is of a sweep and a training is to begin, or the other way round."""
    if previous is not None and previous.is_sweep != is_sweep:
        found, wanted = ("training", "sweep") if is_sweep else ("sweep", "training")
        raise ValueError(f"run {run.name!r} in {run.storage.url} is a {found}, so a {wanted} needs another name")


def refuse_if_alive(run: Run, previous: Attempt, flow_run_id: str | None) -> None:
    """Raise RunBusyError if another flow run that is alive leads the run.

    Args:
        run: The run.
        previous: Its newest attempt.
        flow_run_id: The flow run that would lead it next; None if it is yet to be created.

    Raises:
        RunBusyError: If it does.

    """
    owner = previous.owner
    if flow_run_id is not None and owner.flow_run_id == flow_run_id:
        return  # this flow run's own earlier try
    if not may_be_led(status_of(run, previous)):
        return
    led = (
        f"sweep {run.name!r} in {run.storage.url} is led"
        if previous.is_sweep
        else f"run {run.name!r} in {run.storage.url} is being trained"
    )
    remedy = "wait for it, cancel it, choose another name, or give takeover=True"
    if owner.flow_run_id is not None and is_unknown(owner.flow_run_id):
        remedy = (
            "Prefect's API does not know this flow run, so it was deleted, or is another server's: end that process if it "
            "still runs, then give takeover=True, or choose another name"
        )
    raise RunBusyError(
        f"{led} by flow run {printable(str(owner.flow_run_id))} (process {owner.pid} on {owner.machine}, "
        f"attempt {previous.number}, since {previous.claimed_at}); {remedy}"
    )
