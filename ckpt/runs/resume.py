"""The checkpoint that a new attempt begins from: chosen once, proven whole, passed to all ranks."""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from prefect_torch.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, MalformedRecordError, StorageError
from prefect_torch.ckpt.runs.evaluations import ListedCheckpoint, manifest_id
from prefect_torch.ckpt.runs.manifest import Manifest, attempt_of, is_id
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.protocol import Storage
from prefect_torch.ckpt.storage.retry import with_retries
from prefect_torch.ckpt.storage.specs.location import is_bucket
from prefect_torch.ckpt.text import as_command

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
    place of a manifest is skipped in the same way, but stays as it is. If no file of any checkpoint exists, nothing is
    quarantined: a directory that is not mounted looks like that. The result is never older than a whole checkpoint whose data
    are listed and whose manifest exists, even if listings of manifests leave it out.

    Args:
        run: The run.
        lineage: The first attempt whose checkpoints count.
        verify: The level of verification.
        prove: Returns only if the checkpoint is whole; a function that keeps the files it reads may replace
            `verification.verify`.
        on_quarantine: Called with the id of each damaged checkpoint and the damage.
        dry_run: Only check; damaged checkpoints stay where they are.

    Raises:
        CheckpointCorruptError: If checkpoints exist and all are damaged, now or at an earlier start; the error lists them. Or
            if none has any file.
        UnsupportedFormatError: If a newer version committed the next candidate: to resume from an older one would discard it.
        StorageError: If the storage does not answer, or cannot give a file of a checkpoint, which may be whole.

    """
    search = _Search(run, verify, prove, on_quarantine, dry_run=dry_run)
    chosen = run.find_newest(search.take, oldest_attempt=lineage)
    for checkpoint_id in _unlisted(run, lineage, chosen, is_proven=verify != "none"):
        if (newer := search.take_unlisted(checkpoint_id)) is not None:
            return newer
    if chosen is None and not dry_run:
        for checkpoint_id in _committed_by_a_proven_listing(run, lineage):
            if (newest := search.take_unlisted(checkpoint_id)) is not None:
                return newest
    if chosen is None:
        _refuse_if_damaged(run, lineage, search.passed_over)
    return chosen


@dataclass
class _Search:
    """The search of `choose_checkpoint`, with its arguments.

    Attributes:
        passed_over: Why each checkpoint that is not whole was passed over, by id.

    """

    run: Run
    verify: VerifyLevel
    prove: Prove
    on_quarantine: Callable[[str, str], None] | None
    dry_run: bool = field(kw_only=True)
    passed_over: dict[str, str] = field(default_factory=dict)

    def take(self, listed: ListedCheckpoint) -> Manifest | None:
        """Return the manifest of a checkpoint if it is whole; None, with a warning, if it is passed over."""
        run, manifest = self.run, None
        try:
            manifest = run.committed(listed.id)
            self.prove(run, manifest, self.verify)
        except MalformedRecordError as exc:
            _logger.warning("checkpoint %s of run %r is left out: %s", listed.id, run.name, exc)
            self.passed_over[listed.id] = str(exc)
        except CheckpointCorruptError as exc:
            if manifest is not None and next(run.storage.list(run.layout.checkpoints), None) is None:
                raise _without_data(run, str(exc)) from exc
            self._set_aside(listed.id, str(exc))
        except StorageError as exc:
            if not run.is_served():
                raise
            listing = as_command("ls", run.storage.url, run.name)
            raise StorageError(
                f"checkpoint {listed.id} of run {run.name!r} cannot be read though the storage answers, and may be whole: "
                f"{exc}; if that lasts, train under another name with resume_from='{run.name}/ID', an older one of `{listing}`"
            ) from exc
        else:
            return manifest
        return None

    def take_unlisted(self, checkpoint_id: str) -> Manifest | None:
        """Return what `take` returns for a checkpoint that listings have left out; None also if it is being pruned."""
        if checkpoint_id in self.passed_over:
            return None
        _logger.warning("%s does not list checkpoint %s, which exists", self.run.path, checkpoint_id)
        with suppress(CheckpointNotFoundError):
            return self.take(ListedCheckpoint(checkpoint_id))
        return None

    def _set_aside(self, checkpoint_id: str, reason: str) -> None:
        if not self.dry_run:
            quarantine(self.run, checkpoint_id, reason)
        self.passed_over[checkpoint_id] = reason
        if self.on_quarantine is not None:
            self.on_quarantine(checkpoint_id, reason)


def _unlisted(run: Run, lineage: int, chosen: Manifest | None, *, is_proven: bool) -> Iterator[str]:
    """Yield the ids of newer checkpoints than the chosen one, newest first: listings of manifests have left them out.

    A gateway that answers listings with nothing, or with a part, for some seconds, would otherwise make a training start fresh.
    Costs a listing, and a small request for each checkpoint that was not committed.

    Args:
        run: The run.
        lineage: The first attempt whose checkpoints count.
        chosen: The newest one that listings have shown; None if they have shown none.
        is_proven: Whether the data of the chosen one are known to exist, so that a listing without them cannot be believed.

    """
    prefix = run.layout.checkpoints
    since = f"{lineage:06d}-" if chosen is None else chosen.id

    def list_data(storage: Storage) -> set[str]:
        if is_bucket(storage.url):
            listed = storage.list(prefix, after=f"{prefix}{since[:-1]}")
            found = {info.key.removeprefix(prefix).partition("/")[0] for info in listed}
        else:  # a listing of all files may cost a request for each directory
            found = set(storage.folders(prefix))
        if chosen is not None and is_proven and chosen.files and since not in found and storage.local_path(prefix) is None:
            raise StorageError(
                f"{storage.url} does not list the data of checkpoint {since}, which are there: something before the storage "
                "answers listings in its place, or they lag behind, so that newer checkpoints may be missing, too"
            )
        return found

    newer = (it for it in with_retries(run.storage, "listing", prefix, list_data) if is_id(it) and it > since)
    return filter(run.exists, sorted(newer, reverse=True))


def _committed_by_a_proven_listing(run: Run, lineage: int) -> list[str]:
    """Return the ids of the checkpoints since attempt `lineage` in one listing of a bucket's run, newest first.

    It must have the claim of an attempt, too, which the training has just made: a gateway may answer each listing of manifests
    and of data with nothing, and a training that believed that would start fresh, and its retention delete the former work.

    Raises:
        StorageError: If the listing has no claim until the retries end.

    """
    if not is_bucket(run.storage.url):
        return []

    def list_run(storage: Storage) -> list[str]:
        keys = [info.key for info in storage.list(f"{run.name}/")]
        if not any(key.startswith(run.layout.attempts) for key in keys):
            raise StorageError(f"{storage.url} does not list the attempts of run {run.name!r}, of which one has just begun")
        ids = {manifest_id(run.layout, key) for key in keys}
        return sorted((it for it in ids if it is not None and attempt_of(it) >= lineage), reverse=True)

    return with_retries(run.storage, "listing", f"{run.name}/", list_run)


def _without_data(run: Run, reason: str) -> CheckpointCorruptError:
    if run.storage.local_path(run.layout.checkpoints) is None:
        cause = "they were deleted there, as by a lifecycle rule that expires objects: end it, and bring back older versions"
    else:
        cause = "if it is not mounted, mount it and start again"
    return CheckpointCorruptError(
        f"run {run.name!r} in {run.storage.url} has checkpoints, but {run.layout.checkpoints} has no file of any of them, so "
        f"nothing was set aside: {cause}; else resume='never' starts fresh ({reason})"
    )


def _refuse_if_damaged(run: Run, lineage: int, passed_over: dict[str, str]) -> None:
    quarantined = why_quarantined(run, lineage)  # at this start or an earlier one
    damaged = quarantined | passed_over
    if damaged:
        tried = "; ".join(f"{checkpoint_id}: {reason}" for checkpoint_id, reason in sorted(damaged.items()))
        restore = as_command("restore", run.storage.url, run.name, max(quarantined, default="ID"))
        raise CheckpointCorruptError(
            f"run {run.name!r} in {run.storage.url} has no whole checkpoint left, and does not start fresh unasked "
            f"(resume='never' does); `{restore}` restores one whose damage is repaired; damaged are {tried}"
        )
