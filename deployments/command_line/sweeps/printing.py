"""The output of `ls`, `show` and `best` for a sweep."""

import json
from typing import Any

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.deployments.command_line.terminal import note, print_json, print_table, say, show_metric
from prefect_torch.flows.monitoring.sweeps.view import SeenTrial

from .sweep_records import SweepRecords, describe_trials


def list_trials(store: CheckpointStore, *, as_json: bool) -> None:
    """Print every trial, by number."""
    records = SweepRecords.read(store)
    trials = records.view.trials()
    if as_json:
        print_json(describe_trials(records, trials))
    elif not trials:
        note(f"sweep {store.run} has no trial")
    else:
        _print_trials(records, trials)
    records.raise_if_damaged()


def print_sweep(store: CheckpointStore, *, as_json: bool) -> None:
    """Print a sweep: its state, its best trial, all trials, the best first, and the errors of failed ones."""
    records = SweepRecords.read(store)
    status = read_status(store)
    state = "unknown" if status is None else status.state
    if as_json:
        print_json(_describe(store, records, state))
    else:
        _print_sweep(store, records, state)
    records.raise_if_damaged()


def _print_sweep(store: CheckpointStore, records: SweepRecords, state: str) -> None:
    definition, best = records.definition, records.view.best()
    say(store.path, "bold")
    say(f"sweep of {definition.function}, {state}")
    say(records.headline())
    say("")
    trials = records.view.by_score()
    _print_trials(records, trials)
    reasons = [trial for trial in trials if trial.state == "failed" and trial.reason]
    if reasons:
        say("")
    for trial in reasons:
        say(f"trial {trial.number} failed: {trial.reason}", "red")
    if best is not None:
        say("")
        say(f"best config: {json.dumps(dict(best.parameters), default=str)}")
        say(f"best run: {best.run}")


def show_best_trials(store: CheckpointStore, count: int, *, as_json: bool) -> None:
    """Print the best trials, best first, with the newest checkpoint of each."""
    records = SweepRecords.read(store)
    found = [trial for trial in records.view.by_score() if trial.value is not None][:count]
    newest = read_all(found, lambda trial: store.beside(trial.run).latest())
    ids = [None if manifest is None else manifest.id for manifest in newest]
    if as_json:
        described = describe_trials(records, found)
        print_json([{**trial, "checkpoint": it} for trial, it in zip(described, ids, strict=True)])
    elif not found:
        note(f"no trial of sweep {store.run} has {records.view.metric!r} as a number yet")
    else:
        metric = records.view.metric
        rows = ([it.number, it.run, show_metric(it.value), it.step, at] for it, at in zip(found, ids, strict=True))
        print_table(["trial", "run", metric, "step", "latest checkpoint"], rows, right={"trial", metric, "step"})
    records.raise_if_damaged()


def _print_trials(records: SweepRecords, trials: list[SeenTrial]) -> None:
    print_table(records.columns(), map(records.row, trials), right={"trial", records.view.metric, "step"})


def _describe(store: CheckpointStore, records: SweepRecords, state: str) -> dict[str, Any]:
    definition, best = records.definition, records.view.best()
    return {
        "name": store.run,
        "path": store.path,
        "state": state,
        "function": definition.function,
        "space": definition.space,
        "config": definition.config,
        "metrics": definition.metrics,
        "modes": definition.modes,
        "search": definition.search,
        "created_at": definition.created_at,
        "best": None if best is None else best.number,
        "trials": describe_trials(records, records.view.trials()),
    }
