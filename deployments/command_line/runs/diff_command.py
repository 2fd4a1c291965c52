"""`diff`: the differences of two checkpoints."""

from collections.abc import Iterator
from typing import Any

import click
from prefect_torch.ckpt import Manifest
from prefect_torch.ckpt.runs.metrics import MetricValue, as_float, flatten_metrics
from prefect_torch.ckpt.text import show_bytes
from prefect_torch.deployments.command_line.arguments import (
    checkpoint_argument,
    json_option,
    metric_option,
    order_option,
    run_argument,
    storage_argument,
)
from prefect_torch.deployments.command_line.terminal import print_json, print_table, say, show_metric

from .selection import find_checkpoint, open_training

_STYLES = {"changed": "yellow", "removed": "red", "added": "green"}


@click.command
@storage_argument
@run_argument
@checkpoint_argument
@click.argument("other")
@metric_option
@order_option
@json_option
def diff(storage: str, run: str, checkpoint: str, other: str, metric: str | None, order: Any, as_json: bool) -> None:
    """Compare two checkpoints.

    Compares the metrics, and the files by the digests in their manifests: no file is read. OTHER is an ID of the same run, or
    "run/ID" of another run in STORAGE.

    \b
    --json: from, to (each a path),
      metrics: a list of name, from, to, change (or null, if not two numbers)
      files: a list of path, status (same, changed, removed, added),
        from_bytes, to_bytes (each or null)
    """  # noqa: D301 - click's mark for lines that it must not fill
    store = open_training(storage, run)
    other_run, slash, other_id = other.rpartition("/")
    other_store = open_training(storage, other_run) if slash else store
    before = find_checkpoint(store, checkpoint, metric, order)
    after = find_checkpoint(other_store, other_id, metric, order)
    difference = {
        "from": store.path_of(before.id),
        "to": other_store.path_of(after.id),
        "metrics": list(_compare_metrics(before, after)),
        "files": list(_compare_files(before, after)),
    }
    if as_json:
        print_json(difference)
    else:
        _print(difference)


def _compare_metrics(before: Manifest, after: Manifest) -> Iterator[dict[str, Any]]:
    old, new = dict(flatten_metrics(before.metrics)), dict(flatten_metrics(after.metrics))
    for name in {**old, **new}:
        one, other = old.get(name), new.get(name)
        yield {"name": name, "from": one, "to": other, "change": _change(one, other)}


def _change(one: MetricValue, other: MetricValue) -> float | None:
    if isinstance(one, bool) or isinstance(other, bool):
        return None
    if isinstance(one, int) and isinstance(other, int):
        return other - one
    return as_float(other) - as_float(one) if isinstance(one, (int, float)) and isinstance(other, (int, float)) else None


def _compare_files(before: Manifest, after: Manifest) -> Iterator[dict[str, Any]]:
    old, new = {entry.path: entry for entry in before.files}, {entry.path: entry for entry in after.files}
    for path in sorted({**old, **new}):
        one, other = old.get(path), new.get(path)
        if one is None or other is None:
            status = "added" if one is None else "removed"
        else:
            status = "same" if (one.bytes, one.digest) == (other.bytes, other.digest) else "changed"
        yield {
            "path": path,
            "status": status,
            "from_bytes": None if one is None else one.bytes,
            "to_bytes": None if other is None else other.bytes,
        }


def _print(difference: dict[str, Any]) -> None:
    say(f"from {difference['from']}")
    say(f"to   {difference['to']}")
    say("")
    print_table(
        ["metric", "from", "to", "change"],
        (
            [it["name"], *(None if it[key] is None else show_metric(it[key]) for key in ("from", "to", "change"))]
            for it in difference["metrics"]
        ),
        right={"from", "to", "change"},
    )
    say("")
    print_table(
        ["file", "", "from", "to"],
        (
            [
                it["path"],
                (it["status"], _STYLES.get(it["status"], "")),
                *(None if it[key] is None else show_bytes(it[key]) for key in ("from_bytes", "to_bytes")),
            ]
            for it in difference["files"]
        ),
        right={"from", "to"},
    )
