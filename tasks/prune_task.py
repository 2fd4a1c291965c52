"""The Prefect task that keeps the top K and removes what nobody committed."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect_torch.ckpt import CheckpointStore, Plan, RetentionPolicy, StorageSpec
from prefect_torch.ckpt.manifest import Manifest
from prefect_torch.ckpt.pruning import collect_garbage


@task(name="prune_checkpoints", task_run_name="prune-{run}", cache_policy=NO_CACHE, persist_result=False)
def prune_checkpoints(
    storage: StorageSpec | str, run: str, policy: RetentionPolicy, in_use: tuple[str, ...] = ()
) -> Plan[Manifest]:
    """Delete the checkpoints of `run` that `policy` does not keep, and the data that nobody committed.

    Args:
        storage: Where the run lies.
        run: The run's name.
        policy: What is worth keeping; the newest and pinned checkpoints are kept in any case.
        in_use: Ids that must stay because a training restores from them.

    Raises:
        StorageError: If something could not be deleted; the next prune tries again.

    """
    logger = get_run_logger()
    store = CheckpointStore.open(storage, run)
    decided = store.prune(policy, in_use=in_use)
    if decided.drop:
        logger.info("pruned %s; kept %s", ", ".join(manifest.id for manifest in decided.drop), _kept(decided))
    collect_garbage(store)
    return decided


def _kept(decided: Plan[Manifest]) -> str:
    return ", ".join(f"{checkpoint_id} ({', '.join(why)})" for checkpoint_id, why in decided.keep.items())
