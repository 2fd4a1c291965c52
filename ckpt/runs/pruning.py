"""Deletion of checkpoints: the manifest first, the data after it; never a pinned checkpoint or one that is read."""

import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone

from prefect_torch.ckpt.errors import FencedError, StorageError
from prefect_torch.ckpt.runs.attempts.claims import check_fence
from prefect_torch.ckpt.runs.bulk import no_collection
from prefect_torch.ckpt.runs.evaluations import committed_id, evaluation_of, hides_score
from prefect_torch.ckpt.runs.layout import attempt_number, stem, unreported_attempt
from prefect_torch.ckpt.runs.manifest import Manifest, attempt_of, is_id, step_of
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.keys import is_key
from prefect_torch.ckpt.storage.local_files.readers import is_read

from .deletion_marks import DeletionMark, marked, remove_stale_marks
from .log_files import delete_evaluation_logs
from .retention import Plan, RetentionPolicy, overdue_evaluations, plan

GARBAGE_GRACE_S = 3600.0
_DAY_S = 24 * 3600.0
_MOST_IN_A_ROW = 3  # failures of a storage that has not answered within its retries, two minutes each
_logger = logging.getLogger(__name__)


def prune(
    run: Run,
    policy: RetentionPolicy,
    *,
    dry_run: bool,
    in_use: tuple[str, ...],
    up_to: str | None,
    attempt: int | None = None,
) -> Plan[Manifest]:
    """Delete what `policy` drops; see `CheckpointStore.prune`.

    An `attempt` that is given is the one that prunes; it deletes nothing once it is overtaken, which is looked for before the
    first deletion and every ten minutes.

    Raises:
        FencedError: If a newer attempt than `attempt` owns the run.
        StorageError: If a deletion failed.

    """
    listed, manifests = run.list_readable()
    if run.memory is not None:
        run.memory.forget_all_but([it.id for it in listed])
    overdue = overdue_evaluations(manifests, policy, datetime.now(timezone.utc))
    attached = {it.id: it.evaluations for it in listed}
    kept = (*in_use, *_with_hidden_scores(run, manifests, attached, policy))
    pinned = run.pinned()
    with no_collection():
        decided = plan(manifests, policy, pinned=pinned, in_use=kept, up_to=up_to, overdue=overdue)
    if dry_run or not decided.drop:
        return decided
    with marked(run, (manifest.id for manifest in decided.drop)) as mark:
        stayed = _delete_all(run, decided.drop, attached, mark, attempt)
    return Plan(
        keep={**decided.keep, **dict.fromkeys(stayed, ("pinned",))},
        drop=tuple(manifest for manifest in decided.drop if manifest.id not in stayed),
    )


def delete_checkpoints(run: Run, manifests: Sequence[Manifest]) -> frozenset[str]:
    """Delete checkpoints whatever a policy would keep, and return the ids of those that stay, since they are pinned.

    Raises:
        StorageError: If some could not be deleted; a repeated call deletes these.

    """
    evaluations = {it.id: it.evaluations for it in run.listed()}
    known = {manifest.id: evaluations.get(manifest.id, ()) for manifest in manifests}
    with marked(run, known) as mark:
        return frozenset(_delete_all(run, tuple(manifests), known, mark))


def _with_hidden_scores(
    run: Run, manifests: Iterable[Manifest], attached: dict[str, tuple[str, ...]], policy: RetentionPolicy
) -> Iterator[str]:
    """Yield the ids of checkpoints with an evaluation that cannot be read and may have rated them the best of all."""
    for manifest in manifests:
        unread = set(attached[manifest.id]) - set(manifest.evaluations)
        if unread and hides_score(run.storage, run.layout, manifest, unread, policy.checkpoint_score_attribute):
            yield manifest.id


