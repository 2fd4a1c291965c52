"""Prunes as the leader of the newest attempt makes them, which knows its own limits."""

from prefect_torch.ckpt import CheckpointStore, Manifest, Plan, RetentionPolicy
from prefect_torch.ckpt.runs.deletion.limits import PruneLimits
from prefect_torch.ckpt.runs.deletion.pruning import prune


def prune_as_leader(
    store: CheckpointStore,
    policy: RetentionPolicy,
    *,
    dry_run: bool = False,
    in_use: tuple[str, ...] = (),
    up_to: str | None = None,
) -> Plan[Manifest]:
    limits = PruneLimits(in_use, up_to, own_metric=policy.checkpoint_score_attribute)
    return prune(store, policy, limits, dry_run=dry_run)
