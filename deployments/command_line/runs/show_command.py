"""`show`: the details of a run or of a checkpoint."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import click
from prefect_torch.ckpt import CheckpointStore, Manifest
from prefect_torch.ckpt.runs.attempts.attempt import list_attempts, read_outcomes
from prefect_torch.ckpt.runs.attempts.status import AttemptStatus
from prefect_torch.ckpt.runs.history import MetricRecord, read_history
from prefect_torch.ckpt.runs.metrics import MetricValue, as_float, flatten_metrics
from prefect_torch.ckpt.runs.quarantine import why_quarantined
from prefect_torch.ckpt.runs.whole.trials import is_sweep
from prefect_torch.ckpt.text import headline, show_bytes, show_count
from prefect_torch.deployments.command_line.arguments import (
    json_option,
    metric_option,
    order_option,
    run_argument,
    storage_argument,
)
from prefect_torch.deployments.command_line.terminal import print_json, print_table, say, show_metric

from .run_summaries import RUN_STYLES
from .selection import find_checkpoint, open_run, open_training


@click.command
@storage_argument
@run_argument
@click.argument("checkpoint", metavar="[ID]", required=False)
@metric_option
@order_option
@json_option
def show(storage: str, run: str, checkpoint: str | None, metric: str | None, order: Any, as_json: bool) -> None:
    """Show the details of a run, of a sweep or of a checkpoint.

    For RUN its attempts and metrics, for a sweep its trials, the best first; for ID its manifest, files and metadata. A run
    costs reading its whole history of metrics, and a small read for each attempt and checkpoint; a sweep its journal, and some
    requests for each trial.

    \b
    --json of a run: name, path, reports, first_report_at, last_report_at,
      attempts: a list of number, state, kind (of failure, or null), error,
        errors (by rank), flow_run_id, host, pid, world_size, claimed_at,
        resumed_from, settings
      metrics: a list of name, reports, first, last, min, max
      quarantined: a list of id, reason
    --json of a sweep: name, path, state, function, space, config, metrics,
      modes, search, created_at, best (the number of a trial, or null),
      trials: a list as `ls --json` has it
    --json of a checkpoint: id, path, step, attempt, metrics, world_size,
      parent, created_at, bytes, pinned, timings, metadata,
      evaluations: the keys of metrics that evaluations attached,
      files: a list of path, bytes, digest, rank
    """  # noqa: D301 - click's mark for lines that it must not fill
    store = open_run(storage, run) if checkpoint is None else open_training(storage, run)
    if checkpoint is None and is_sweep(store):
        from prefect_torch.deployments.command_line.sweeps.printing import print_sweep  # noqa: PLC0415 - imports prefect

        print_sweep(store, as_json=as_json)
        return
    if checkpoint is None:
        described = _describe_run(store)
    else:
        described = _describe_checkpoint(store, find_checkpoint(store, checkpoint, metric, order))
    if as_json:
        print_json(described)
    elif checkpoint is None:
        _print_run(described)
    else:
        _print_checkpoint(described)


def _describe_run(store: CheckpointStore) -> dict[str, Any]:
    attempts = list(list_attempts(store))  # before the outcomes, which are stored before the next claim
    are_gone = [attempt.owner.is_process_gone() for attempt in attempts]  # before the outcomes, too
    outcomes = {outcome.attempt: outcome for outcome in read_outcomes(store)}
    history = read_history(store)
    reported_at = [record.reported_at for record in history if not record.is_logged]
    return {
        "name": store.run,
        "path": store.path,
        "attempts": [
            _describe_attempt(AttemptStatus(it, outcomes.get(it.number), is_gone, is_overtaken=it is not attempts[-1]))
            for it, is_gone in zip(attempts, are_gone, strict=True)
        ],
        "reports": len(reported_at),
        "first_report_at": reported_at[0] if reported_at else None,
        "last_report_at": reported_at[-1] if reported_at else None,
        "metrics": [asdict(summary) for summary in summarize_metrics(history)],
        "quarantined": [{"id": checkpoint_id, "reason": reason} for checkpoint_id, reason in why_quarantined(store).items()],
    }


def _describe_attempt(status: AttemptStatus) -> dict[str, Any]:
    attempt, outcome = status.attempt, status.outcome
    return {
        "number": attempt.number,
        "state": status.state,
        "kind": None if outcome is None else outcome.kind,
        "error": None if outcome is None else outcome.error,
        "errors": {} if outcome is None else outcome.errors,
        "flow_run_id": attempt.owner.flow_run_id,
        "host": attempt.owner.machine,
        "pid": attempt.owner.pid,
        "world_size": attempt.world_size,
        "claimed_at": attempt.claimed_at,
        "resumed_from": attempt.resumed_from,
        "settings": attempt.settings,
    }


def _describe_checkpoint(store: CheckpointStore, manifest: Manifest) -> dict[str, Any]:
    return {
        **asdict(manifest),
        "path": store.path_of(manifest.id),
        "created_at": manifest.created_at.isoformat(),
        "bytes": manifest.total_bytes,
        "pinned": manifest.id in store.pinned(),
        "metadata": store.metadata(manifest),
    }


def _print_run(run: dict[str, Any]) -> None:
    say(run["path"], "bold")
    print_table(
        ["attempt", "state", "ranks", "claimed at (UTC)", "resumed from"],
        (_attempt_row(attempt) for attempt in run["attempts"]),
        right={"attempt", "ranks"},
    )
    for attempt in run["attempts"]:
        _print_attempt(attempt)
    say("")
    first, last = _to_second(run["first_report_at"]), _to_second(run["last_report_at"])
    say(show_count(run["reports"], "report") + (f" from {first} to {last} (UTC)" if run["reports"] else ""))
    if run["metrics"]:
        summaries = [MetricSummary(**fields) for fields in run["metrics"]]
        print_table(
            ["metric", "reports", "first", "last", "min", "max"],
            map(_metric_row, summaries),
            right={"reports", "first", "last", "min", "max"},
        )
    for damaged in run["quarantined"]:
        say(f"quarantined as damaged: {damaged['id']}: {damaged['reason']}", "red")


def _metric_row(summary: "MetricSummary") -> Iterator[object]:
    yield summary.name
    yield summary.reports
    yield from (None if it is None else show_metric(it) for it in summary.numbers())


def _attempt_row(attempt: dict[str, Any]) -> Iterator[object]:
    yield attempt["number"]
    yield attempt["state"], RUN_STYLES.get(attempt["state"], "")
    yield attempt["world_size"]
    yield _to_second(attempt["claimed_at"])
    yield attempt["resumed_from"] and attempt["resumed_from"].rpartition("/")[2]


def _print_attempt(attempt: dict[str, Any]) -> None:
    """Print which process led an attempt, and why it ended: sentences, which a table would fold into a narrow column."""
    flow_run = f"flow run {attempt['flow_run_id']}, " if attempt["flow_run_id"] else ""
    say("")
    say(f"attempt {attempt['number']}: {flow_run}process {attempt['pid']} on {attempt['host']}")
    if (reason := _reason(attempt["kind"], attempt["error"])) is not None:
        say(reason, RUN_STYLES.get(attempt["state"], ""))


def _to_second(iso: str | None) -> str | None:
    """Return an ISO 8601 time in UTC to the second."""
    return None if iso is None else datetime.fromisoformat(iso).astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _reason(kind: str | None, error: str | None) -> str | None:
    """Return the kind and the first line of the error; --json has the whole traceback."""
    return ": ".join(filter(None, [kind, headline(error)])) or None


def _print_checkpoint(checkpoint: dict[str, Any]) -> None:
    say(checkpoint["path"], "bold")
    print_table(["key", "value"], _facts(checkpoint))
    say("")
    files: Sequence[dict[str, Any]] = checkpoint["files"]
    print_table(
        ["file", "size", "rank", "xxh3-128"],
        ([entry["path"], show_bytes(entry["bytes"]), entry["rank"], entry["digest"]] for entry in files),
        right={"size", "rank"},
    )


def _facts(checkpoint: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for key in ("step", "attempt", "world_size", "parent", "created_at", "pinned"):
        yield key, checkpoint[key]
    yield "size", f"{show_bytes(checkpoint['bytes'])} in {show_count(len(checkpoint['files']), 'file')}"
    for group in ("metrics", "timings", "metadata"):
        for name, value in flatten_metrics(checkpoint[group]):
            yield f"{group}/{name}", show_metric(value)


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """The summary of a metric over all reports.

    Attributes:
        name: "a/b" for a nested one.
        reports: The number of reports with it.
        first: Its first value.
        last: Its last value.
        min: The smallest number among its values, without NaN; None if there is no number.
        max: The largest, as `min`.

    """

    name: str
    reports: int
    first: MetricValue
    last: MetricValue
    min: float | None
    max: float | None

    def numbers(self) -> tuple[MetricValue, MetricValue, MetricValue, MetricValue]:
        """Return the values in the order of a table."""
        return self.first, self.last, self.min, self.max


def summarize_metrics(history: Iterable[MetricRecord]) -> list[MetricSummary]:
    """Return a summary of every metric, in the order of their first reports."""
    values: dict[str, list[MetricValue]] = {}
    for record in history:
        for name, value in flatten_metrics(record.metrics):
            values.setdefault(name, []).append(value)
    return [_summarize(name, reported) for name, reported in values.items()]


def _summarize(name: str, reported: list[MetricValue]) -> MetricSummary:
    numbers = [value for value in reported if isinstance(value, (int, float)) and not math.isnan(as_float(value))]
    return MetricSummary(name, len(reported), reported[0], reported[-1], min(numbers, default=None), max(numbers, default=None))