def _delete_all(
    run: Run,
    dropped: tuple[Manifest, ...],
    evaluations: dict[str, tuple[str, ...]],
    mark: DeletionMark,
    attempt: int | None = None,
) -> set[str]:
    """Delete the checkpoints that were not pinned meanwhile, and return the ids of those that were."""
    failures: list[tuple[Manifest, Exception]] = []
    num_done = num_in_a_row = 0
    kept: set[str] = set()
    pinned: frozenset[str] | None = None
    for manifest in dropped:
        try:
            if mark.is_due:
                pinned = None
                _renew(run, mark, attempt)
            if pinned is None:
                pinned = run.pinned()
            if manifest.id in pinned:
                kept.add(manifest.id)
            else:
                _delete(run, manifest, evaluations[manifest.id])
        except (StorageError, OSError) as exc:
            failures.append((manifest, exc))
            num_in_a_row = num_in_a_row + 1 if isinstance(exc, StorageError) else 0
            if num_in_a_row == _MOST_IN_A_ROW:
                break
        else:
            num_done, num_in_a_row = num_done + 1, 0
    if failures:
        manifest, first = failures[0]
        raise StorageError(
            f"{len(dropped) - num_done} of {len(dropped)} checkpoints of run {run.name!r} could not be deleted, "
            f"{manifest.id} first: {first}; the next prune tries again"
        ) from first
    if deleted := {it.id for it in dropped if evaluations[it.id]} - kept:  # garbage collection finds those of the others
        delete_evaluation_logs(run, lambda checkpoint_id: checkpoint_id in deleted)
    return kept


def _renew(run: Run, mark: DeletionMark, attempt: int | None) -> None:
    """Renew the mark of a deletion, unless a newer attempt owns the run: then nothing more is deleted."""
    if attempt is not None:
        try:
            check_fence(run, attempt)
        except FencedError:
            mark.remove()
            raise
    mark.renew()


def _delete(run: Run, manifest: Manifest, evaluations: tuple[str, ...]) -> None:
    """Delete the manifest, then the data; garbage collection deletes data later that another process reads in place."""
    layout = run.layout
    run.storage.delete([layout.manifest(manifest.id)])
    if run.memory is not None:  # a listing that still shows it must not bring it back
        run.memory.forget(manifest.id)
    data = [layout.data(manifest.id, entry.path) for entry in manifest.files]
    attached = [layout.evaluation(manifest.id, name) for name in evaluations]
    gone = [] if is_read(run.storage, data) else _without_targets(run, data)
    run.storage.delete([*gone, *attached, layout.metadata(manifest.id)])


def _without_targets(run: Run, data: Collection[str]) -> list[str]:
    """Return what to delete of a checkpoint's data: of a directory that is a link, the link, whose target may be another's."""
    links = {folder: _link_to(run, folder) for folder in {key.rpartition("/")[0] for key in data}}
    return sorted({links[key.rpartition("/")[0]] or key for key in data})


def _link_to(run: Run, folder: str) -> str | None:
    """Return the first link on the way to a directory of a checkpoint; None if there is none, or it leads out of the storage.

    The storage refuses the latter, and names its target.
    """
    key = run.layout.checkpoints.removesuffix("/")
    place = run.storage.local_path(key)
    if place is None:
        return None
    for name in folder.removeprefix(run.layout.checkpoints).split("/"):
        key, place = f"{key}/{name}", place / name
        if place.is_symlink():
            with suppress(PermissionError):
                run.storage.local_path(key)
                return key
            return None
    return None


