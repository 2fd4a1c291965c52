"""Quarantine: a damaged checkpoint is set aside with everything needed to restore it if it turns out to be whole."""

import logging
from dataclasses import dataclass

from prefect_torch.ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from prefect_torch.ckpt.runs.deletion.marks import is_marked
from prefect_torch.ckpt.runs.layout import stem
from prefect_torch.ckpt.runs.manifest import Manifest, attempt_of, is_id
from prefect_torch.ckpt.runs.records.small_records import left_out_if_newer
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.confirmed_reads import read_whole
from prefect_torch.ckpt.text import as_command, printable, utc_now

from .verification import verify_uncommitted

_logger = logging.getLogger(__name__)


def quarantine(run: Run, checkpoint_id: str, reason: str) -> None:
    """Take a damaged checkpoint out of the run, keeping its data, its manifest and the reason for an investigation.

    Where the storage refuses to delete its manifest, it stays listed, with a warning: each start passes it over again.

    Raises:
        CheckpointNotFoundError: If it is not damaged but gone: a prune deletes the manifest first.

    """
    manifest_key = run.layout.manifest(checkpoint_id)
    try:
        manifest = _manifest_as_stored(run, manifest_key)
    except FileNotFoundError as exc:
        raise CheckpointNotFoundError(f"checkpoint {checkpoint_id} of run {run.name!r} was pruned meanwhile") from exc
    _logger.warning("checkpoint %s of run %r is damaged and set aside: %s", checkpoint_id, run.name, reason)
    key = run.layout.quarantine(checkpoint_id)
    # A restore that was killed may have torn the manifest that it put.
    before = str((run.records.get_json(key) or {}).get("manifest"))
    if not _is_intact(manifest) and _is_intact(before):
        manifest = before
    run.records.put_json(key, {"reason": reason, "manifest": manifest, "quarantined_at": utc_now()})
    try:
        run.storage.delete([manifest_key])
    except PermissionError as exc:
        _logger.warning("checkpoint %s of run %r stays listed: %s", checkpoint_id, run.name, exc)


def _manifest_as_stored(run: Run, key: str) -> str:
    def read(data: bytes) -> str:
        Manifest.decode(data, key)
        return data.decode()

    try:
        return read_whole(run.storage, key, read)
    except CheckpointCorruptError:  # as many bytes as are stored, and the same twice
        return run.storage.reopened().get_bytes(key).decode(errors="replace")


def _is_intact(manifest: str) -> bool:
    try:
        Manifest.decode(manifest.encode(), "a manifest")
    except CheckpointCorruptError:
        return False
    return True


def restore(run: Run, checkpoint_id: str) -> Manifest:
    """Restore a quarantined checkpoint; see `CheckpointStore.restore`."""
    key = run.layout.quarantine(checkpoint_id)
    note = run.records.get_json(key)
    if note is None:
        raise CheckpointNotFoundError(
            f"run {run.name!r} in {run.storage.url} has no checkpoint {checkpoint_id} in quarantine; "
            f"{as_command('show', run.storage.url, run.name)} lists those that it has"
        )
    try:
        manifest = _commit_again(run, checkpoint_id, str(note.get("manifest")).encode())
    except CheckpointCorruptError as exc:
        raise CheckpointCorruptError(f"checkpoint {checkpoint_id} stays in quarantine, since it is damaged: {exc}") from exc
    run.storage.delete([key])
    return manifest


def _commit_again(run: Run, checkpoint_id: str, data: bytes) -> Manifest:
    manifest = Manifest.decode(data, "the manifest in its quarantine note")
    if manifest.id != checkpoint_id:
        raise CheckpointCorruptError(f"its quarantine note holds the manifest of {manifest.id}")
    verify_uncommitted(run, manifest, "digest")
    manifest_key = run.layout.manifest(checkpoint_id)
    run.storage.put_bytes(manifest_key, data)
    try:
        _check_stays(run, manifest)
    except BaseException:
        run.storage.delete([manifest_key])
        raise
    return manifest


def _check_stays(run: Run, manifest: Manifest) -> None:
    if is_marked(run, manifest.id):
        raise CheckpointCorruptError("its time in quarantine is over, and its data are being removed")
    verify_uncommitted(run, manifest, "size")  # last: a deletion that has removed its mark before has removed the data


def why_quarantined(run: Run, lineage: int = 1) -> dict[str, str]:
    """Return the ids in quarantine that attempts from `lineage` on wrote, each with the reason."""
    return {it: _reason(run, it) for it in quarantined_ids(run) if attempt_of(it) >= lineage}


def quarantined_ids(run: Run) -> list[str]:
    """Return the ids in quarantine, oldest first."""
    return sorted(it for it in map(stem, run.keys(run.layout.quarantined)) if is_id(it))


@dataclass(frozen=True, slots=True)
class _Note:
    """The fields of a quarantine note that are shown to a person."""

    reason: str


def _reason(run: Run, checkpoint_id: str) -> str:
    key = run.layout.quarantine(checkpoint_id)
    note = left_out_if_newer(lambda: run.records.get(_Note, key, "the note of a quarantine"))
    return "unknown" if note is None else printable(note.reason)
