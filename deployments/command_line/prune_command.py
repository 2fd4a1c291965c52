"""`prune`: delete what is not worth keeping, after saying what that is."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click
from prefect_torch.ckpt import CheckpointStore, Manifest, Plan, RetentionPolicy
from prefect_torch.ckpt.runs.attempts import Attempt, newest_attempt
from prefect_torch.ckpt.runs.metrics import find_metric
from prefect_torch.ckpt.runs.prune_limits import prune_limits
from prefect_torch.ckpt.runs.retention import Order
from prefect_torch.ckpt.text import show_bytes

from .parameters import json_option, metric_option, order_option, run_argument, storage_argument
from .ranking import policy_of, rank, settle_ranking
from .selection import open_run, read_manifests
from .terminal import note, print_json, print_table, say, show_count, show_number


@dataclass(frozen=True, slots=True)
class Wanted:
    """What somebody asked to keep; None where they said nothing."""

    keep: int | None
    keep_last: int | None
    every: int | None
    metric: str | None
    order: Order | None


@click.command
@storage_argument
@run_argument
@click.option("--keep", type=click.IntRange(min=1), help="How many of the best to keep; of the newest where no metric ranks.")
@metric_option
@order_option
@click.option("--keep-last", type=click.IntRange(min=1), help="How many of the newest to keep besides.")
@click.option("--every", type=click.IntRange(min=1), help="Keep every checkpoint whose step is a multiple of this.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--yes", is_flag=True, help="Do not ask; needed where nobody can be asked.")
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
    """Delete the checkpoints that nothing keeps.

    First it shows what stays, why, and what goes, and asks. Without --keep, --keep-last and --every it is what the training
    itself would keep. The newest checkpoint and pinned ones stay in any case; while the run is trained, so do the one that
    its ranks restored and those whose reports are not in the metric history yet. Costs a small read for each checkpoint,
    three times.

    \b
    --json: dry_run, dropped_bytes,
      keep: a list of id, step, bytes, value (of the metric, or null), reasons
      drop: a list of id, step, bytes, value
    """  # noqa: D301 - click's mark for lines that it must not fill
    store = open_run(storage, run)
    attempt = newest_attempt(store)
    policy = _policy(store, attempt, Wanted(keep, keep_last, every, metric, order))
    limits = prune_limits(store, attempt)
    manifests = {manifest.id: manifest for manifest in read_manifests(store)}
    decided = store.prune(policy, dry_run=True, in_use=limits.in_use, up_to=limits.up_to)
    shown = _describe(decided, manifests, policy.checkpoint_score_attribute)
    if as_json:
        print_json({"dry_run": dry_run, **shown})
    else:
        _print(shown, policy.checkpoint_score_attribute)
    if dry_run or not decided.drop:
        return 0
    if not yes and not _agrees(decided):
        note("nothing was deleted")
        return 1
    doomed = {manifest.id for manifest in decided.drop}
    # What came since the question was asked stays: nobody was asked about it.
    spared = tuple(checkpoint_id for checkpoint_id in store.ids() if checkpoint_id not in doomed)
    deleted = store.prune(policy, in_use=spared, up_to=limits.up_to).drop
    if not as_json:
        freed_bytes = sum(manifest.total_bytes for manifest in deleted)
        say(f"deleted {show_count(len(deleted), 'checkpoint')}, {show_bytes(freed_bytes)}")
    return 0


def _policy(store: CheckpointStore, attempt: Attempt | None, wanted: Wanted) -> RetentionPolicy:
    own = policy_of(attempt)
    if wanted.keep is None:
        if wanted.metric is not None or wanted.order is not None:
            raise click.UsageError("give --keep, which says how many of the best stay")
        if wanted.keep_last is None and wanted.every is None:
            return own
        return RetentionPolicy(wanted.keep_last or 1, keep_every_n_steps=wanted.every)
    newest = wanted.keep_last or 1
    if wanted.metric is None and wanted.order is None and own.checkpoint_score_attribute is None:
        return RetentionPolicy(wanted.keep, keep_last=newest, keep_every_n_steps=wanted.every)
    ranking = settle_ranking(store, wanted.metric, wanted.order)
    rank(read_manifests(store), ranking)  # refuses a metric that no checkpoint has: any of them could go
    awaited_s = own.evaluation_timeout_s if ranking.metric == own.checkpoint_score_attribute else None
    return RetentionPolicy(wanted.keep, ranking.metric, ranking.order, newest, wanted.every, awaited_s)


def _agrees(decided: Plan[Manifest]) -> bool:
    if not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: give --yes to delete, or --dry-run to look")
    return click.confirm(f"Delete {show_count(len(decided.drop), 'checkpoint')} for good?", err=True)


def _describe(decided: Plan[Manifest], manifests: dict[str, Manifest], metric: str | None) -> dict[str, Any]:
    def describe(manifest: Manifest) -> dict[str, Any]:
        value = None if metric is None else find_metric(manifest.metrics, metric)
        return {"id": manifest.id, "step": manifest.step, "bytes": manifest.total_bytes, "value": value}

    kept = [
        (manifests[checkpoint_id], why) for checkpoint_id, why in sorted(decided.keep.items()) if checkpoint_id in manifests
    ]
    return {
        "keep": [{**describe(manifest), "reasons": list(why)} for manifest, why in kept],
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
        yield None if row["value"] is None else show_number(row["value"])
    yield show_bytes(row["bytes"])
    yield (f"stays: {', '.join(row['reasons'])}", "") if "reasons" in row else ("goes", "red")
