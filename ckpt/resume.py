"""Which checkpoint a new attempt begins from: chosen once, proven whole, handed to all ranks."""

import logging
from datetime import datetime, timezone

from .errors import CheckpointCorruptError, CheckpointNotFoundError
from .manifest import Manifest, attempt_of
from .store import CheckpointStore, VerifyLevel

_logger = logging.getLogger(__name__)


def choose_checkpoint(store: CheckpointStore, *, lineage: int, verify: VerifyLevel) -> Manifest | None:
    """Return the newest whole checkpoint since attempt `lineage`; None if there never was one.

    A damaged one is quarantined with a warning, and the one before is tried.

    Raises:
        CheckpointCorruptError: If there were some and all are damaged; it lists what was tried.

    """
    tried: list[str] = []
    for checkpoint_id in reversed([known for known in store.ids() if attempt_of(known) >= lineage]):
        try:
            manifest = store.get(checkpoint_id)
            store.verify(manifest, verify)
        except CheckpointNotFoundError:  # pruned since it was listed
            continue
        except CheckpointCorruptError as exc:
            quarantine(store, checkpoint_id, str(exc))
            tried.append(f"{checkpoint_id}: {exc}")
            continue
        return manifest
    if tried:
        raise CheckpointCorruptError(
            f"run {store.run!r} in {store.storage.url} has no whole checkpoint left; tried\n  " + "\n  ".join(tried)
        )
    return None


def quarantine(store: CheckpointStore, checkpoint_id: str, reason: str) -> None:
    """Take a damaged checkpoint out of the run, keeping its manifest and the reason for whoever looks into it."""
    _logger.warning("checkpoint %s of run %r is damaged and set aside: %s", checkpoint_id, store.run, reason)
    manifest_key = store.layout.manifest(checkpoint_id)
    try:
        manifest = store.storage.get_bytes(manifest_key).decode(errors="replace")
    except FileNotFoundError:
        manifest = ""
    note = {"reason": reason, "manifest": manifest, "quarantined_at": datetime.now(timezone.utc).isoformat()}
    store.put_json(store.layout.quarantine(checkpoint_id), note)
    store.storage.delete([manifest_key])
