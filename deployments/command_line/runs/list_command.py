"""`ls`: the runs in a storage, or the checkpoints of a run."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import click
from prefect_torch.ckpt import CheckpointStore, Manifest, Storage
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.deletion.limits import prune_limits
from prefect_torch.ckpt.runs.deletion.pruning import prune
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.metrics import flatten_metrics
from prefect_torch.ckpt.runs.whole.trials import is_sweep
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.ckpt.text import as_command, show_age, show_bytes
from prefect_torch.deployments.command_line.arguments import json_option, open_existing_storage, storage_argument
from prefect_torch.deployments.command_line.terminal import note, print_json, print_table, show_metric

from .run_summaries import RUN_STYLES, RunSummary, summarize_runs
from .selection import open_run, policy_of

_SHOWN_METRICS = 4


@click.command
@storage_argument
@click.argument("run", metavar="[RUN]", required=False)
@json_option
def ls(storage: str, run: str | None, as_json: bool) -> None:
    """List runs, the checkpoints of one, or the trials of a sweep.

    The runs in STORAGE are sorted by name, the checkpoints of RUN from the oldest to the newest. Each run costs a listing, a
    request per thousand objects, and four small requests; checkpoints cost a listing and a small read each. Both are requested
    32 in parallel.

    "kept because" is the reason why the training's own retention policy keeps a checkpoint, or "nothing" if it would delete it.

    The trials of a sweep are not among the runs: RUN may be a trial, as `best` and --json name it. Trials cost the sweep's
    journal, and some requests each.

    \b
    --json of runs: a list of
      name, attempts, latest_step (or null), checkpoints, bytes,
      trials (of a sweep, else null),
      state: completed, failed, preempted, suspended, yielded (to a more
        urgent flow run), cancelled, running,
        lost (its process is gone), unknown (it is on another machine),
      began_at: when the newest attempt began (UTC), or null
    --json of checkpoints: a list of
      id, step, attempt, metrics, bytes, created_at, pinned, kept_because
    --json of trials: a list of
      number, run, state, reason (or null), config, metrics, metric, mode,
      value (of the metric, or null), step (or null), attempts
    """  # noqa: D301 - click's mark for lines that it must not fill
    if run is None:
        _list_runs(storage, as_json)
        return
    store = open_run(storage, run)
    if is_sweep(store):
        from prefect_torch.deployments.command_line.sweeps.printing import list_trials  # noqa: PLC0415 - imports prefect

        list_trials(store, as_json=as_json)
    else:
        _list_checkpoints(store, as_json)


def _list_runs(storage: str, as_json: bool) -> None:
    opened = open_existing_storage(storage)
    summaries = summarize_runs(opened)
    if as_json:
        print_json([asdict(summary) for summary in summaries])
    elif not summaries:
        note(_without_runs(opened))
    else:
        has_sweeps = any(it.trials is not None for it in summaries)
        columns = ["run", *(["trials"] if has_sweeps else []), "attempts", "latest step", "checkpoints", "size", "state"]
        right = {"trials", "attempts", "latest step", "checkpoints", "size"}
        print_table(columns, (_run_row(it, has_sweeps=has_sweeps) for it in summaries), right=right)


def _without_runs(opened: Storage) -> str:
    storage, _, name = opened.url.rpartition("/")
    if find_size(opened, Layout(name).run_info.removeprefix(f"{name}/")) is None:
        return f"no runs in {opened.url}"
    return f"no runs in {opened.url}, which is run {name!r} itself: {as_command('ls', storage, name)}"


def _run_row(summary: RunSummary, *, has_sweeps: bool) -> Iterator[object]:
    yield summary.name
    if has_sweeps:
        yield summary.trials
    yield summary.attempts
    yield summary.latest_step
    yield summary.checkpoints
    yield show_bytes(summary.bytes)
    yield summary.state, RUN_STYLES.get(summary.state, "")


def _list_checkpoints(store: CheckpointStore, as_json: bool) -> None:
    status = read_status(store)
    policy = policy_of(None if status is None else status.attempt)
    manifests = store.list()
    pinned = store.pinned()
    kept = prune(store, policy, prune_limits(store, status), dry_run=True).keep
    if as_json:
        print_json([_describe(it, kept.get(it.id, ()), it.id in pinned) for it in manifests])
    elif not manifests:
        note(f"run {store.run} has no checkpoint")
    else:
        rows = (_row(manifest, kept, policy.checkpoint_score_attribute) for manifest in manifests)
        print_table(["id", "step", "metrics", "size", "age", "kept because"], rows, right={"step", "size", "age"})


def _describe(manifest: Manifest, kept_because: Iterable[str], pinned: bool) -> dict[str, Any]:
    return {
        "id": manifest.id,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "metrics": manifest.metrics,
        "bytes": manifest.total_bytes,
        "created_at": manifest.created_at.isoformat(),
        "pinned": pinned,
        "kept_because": list(kept_because),
    }


def _row(manifest: Manifest, kept: dict[str, tuple[str, ...]], first: str | None) -> Iterator[object]:
    yield manifest.id
    yield manifest.step
    yield _show_metrics(manifest, first)
    yield show_bytes(manifest.total_bytes)
    yield show_age((datetime.now(timezone.utc) - manifest.created_at).total_seconds())
    why = kept.get(manifest.id)
    yield ", ".join(why) if why else ("nothing", "yellow")


def _show_metrics(manifest: Manifest, first: str | None) -> str:
    """Return some metrics as text, the score first."""
    flat = sorted(flatten_metrics(manifest.metrics), key=lambda item: item[0] != first)
    more = f" and {len(flat) - _SHOWN_METRICS} more" if len(flat) > _SHOWN_METRICS else ""
    return ", ".join(f"{name}={show_metric(value)}" for name, value in flat[:_SHOWN_METRICS]) + more
