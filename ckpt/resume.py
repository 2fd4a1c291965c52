"""Which checkpoint a new attempt begins from: chosen once, proven whole, handed to all ranks."""

import logging
from collections.abc import Callable
from itertools import takewhile

from .clock import utc_now
from .errors import CheckpointCorruptError, CheckpointNotFoundError
from .layout import stem
from .manifest import Manifest, attempt_of
from .store import CheckpointStore, VerifyLevel

_logger = logging.getLogger(__name__)


def choose_checkpoint(
    store: CheckpointStore,
    *,
    lineage: int,
    verify: VerifyLevel,
    on_quarantine: Callable[[str, str], None] | None = None,
) -> Manifest | None:
    """Return the newest whole checkpoint since attempt `lineage`; None if there never was one.

    A damaged one is quarantined with a warning, and the one before is tried.

    Args:
        store: The run.
        lineage: The first attempt whose checkpoints count.
        verify: How a checkpoint is proven whole.
        on_quarantine: Called with the id of each damaged one and what is wrong with it.

    Raises:
        CheckpointCorruptError: If there were some and all are damaged, now or at an earlier start; it lists what was tried.

    """
    while True:
        was_pruned = False
        for checkpoint_id in takewhile(lambda it: attempt_of(it) >= lineage, (listed.id for listed in store.newest_first())):
            try:
                manifest = store.committed(checkpoint_id)
                store.verify(manifest, verify)
            except CheckpointNotFoundError:
                was_pruned = True
            except CheckpointCorruptError as exc:
                if not quarantine(store, checkpoint_id, str(exc)):
                    was_pruned = True
                elif on_quarantine is not None:
                    on_quarantine(checkpoint_id, str(exc))
            else:
                return manifest
        if not was_pruned:
            break
        # Since the listing, by an overtaken leader that has committed a newer one just before: look again.
    damaged = [stem(info.key) for info in store.storage.list(store.layout.quarantined)]
    damaged = [checkpoint_id for checkpoint_id in damaged if attempt_of(checkpoint_id) >= lineage]
    if damaged:
        tried = "\n  ".join(f"{checkpoint_id}: {_reason(store, checkpoint_id)}" for checkpoint_id in damaged)
        raise CheckpointCorruptError(
            f"run {store.run!r} in {store.storage.url} has no whole checkpoint left, and does not start from zero unasked "
            f"(resume='never' does); damaged are\n  {tried}"
        )
    return None


def _reason(store: CheckpointStore, checkpoint_id: str) -> str:
    return str((store.get_json(store.layout.quarantine(checkpoint_id)) or {}).get("reason", "unknown"))


def quarantine(store: CheckpointStore, checkpoint_id: str, reason: str) -> bool:
    """Take a damaged checkpoint out of the run, keeping its manifest and the reason for whoever looks into it.

    Returns False, and does nothing, if it is not damaged but gone: who prunes deletes the manifest first.
    """
    manifest_key = store.layout.manifest(checkpoint_id)
    try:
        manifest = store.storage.get_bytes(manifest_key).decode(errors="replace")
    except FileNotFoundError:
        return False
    _logger.warning("checkpoint %s of run %r is damaged and set aside: %s", checkpoint_id, store.run, reason)
    note = {"reason": reason, "manifest": manifest, "quarantined_at": utc_now()}
    store.put_json(store.layout.quarantine(checkpoint_id), note)
    store.storage.delete([manifest_key])
    return True
