"""The Prefect task that keeps the top K checkpoints and deletes data that were never committed."""

import logging
from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect_torch.ckpt import CheckpointStore, Plan, RetentionPolicy, Storage, StorageSpec
from prefect_torch.ckpt.runs.attempts.claims import check_fence
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.deletion.limits import PruneLimits, prune_limits
from prefect_torch.ckpt.runs.deletion.pruning import DeletionRefusedError, prune
from prefect_torch.ckpt.runs.manifest import Manifest, ManifestMemory
from prefect_torch.ckpt.storage.opening import is_open
from prefect_torch.ckpt.text import show_count
from prefect_torch.tasks.options.storage import configured_storage

from .run_logs import get_run_logger, library_logs_in_run

REFUSED = "deletion refused"  # why a checkpoint is kept
_SHOWN = 20  # in a log line


# The next prune is the retry: PREFECT_TASKS_DEFAULT_RETRIES, with its delays, would hold up the end of the training.
@task(name="prune_checkpoints", task_run_name="prune-{run}", cache_policy=NO_CACHE, persist_result=False, retries=0)
def prune_checkpoints(
    storage: StorageSpec | Storage | str,
    run: str,
    policy: RetentionPolicy,
    limits: PruneLimits | None = None,
    *,
    dry_run: bool = False,
    memory: ManifestMemory | None = None,
    garbage: bool = True,
) -> Plan[Manifest]:
    """Delete the checkpoints of `run` that `policy` does not keep, and the data that were never committed.

    Args:
        storage: The storage of the run, or that storage opened, whose connections are used.
        run: The run's name.
        policy: The retention policy; the newest and pinned checkpoints are kept in any case.
        limits: Checkpoints that are kept whatever the policy decides, and the attempt that prunes, which must not once it is
            overtaken. Without an attempt, the checkpoint that a running attempt restored and those that it has not recorded
            yet are kept in addition.
        dry_run: Only decide, and log the decision.
        memory: The manifests that earlier prunes have read.
        garbage: Whether to look for data that were never committed.

    Raises:
        ValueError: If no checkpoint has the policy's metric, so that arbitrary ones would be deleted; not in a prune of the
            training itself, nor if it is the metric of the run's own policy.
        FencedError: If a newer attempt owns the run, which may restore a checkpoint that this one would delete; also halfway.
        StorageError: If something could not be deleted; the next prune tries again. Where the storage refuses every deletion,
            the prune of a training completes, with a warning, and keeps the checkpoints to delete, for the reason `REFUSED`.

    """
    logger = get_run_logger()
    opened = storage if is_open(storage) else configured_storage(storage)
    store = replace(CheckpointStore.open(opened, run), memory=memory)
    if limits is None or limits.claim is None:
        found = prune_limits(store, read_status(store))
        limits = found if limits is None else found.narrowed(limits.in_use, limits.up_to)
    if limits.claim is not None:
        check_fence(store, limits.claim)
    with library_logs_in_run():
        try:
            decided = _keep_all(store) if _is_search_alone(policy, limits) else prune(store, policy, limits, dry_run=dry_run)
        except DeletionRefusedError as exc:
            if limits.claim is None:
                raise
            logger.warning(
                "%s: all stay, and this attempt prunes no more; allow it to delete, or keep all by num_to_keep=None", exc
            )
            decided = prune(store, policy, limits, dry_run=True)
            return Plan(keep={**decided.keep, **{it.id: (REFUSED,) for it in decided.drop}}, drop=())
        if decided.drop and dry_run:
            logger.info("would prune %s; kept %s", ", ".join(manifest.id for manifest in decided.drop), _kept(decided))
        elif decided.drop:  # a training's table of checkpoints has the list
            level = logging.INFO if limits.claim is None else logging.DEBUG
            pruned = show_count(len(decided.drop), "checkpoint")
            logger.log(level, "pruned %s of run %s, kept %d", pruned, run, len(decided.keep))
        if garbage and not dry_run:
            collect_garbage(store, keep_quarantined_days=policy.keep_quarantined_days)
    return decided


def _is_search_alone(policy: RetentionPolicy, limits: PruneLimits) -> bool:
    """Return whether a training that keeps all its checkpoints only looks for data that were never committed."""
    return policy.num_to_keep is None and limits.claim is not None


def _keep_all(store: CheckpointStore) -> Plan[Manifest]:
    """Return a plan that deletes nothing, and names only those that are pinned, of perhaps a hundred thousand checkpoints."""
    return Plan(keep=dict.fromkeys(sorted(store.pinned()), ("pinned",)), drop=())


def _kept(decided: Plan[Manifest]) -> str:
    newest = list(decided.keep.items())[:_SHOWN]
    more = f" and {len(decided.keep) - _SHOWN} older ones" if len(decided.keep) > _SHOWN else ""
    return ", ".join(f"{checkpoint_id} ({', '.join(why)})" for checkpoint_id, why in newest) + more
