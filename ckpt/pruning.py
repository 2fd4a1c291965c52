"""Deleting: manifest first, so that a checkpoint is gone before its data is."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from .errors import StorageError
from .evaluations import evaluated_id, manifest_id
from .layout import attempt_number, stem
from .manifest import Manifest, attempt_of, is_id
from .retention import Plan, RetentionPolicy, overdue_evaluations, plan

if TYPE_CHECKING:
    from .store import CheckpointStore

GARBAGE_GRACE_S = 3600.0
_logger = logging.getLogger(__name__)


def prune(
    store: "CheckpointStore", policy: RetentionPolicy, *, dry_run: bool, in_use: tuple[str, ...], up_to: str | None
) -> Plan[Manifest]:
    """Delete what `policy` drops; see `CheckpointStore.prune`."""
    listed = list(store.listed())
    if store.memory is not None:
        store.memory.forget_all_but([it.id for it in listed])
    manifests = store.readable(listed)
    overdue = overdue_evaluations(manifests, policy, datetime.now(timezone.utc))
    decided = plan(manifests, policy, pinned=store.pinned(), in_use=in_use, up_to=up_to, overdue=overdue)
    if not dry_run:
        _delete_all(store, decided.drop, {it.id: it.evaluations for it in listed})
    return decided


def _delete_all(store: "CheckpointStore", dropped: tuple[Manifest, ...], evaluations: dict[str, tuple[str, ...]]) -> None:
    failures: list[tuple[Manifest, Exception]] = []
    for manifest in dropped:
        try:
            _delete(store, manifest, evaluations[manifest.id])
        except (StorageError, OSError) as exc:
            failures.append((manifest, exc))
    if failures:
        manifest, first = failures[0]
        raise StorageError(
            f"{len(failures)} of {len(dropped)} checkpoints of run {store.run!r} could not be deleted, "
            f"{manifest.id} first: {first}; the next prune tries again"
        ) from first


def _delete(store: "CheckpointStore", manifest: Manifest, evaluations: tuple[str, ...]) -> None:
    layout = store.layout
    store.storage.delete([layout.manifest(manifest.id)])
    data = (layout.data(manifest.id, entry.path) for entry in manifest.files)
    attached = (layout.evaluation(manifest.id, name) for name in evaluations)
    store.storage.delete([*data, *attached, layout.metadata(manifest.id)])


def collect_garbage(store: "CheckpointStore", *, grace_s: float = GARBAGE_GRACE_S) -> list[str]:
    """Delete data that no manifest names and nobody can still be writing; return the ids it belonged to.

    An id is garbage when its attempt has committed a later one (an attempt uploads in order, so this one was given up or
    pruned), or when a newer attempt began and the data is older than `grace_s` by the storage's clock. Quarantined data
    waits for the grace as well. Evaluations go with the data, or after it.
    """
    data: dict[str, list[str]] = defaultdict(list)
    modified_s: dict[str, float] = defaultdict(float)
    for info in store.storage.list(store.layout.checkpoints):
        checkpoint_id = info.key.removeprefix(store.layout.checkpoints).partition("/")[0]
        data[checkpoint_id].append(info.key)
        modified_s[checkpoint_id] = max(modified_s[checkpoint_id], info.modified_s)
    # Listed after the data: a checkpoint committed in between is then seen as committed, not as garbage.
    manifests = [info.key for info in store.storage.list(store.layout.manifests)]
    committed = {it for key in manifests if (it := manifest_id(store.layout, key)) is not None}
    attempts = list(store.storage.list(store.layout.attempts))
    newest_attempt = max((attempt_number(info.key) for info in attempts), default=0)
    quarantined = {stem(info.key) for info in store.storage.list(store.layout.quarantined)}
    # The storage's own clock, read off its newest object: this machine's may be hours away.
    expired = max([*modified_s.values(), *(info.modified_s for info in attempts)], default=0.0) - grace_s

    def is_garbage(checkpoint_id: str) -> bool:
        if not is_id(checkpoint_id) or checkpoint_id in committed:
            return False
        attempt = attempt_of(checkpoint_id)
        given_up = any(attempt_of(other) == attempt and other > checkpoint_id for other in committed)
        if given_up and checkpoint_id not in quarantined:
            return True
        return attempt < newest_attempt and modified_s[checkpoint_id] < expired

    garbage = [checkpoint_id for checkpoint_id in sorted(data) if is_garbage(checkpoint_id)]
    for checkpoint_id in garbage:
        store.storage.delete(data[checkpoint_id])
        _logger.info("removed the data of checkpoint %s of run %r, which was never committed", checkpoint_id, store.run)
    _delete_left_evaluations(store, manifests, kept=committed | (quarantined & (data.keys() - set(garbage))))
    store.storage.remove_interrupted(f"{store.run}/", grace_s)
    return garbage


def _delete_left_evaluations(store: "CheckpointStore", keys: Iterable[str], *, kept: Collection[str]) -> None:
    """Delete those evaluations among `keys` whose checkpoint is gone: it was pruned while they were written, say."""
    left: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        if (checkpoint_id := evaluated_id(store.layout, key)) is not None and checkpoint_id not in kept:
            left[checkpoint_id].append(key)
    for checkpoint_id, attached in left.items():
        try:
            store.storage.size(store.layout.manifest(checkpoint_id))  # it may have been committed during the listing
        except FileNotFoundError:
            store.storage.delete(attached)
