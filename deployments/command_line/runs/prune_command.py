"""`prune`: delete the checkpoints that no retention policy keeps, after showing them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
from prefect_torch.ckpt import CheckpointStore, Manifest, Plan, RetentionPolicy
from prefect_torch.ckpt.runs.attempts.attempt import Attempt
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.deletion.limits import prune_limits
from prefect_torch.ckpt.runs.deletion.pruning import prune as prune_run
from prefect_torch.ckpt.runs.metrics import find_metric
from prefect_torch.ckpt.runs.retention import Order, require_score
from prefect_torch.ckpt.text import show_bytes, show_count
from prefect_torch.deployments.command_line.arguments import (
    json_option,
    metric_option,
    order_option,
    run_argument,
    storage_argument,
)
from prefect_torch.deployments.command_line.confirmation import agrees_to_delete, yes_option
from prefect_torch.deployments.command_line.terminal import print_json, print_table, say, show_metric

from .selection import open_training, policy_of, resolve_score


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """The options on what to keep; None for those that are not given."""

    keep: int | None
    keep_last: int | None
    every: int | None
    metric: str | None
    order: Order | None


@click.command
@storage_argument
@run_argument
@click.option("--keep", type=click.IntRange(min=1), help="How many of the best to keep; of the newest without a metric.")
@metric_option
@order_option
@click.option("--keep-last", type=click.IntRange(min=1), help="How many of the newest to keep in addition.")
@click.option("--every", type=click.IntRange(min=1), help="Keep every checkpoint whose step is a multiple of this.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@yes_option
@json_option
def prune(
    storage: str,
    run: str,
    keep: int | None,
    metric: str | None,
    order: Any,
    keep_last: int | None,
    every: int | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete the checkpoints that no policy keeps.

    First shows which checkpoints stay, why, and which go, and asks. Without --keep, --keep-last and --every, the policy is the
    training's own. The newest checkpoint and pinned ones always stay. While the run is trained, the one that its ranks
    restored stays, too; until it has completed, so do those whose reports are not in the metric history yet. The manifests of
    checkpoints in the run's index are not read.

    \b
    --json: dry_run, dropped_bytes,
      keep: a list of id, step, bytes, value (of the metric, or null),
        kept_because (and the same as reasons)
      drop: a list of id, step, bytes, value
    """  # noqa: D301 - click's mark for lines that it must not fill
    store = open_training(storage, run)
    status = read_status(store)
    policy = _policy(store, None if status is None else status.attempt, PruneOptions(keep, keep_last, every, metric, order))
    manifests = {manifest.id: manifest for manifest in store.list()}
    if keep is not None:  # also by the run's own metric, which a prune takes though no checkpoint has it
        require_score(store.name, list(manifests.values()), policy.checkpoint_score_attribute)
    decided = prune_run(store, policy, prune_limits(store, status), dry_run=True)
    shown = _describe(decided, manifests, policy.checkpoint_score_attribute)
    if as_json:
        print_json({"dry_run": dry_run, **shown})
    else:
        _print(shown, policy.checkpoint_score_attribute)
    if dry_run or not decided.drop:
        return 0
    what = show_count(len(decided.drop), "checkpoint")
    if not agrees_to_delete(what, yes=yes, instead=", or --dry-run to look"):
        return 1
    to_delete = {manifest.id for manifest in decided.drop}
    # Checkpoints committed since the question stay: they were not part of it.
    to_keep = tuple(checkpoint_id for checkpoint_id in store.ids() if checkpoint_id not in to_delete)
    deleted = store.prune(policy, in_use=to_keep).drop  # by the run's status of now
    if not as_json:
        freed_bytes = sum(manifest.total_bytes for manifest in deleted)
        say(f"deleted {show_count(len(deleted), 'checkpoint')}, {show_bytes(freed_bytes)}")
    return 0


def _policy(store: CheckpointStore, attempt: Attempt | None, options: PruneOptions) -> RetentionPolicy:
    own = policy_of(attempt)
    if options.keep is None:
        if options.metric is not None or options.order is not None:
            raise click.UsageError("give --keep, the number of the best to keep")
        if options.keep_last is None and options.every is None:
            return own
        return RetentionPolicy(options.keep_last or 1, keep_every_n_steps=options.every)
    newest = options.keep_last or 1
    if options.metric is None and options.order is None and own.checkpoint_score_attribute is None:
        return RetentionPolicy(options.keep, keep_last=newest, keep_every_n_steps=options.every)
    score = resolve_score(store, options.metric, options.order)
    awaited_s = own.evaluation_timeout_s if score.metric == own.checkpoint_score_attribute else None
    return RetentionPolicy(options.keep, score.metric, score.order, newest, options.every, awaited_s)


def _describe(decided: Plan[Manifest], manifests: dict[str, Manifest], metric: str | None) -> dict[str, Any]:
    def describe(manifest: Manifest) -> dict[str, Any]:
        value = None if metric is None else find_metric(manifest.metrics, metric)
        return {"id": manifest.id, "step": manifest.step, "bytes": manifest.total_bytes, "value": value}

    kept = [
        (manifests[checkpoint_id], why) for checkpoint_id, why in sorted(decided.keep.items()) if checkpoint_id in manifests
    ]
    return {
        # "reasons" is the former name.
        "keep": [{**describe(manifest), "kept_because": list(why), "reasons": list(why)} for manifest, why in kept],
        "drop": [describe(manifest) for manifest in decided.drop],
        "dropped_bytes": sum(manifest.total_bytes for manifest in decided.drop),
    }


def _print(shown: dict[str, Any], metric: str | None) -> None:
    rows = sorted(shown["keep"] + shown["drop"], key=lambda row: str(row["id"]))
    columns = ["id", "step", *([metric] if metric else []), "size", ""]
    print_table(columns, (_row(row, metric) for row in rows), right={"step", metric or "", "size"} - {""})
    say(f"{len(shown['keep'])} stay, {len(shown['drop'])} go: {show_bytes(shown['dropped_bytes'])}")


def _row(row: dict[str, Any], metric: str | None) -> Iterator[object]:
    yield row["id"]
    yield row["step"]
    if metric:
        yield None if row["value"] is None else show_metric(row["value"])
    yield show_bytes(row["bytes"])
    yield (f"stays: {', '.join(row['kept_because'])}", "") if "kept_because" in row else ("goes", "red")
