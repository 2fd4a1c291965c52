"""The checkpoint that a new attempt begins from: chosen once, proven whole, passed to all ranks."""

import logging
import shlex
from collections.abc import Callable
from typing import TypeAlias

from prefect_torch.ckpt.errors import CheckpointCorruptError, MalformedRecordError, StorageError
from prefect_torch.ckpt.runs.evaluations import ListedCheckpoint
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.run import Run

from . import verification
from .quarantine import quarantine, why_quarantined
from .verification import VerifyLevel

Prove: TypeAlias = Callable[[Run, Manifest, VerifyLevel], None]
_logger = logging.getLogger(__name__)


def choose_checkpoint(
    run: Run,
    *,
    lineage: int,
    verify: VerifyLevel,
    prove: Prove = verification.verify,
    on_quarantine: Callable[[str, str], None] | None = None,
    dry_run: bool = False,
) -> Manifest | None:
    """Return the newest whole checkpoint since attempt `lineage`; None if there never was one.

    A damaged checkpoint is quarantined with a warning, and the next older one is tried. An object of another program in the
    place of a manifest is skipped in the same way, but stays as it is. Where not one file of any checkpoint is there, nothing
    is quarantined: a directory that is not mounted looks like that.

    Args:
        run: The run.
        lineage: The first attempt whose checkpoints count.
        verify: The level of verification.
        prove: Returns only if the checkpoint is whole; a function that keeps the files it reads may replace
            `verification.verify`.
        on_quarantine: Called with the id of each damaged checkpoint and the damage.
        dry_run: Only look; what is damaged stays where it is.

    Raises:
        CheckpointCorruptError: If checkpoints exist and all are damaged, now or at an earlier start; it lists them. Or if none
            has any file.
        UnsupportedFormatError: If a newer version committed the next candidate: to resume from an older one would discard it.
        StorageError: If the storage does not answer, or cannot give a file of a checkpoint, which may be whole.

    """
    unreadable: dict[str, str] = {}

    def take(listed: ListedCheckpoint) -> Manifest | None:
        manifest = None
        try:
            manifest = run.committed(listed.id)
            prove(run, manifest, verify)
        except MalformedRecordError as exc:
            _logger.warning("checkpoint %s of run %r is left out: %s", listed.id, run.name, exc)
            unreadable[listed.id] = str(exc)
            return None
        except CheckpointCorruptError as exc:
            if manifest is not None and next(run.storage.list(run.layout.checkpoints), None) is None:
                raise _without_data(run, str(exc)) from exc
            if dry_run:
                unreadable[listed.id] = str(exc)
            else:
                quarantine(run, listed.id, str(exc))
            if on_quarantine is not None:
                on_quarantine(listed.id, str(exc))
            return None
        except StorageError as exc:
            if not run.is_served():
                raise
            listing = shlex.join(["prefect-torch", "ls", run.storage.url, run.name])
            raise StorageError(
                f"checkpoint {listed.id} of run {run.name!r} cannot be read though the storage answers, and may be whole: "
                f"{exc}; if that lasts, train under another name with resume_from='{run.name}/ID', an older one of `{listing}`"
            ) from exc
        return manifest

    chosen = run.find_newest(take, oldest_attempt=lineage)
    if chosen is None:
        _refuse_if_damaged(run, lineage, unreadable)
    return chosen


def _without_data(run: Run, reason: str) -> CheckpointCorruptError:
    if run.storage.local_path(run.layout.checkpoints) is None:
        cause = "they were deleted there, as by a lifecycle rule that expires objects: end it, and bring back older versions"
    else:
        cause = "if it is not mounted, mount it and start again"
    return CheckpointCorruptError(
        f"run {run.name!r} in {run.storage.url} has checkpoints, but {run.layout.checkpoints} has no file of any of them, so "
        f"nothing was set aside: {cause}; else resume='never' starts fresh ({reason})"
    )


def _refuse_if_damaged(run: Run, lineage: int, unreadable: dict[str, str]) -> None:
    quarantined = why_quarantined(run, lineage)
    damaged = quarantined | unreadable
    if damaged:
        tried = "; ".join(f"{checkpoint_id}: {reason}" for checkpoint_id, reason in sorted(damaged.items()))
        restore = shlex.join(["prefect-torch", "restore", run.storage.url, run.name, max(quarantined, default="ID")])
        raise CheckpointCorruptError(
            f"run {run.name!r} in {run.storage.url} has no whole checkpoint left, and does not start fresh unasked "
            f"(resume='never' does); `{restore}` brings one back whose damage is mended; damaged are {tried}"
        )
