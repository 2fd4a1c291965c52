"""`metrics`: the reported metrics of a run, as an overview, as a table, or as CSV."""

import csv
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import click
from prefect_torch.ckpt.runs.history import MetricRecord, read_history
from prefect_torch.ckpt.runs.metrics import MetricValue, as_float, flatten_metrics
from prefect_torch.deployments.command_line.arguments import json_option, run_argument, storage_argument
from prefect_torch.deployments.command_line.runs.selection import open_training
from prefect_torch.deployments.command_line.runs.show_command import summarize_metrics
from prefect_torch.deployments.command_line.terminal import note, plain, print_json, print_table, show_metric

from .sparkline import sparkline

_CURVE_WIDTH = 20
_SHOWN_REPORTS = 20
_COLUMNS = ["attempt", "step", "reported_at", "checkpoint", "logged"]


@click.command
@storage_argument
@run_argument
@click.argument("names", metavar="[METRIC]...", nargs=-1)
@click.option(
    "--last", type=click.IntRange(min=1), help=f"How many of the newest reports to print; {_SHOWN_REPORTS} if not given."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print every report as a line of CSV.")
@json_option
def metrics(storage: str, run: str, names: tuple[str, ...], last: int | None, as_csv: bool, as_json: bool) -> None:
    """Print the metrics that a run has reported.

    Without METRIC, a line with the curve of each metric; with names, "a/b" for a nested one, the newest reports. Costs reading
    the whole history of metrics, an object per thousand reports or 4 MiB. CSV and JSON have every report, or the --last ones.
    CSV has only the METRICs, if any are given; JSON has all.

    \b
    --csv: attempt, step, reported_at, checkpoint, logged, and each metric
    --json: a list of
      attempt, step, metrics, checkpoint (or null), reported_at,
      is_logged (by a logger, between two reports)
    """  # noqa: D301 - click's mark for lines that it must not fill
    if as_csv and as_json:
        raise click.UsageError("give --csv or --json, not both")
    history = read_history(open_training(storage, run))
    known = list(dict.fromkeys(name for record in history for name, _ in flatten_metrics(record.metrics)))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"run {run!r} has no metric {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    chosen = history[-last:] if last is not None else history
    if as_json:
        print_json([asdict(record) for record in chosen])
    elif as_csv:
        _print_csv(chosen, names or known)
    elif not history:
        note(f"run {run} has reported no metrics")
    elif names or last is not None:
        _print_reports(chosen[-(last or _SHOWN_REPORTS) :], names or known)
    else:
        _print_overview(history)


def _print_overview(history: Sequence[MetricRecord]) -> None:
    curves: dict[str, list[float]] = {}
    for record in history:
        for name, value in flatten_metrics(record.metrics):
            curves.setdefault(name, []).append(as_number(value))
    print_table(
        ["metric", "reports", "last", "min", "max", "curve"],
        (
            [
                it.name,
                it.reports,
                show_metric(it.last),
                None if it.min is None else show_metric(it.min),
                None if it.max is None else show_metric(it.max),
                sparkline(curves[it.name], _CURVE_WIDTH),
            ]
            for it in summarize_metrics(history)
        ),
        right={"reports", "last", "min", "max"},
    )


def _print_reports(history: Iterable[MetricRecord], names: Sequence[str]) -> None:
    rows = ((record.attempt, record.step, *_cells(record, names)) for record in history)
    print_table(["attempt", "step", *names], rows, right={"attempt", "step", *names})


def _cells(record: MetricRecord, names: Sequence[str]) -> list[str | None]:
    values = dict(flatten_metrics(record.metrics))
    return [show_metric(values[name]) if name in values else None for name in names]


def _print_csv(history: Iterable[MetricRecord], names: Sequence[str]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(_shown, [*_COLUMNS, *names]))
    for record in history:
        values = dict(flatten_metrics(record.metrics))
        about = [record.attempt, record.step, record.reported_at, record.checkpoint, record.is_logged]
        writer.writerow(map(_shown, [*about, *(values.get(name) for name in names)]))


def _shown(cell: object) -> object:
    """Return a cell as it is for a program, and without control characters for a terminal."""
    return plain(cell) if isinstance(cell, str) and sys.stdout.isatty() else cell


def as_number(value: MetricValue) -> float:
    """Return a metric as a number; NaN for text and None."""
    return as_float(value) if isinstance(value, (bool, int, float)) else math.nan
