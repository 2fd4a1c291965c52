"""Deletion of checkpoints: the manifest first, the data after it; never a pinned checkpoint or one that is read."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone

from prefect_torch.ckpt.errors import FencedError, StorageError
from prefect_torch.ckpt.runs.attempts.claims import check_fence
from prefect_torch.ckpt.runs.bulk import no_collection
from prefect_torch.ckpt.runs.evaluations import hides_score
from prefect_torch.ckpt.runs.index.reading import list_manifests
from prefect_torch.ckpt.runs.log_files import delete_evaluation_logs
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.retention import Plan, RetentionPolicy, overdue_evaluations, plan, require_score
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.local_files.readers import is_read

from .failures import Failures
from .limits import PruneLimits
from .links import without_targets
from .marks import DeletionMark, marked

_AT_ONCE = 16  # checkpoints by two requests; garbage collection finds what a kill leaves of them


class DeletionRefusedError(StorageError):
    """The storage refuses every deletion: these credentials do not allow it, or the storage keeps all objects."""


def prune(run: Run, policy: RetentionPolicy, limits: PruneLimits, *, dry_run: bool) -> Plan[Manifest]:
    """Delete what `policy` drops, within `limits`; see `CheckpointStore.prune`.

    An attempt that prunes deletes nothing once a newer one owns the run, which is checked before the first deletion and every
    ten minutes.

    Raises:
        FencedError: If a newer attempt than that of `limits` owns the run.
        ValueError: If no checkpoint has the metric of a policy that is not the run's own: arbitrary ones would be deleted.
        StorageError: If a deletion failed; a DeletionRefusedError if the storage refuses all.

    """
    listed, manifests = list_manifests(run)
    if run.memory is not None:
        run.memory.forget_all_but([it.id for it in listed])
    overdue = overdue_evaluations(manifests, policy, datetime.now(timezone.utc))
    attached = {it.id: it.evaluations for it in listed}
    kept = (*limits.in_use, *_with_hidden_scores(run, manifests, attached, policy))
    pinned = run.pinned()
    with no_collection():
        decided = plan(manifests, policy, pinned=pinned, in_use=kept, up_to=limits.up_to, overdue=overdue)
    if decided.drop and limits.claim is None and policy.checkpoint_score_attribute != limits.own_metric:
        require_score(run.name, manifests, policy.checkpoint_score_attribute)
    if dry_run or not decided.drop:
        return decided
    with marked(run, (manifest.id for manifest in decided.drop)) as mark:
        stayed = _delete_all(run, decided.drop, attached, mark, limits.claim)
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
    claim: str | None = None,
) -> set[str]:
    """Delete the checkpoints that were not pinned meanwhile, and return the ids of those that were."""
    failures = Failures()
    num_done = 0
    kept: set[str] = set()
    pinned: frozenset[str] | None = None
    groups = deque(dropped[first : first + _AT_ONCE] for first in range(0, len(dropped), _AT_ONCE))
    with suppress(StorageError):  # it is noted, and the storage does not answer: raised below
        while groups:
            group = groups.popleft()
            with failures.note(group[0].id):
                if mark.is_due:
                    pinned = None
                    _renew(run, mark, claim)
                if pinned is None:
                    pinned = mark.pinned()
                try:
                    with mark.holding():
                        _delete(run, [it for it in group if it.id not in pinned], evaluations)
                except OSError:
                    if len(group) == 1:
                        raise
                    groups.extendleft((it,) for it in reversed(group))  # the storage may refuse some of them only
                    continue
                kept.update(it.id for it in group if it.id in pinned)
                num_done += len(group)
    if failures.noted:
        failure = _failure(run, failures.noted, num_done, len(dropped))
        if isinstance(failure, DeletionRefusedError):
            mark.withdraw()
        raise failure from failures.noted[0][1]
    if deleted := {it.id for it in dropped if evaluations[it.id]} - kept:  # garbage collection deletes the logs of the others
        delete_evaluation_logs(run, lambda checkpoint_id: checkpoint_id in deleted)
    return kept


def _failure(run: Run, failures: Sequence[tuple[str, Exception]], num_done: int, count: int) -> StorageError:
    """Return the error of a deletion of `count` checkpoints, of which only `num_done` are deleted."""
    checkpoint_id, first = failures[0]
    left = f"{count - num_done} of {count} checkpoints of run {run.name!r} could not be deleted, {checkpoint_id} first: {first}"
    if num_done == 0 and all(isinstance(exc, PermissionError) for _, exc in failures):
        return DeletionRefusedError(left)
    return StorageError(f"{left}; the next prune tries again")


def _renew(run: Run, mark: DeletionMark, claim: str | None) -> None:
    """Renew the mark of a deletion, unless a newer attempt owns the run: then nothing more is deleted."""
    if claim is not None:
        try:
            check_fence(run, claim)
        except FencedError:
            mark.remove()
            raise
    mark.renew()


def _delete(run: Run, manifests: Sequence[Manifest], evaluations: dict[str, tuple[str, ...]]) -> None:
    """Delete the manifests, then the data; data that another process reads in place is left to garbage collection."""
    layout = run.layout
    run.storage.delete([layout.manifest(it.id) for it in manifests])
    if run.memory is not None:  # a listing that still shows one must not bring it back
        for manifest in manifests:
            run.memory.forget(manifest.id)
    about: list[str] = []
    gone: list[str] = []
    for manifest in manifests:
        data = [layout.data(manifest.id, entry.path) for entry in manifest.files]
        about += [layout.metadata(manifest.id), *(layout.evaluation(manifest.id, name) for name in evaluations[manifest.id])]
        gone += [] if is_read(run.storage, data) else without_targets(run, data)
    # Data last: by them, garbage collection finds what a killed prune has left.
    run.storage.delete([*about, *gone])