def collect_garbage(run: Run, *, grace_s: float = GARBAGE_GRACE_S, keep_quarantined_days: float | None = None) -> list[str]:
    """Delete data without a manifest that no process can still write or read in place; return the ids of their checkpoints.

    An id is garbage when its attempt has committed a later step (an attempt uploads in order, so this one was abandoned or
    pruned), or when a newer attempt began and the data is older than `grace_s`. Evaluations and their logs are deleted with
    the data, or after it.

    Args:
        run: The run.
        grace_s: The number of seconds that data of an older attempt stay, by the storage's clock.
        keep_quarantined_days: The number of days that the data of a quarantined checkpoint stay, by the same clock, unless it
            is pinned; None keeps them permanently. The note stays in any case.

    """
    data: dict[str, set[str]] = defaultdict(set)
    modified_s: dict[str, float] = defaultdict(float)
    for info in run.storage.list(run.layout.checkpoints):
        if not is_key(info.key):  # another program's
            continue
        checkpoint_id = info.key.removeprefix(run.layout.checkpoints).partition("/")[0]
        data[checkpoint_id].add(info.key)
        modified_s[checkpoint_id] = max(modified_s[checkpoint_id], info.modified_s)
    # Listed before and after the manifests: a restore puts the manifest, then removes the note; a quarantine does the opposite.
    quarantined = _quarantined(run)
    # Listed after the data: a checkpoint committed in between is then seen as committed, not as garbage.
    manifests = run.keys(run.layout.manifests)
    committed = {it for key in manifests if (it := committed_id(run.layout, key)) is not None}
    attempts = list(run.storage.list(run.layout.attempts))
    newest_attempt = max((attempt_number(info.key) for info in attempts), default=0)
    quarantined |= _quarantined(run)
    # The storage's own clock, taken from its newest object: this machine's may be hours off.
    now_s = max([*modified_s.values(), *quarantined.values(), *(info.modified_s for info in attempts)], default=0.0)

    def is_garbage(checkpoint_id: str) -> bool:
        if not is_id(checkpoint_id) or checkpoint_id in committed or checkpoint_id in quarantined:
            return False
        attempt, step = attempt_of(checkpoint_id), step_of(checkpoint_id)
        # Not by the id: a step is reported again after a failed commit, whose manifest is there if only the answer was lost.
        if any(attempt_of(other) == attempt and step_of(other) > step for other in committed):
            return True
        return attempt < newest_attempt and modified_s[checkpoint_id] < now_s - grace_s

    # Requested by key: a listing may have missed a manifest, and a deletion is final.
    garbage = [it for it in sorted(data) if is_garbage(it) and not run.exists(it) and not is_read(run.storage, data[it])]
    for checkpoint_id in garbage:
        run.storage.delete(_without_targets(run, data[checkpoint_id]))
        _logger.info("removed the data of checkpoint %s of run %r, which was never committed", checkpoint_id, run.name)
    if keep_quarantined_days is not None:
        expired_s = now_s - keep_quarantined_days * _DAY_S
        expired = [it for it, since_s in quarantined.items() if it in data and it not in committed and since_s <= expired_s]
        garbage += _delete_quarantined(run, expired, data)
    kept = committed | (quarantined.keys() & (data.keys() - set(garbage)))
    _delete_left_evaluations(run, manifests, kept=kept)
    delete_evaluation_logs(run, lambda checkpoint_id: checkpoint_id not in kept and not run.exists(checkpoint_id))
    _delete_unreported(run, newest_attempt, now_s - grace_s)
    remove_stale_marks(run, now_s)
    # It compares with this machine's clock. Where that is ahead of the storage's, files that are being written would look old.
    run.storage.remove_interrupted(f"{run.name}/", grace_s + max(0.0, time.time() - now_s))
    return garbage


def _delete_unreported(run: Run, newest_attempt: int, before_s: float) -> None:
    """Delete the directories of ranks of older attempts that nobody has written to since then: they were killed."""
    folder = run.storage.local_path(run.layout.all_unreported.removesuffix("/"))
    if folder is None:
        return
    newest_s: dict[str, float] = defaultdict(float)
    for info in run.storage.list(run.layout.all_unreported):
        if unreported_attempt(run.layout, info.key) < newest_attempt:
            name = info.key.removeprefix(run.layout.all_unreported).partition("/")[0]
            newest_s[name] = max(newest_s[name], info.modified_s)
    for name, modified_s in newest_s.items():
        if modified_s < before_s:  # not by keys: a function may give its files names that are none
            with suppress(FileNotFoundError):  # another process collects garbage, too
                (shutil.rmtree if (folder / name).is_dir() else os.unlink)(folder / name)
    with suppress(OSError):  # it is there for those of living ranks
        folder.rmdir()


def _quarantined(run: Run) -> dict[str, float]:
    """Return when each quarantined checkpoint was quarantined, by the storage's clock."""
    return {stem(info.key): info.modified_s for info in run.storage.list(run.layout.quarantined)}


def _delete_quarantined(run: Run, expired: Iterable[str], data: Mapping[str, Collection[str]]) -> list[str]:
    """Delete the data of those that are neither pinned nor restored, and return their ids."""
    deleted = []
    for checkpoint_id in sorted(expired):
        with marked(run, [checkpoint_id]) as mark:
            mark.renew()
            if checkpoint_id in run.pinned() or run.exists(checkpoint_id):
                continue
            run.storage.delete(_without_targets(run, data[checkpoint_id]))
        deleted.append(checkpoint_id)
        _logger.info("removed the data of checkpoint %s of run %r: its time in quarantine is over", checkpoint_id, run.name)
    return deleted


def _delete_left_evaluations(run: Run, keys: Iterable[str], *, kept: Collection[str]) -> None:
    """Delete those evaluations among `keys` whose checkpoint is gone, for example pruned while they were written."""
    left: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        if (evaluation := evaluation_of(run.layout, key)) is not None and evaluation[0] not in kept:
            left[evaluation[0]].append(key)
    for checkpoint_id, attached in left.items():
        if not run.exists(checkpoint_id):  # it may have been committed during the listing
            run.storage.delete(attached)
