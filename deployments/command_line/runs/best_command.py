"""`best`: the checkpoints of a run with the best score."""

from dataclasses import asdict
from typing import Any

import click
from prefect_torch.ckpt.runs.metrics import find_metric
from prefect_torch.ckpt.runs.whole.trials import is_sweep
from prefect_torch.ckpt.text import show_bytes
from prefect_torch.deployments.command_line.arguments import (
    json_option,
    metric_option,
    order_option,
    run_argument,
    storage_argument,
)
from prefect_torch.deployments.command_line.terminal import note, print_json, print_table, show_metric

from .selection import best_checkpoints_first, open_run, resolve_score


@click.command
@storage_argument
@run_argument
@metric_option
@order_option
@click.option(
    "-k", "count", type=click.IntRange(min=1), default=1, show_default=True, help="The number of checkpoints or trials to show."
)
@json_option
def best(storage: str, run: str, metric: str | None, order: Any, count: int, as_json: bool) -> None:
    """Show the best checkpoints of a run, or the best trials of a sweep, best first.

    Without --metric and --order, the score is the training's own. A checkpoint without the metric comes last, after NaN; of
    equal values the newer comes first. Costs a small read for each checkpoint.

    \b
    --json: a list of
      id, step, value (of the metric, or null), metric, order, metrics, bytes
    of a sweep: a list of trials as `ls --json` has it, with the key
      checkpoint (the id of the latest, or null)
    """  # noqa: D301 - click's mark for lines that it must not fill
    store = open_run(storage, run)
    if is_sweep(store):
        from prefect_torch.deployments.command_line.sweeps.printing import show_best_trials  # noqa: PLC0415 - imports prefect

        if metric is not None or order is not None:
            raise click.UsageError("a sweep has its own metric: give neither --metric nor --order")
        show_best_trials(store, count, as_json=as_json)
        return
    score = resolve_score(store, metric, order)
    chosen = [(it, find_metric(it.metrics, score.metric)) for it in best_checkpoints_first(store, score)[:count]]
    if as_json:
        print_json(
            [
                {
                    "id": manifest.id,
                    "step": manifest.step,
                    "value": value,
                    **asdict(score),
                    "metrics": manifest.metrics,
                    "bytes": manifest.total_bytes,
                }
                for manifest, value in chosen
            ]
        )
    elif not chosen:
        note(f"run {run} has no checkpoint")
    else:
        print_table(
            ["id", "step", score.metric, "size"],
            (
                [it.id, it.step, None if value is None else show_metric(value), show_bytes(it.total_bytes)]
                for it, value in chosen
            ),
            right={"step", score.metric, "size"},
        )
