"""`best`: the best checkpoints of a run."""

from dataclasses import asdict
from typing import Any

import click
from prefect_torch.ckpt.runs.metrics import find_metric
from prefect_torch.ckpt.text import show_bytes

from .parameters import json_option, metric_option, order_option, run_argument, storage_argument
from .ranking import rank, settle_ranking
from .selection import open_run, read_manifests
from .terminal import note, print_json, print_table, show_number


@click.command
@storage_argument
@run_argument
@metric_option
@order_option
@click.option("-k", "count", type=click.IntRange(min=1), default=1, show_default=True, help="How many at most.")
@json_option
def best(storage: str, run: str, metric: str | None, order: Any, count: int, as_json: bool) -> None:
    """Show the best checkpoints, best first.

    Without --metric and --order they are those that the training ranks its checkpoints with. A checkpoint without the metric
    comes last, after NaN; ties go to the newer. Costs a small read for each checkpoint.

    \b
    --json: a list of
      id, step, value (of the metric, or null), metric, order, metrics, bytes
    """  # noqa: D301 - click's mark for lines that it must not fill
    store = open_run(storage, run)
    ranking = settle_ranking(store, metric, order)
    chosen = [(it, find_metric(it.metrics, ranking.metric)) for it in rank(read_manifests(store), ranking)[:count]]
    if as_json:
        print_json(
            [
                {
                    "id": manifest.id,
                    "step": manifest.step,
                    "value": value,
                    **asdict(ranking),
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
            ["id", "step", ranking.metric, "size"],
            (
                [it.id, it.step, None if value is None else show_number(value), show_bytes(it.total_bytes)]
                for it, value in chosen
            ),
            right={"step", ranking.metric, "size"},
        )
