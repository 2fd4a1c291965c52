"""Runs, checkpoints and scores that a command is given as text."""

from dataclasses import dataclass, replace

import click
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, Manifest
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, newest_attempt
from prefect_torch.ckpt.runs.attempts.begun import has_begun
from prefect_torch.ckpt.runs.manifest import ManifestMemory, is_id
from prefect_torch.ckpt.runs.retention import Order, RetentionPolicy, require_score, sort_by_score
from prefect_torch.ckpt.runs.whole.trials import is_sweep
from prefect_torch.ckpt.storage.sizes import find_size
from prefect_torch.ckpt.text import as_command, show_some
from prefect_torch.deployments.command_line.arguments import open_existing_storage


def open_run(storage: str, run: str) -> CheckpointStore:
    """Open an existing run; a command reads each of its manifests once.

    Raises:
        FileNotFoundError: If there is no such run.

    """
    store = replace(CheckpointStore.open(open_existing_storage(storage), run), memory=ManifestMemory())
    if not has_begun(store):
        listing = as_command("ls", storage)
        raise FileNotFoundError(f"there is no run {run!r} in {store.storage.url}; {listing} lists the runs")
    return store


def open_training(storage: str, run: str) -> CheckpointStore:
    """Open an existing run that has reports and checkpoints of its own; of a sweep, only the trials have them.

    Raises:
        FileNotFoundError: If there is no such run.
        click.UsageError: If it is a sweep.

    """
    store = open_run(storage, run)
    if is_sweep(store):
        listing = as_command("best", storage, run)
        raise click.UsageError(f"{run} is a sweep: give one of its trials, as {listing} names them")
    return store


def find_checkpoint(store: CheckpointStore, text: str, metric: str | None, order: Order | None) -> Manifest:
    """Return the checkpoint that `text` names: an id, the beginning of an id, "latest" or "best".

    Raises:
        CheckpointNotFoundError: If there is no such checkpoint.
        ValueError: If several ids begin with `text`, or it is empty.

    """
    if is_id(text):
        return _by_id(store, text)
    if text == "latest":
        found = store.latest()
    elif text == "best":
        score = resolve_score(store, metric, order)
        found = next(iter(best_checkpoints_first(store, score)), None)
    else:
        return store.get(_only_id(store, text))
    if found is None:
        raise CheckpointNotFoundError(f"run {store.run!r} in {store.storage.url} has no checkpoint yet")
    return found


def _by_id(store: CheckpointStore, checkpoint_id: str) -> Manifest:
    try:
        return store.get(checkpoint_id)
    except CheckpointNotFoundError as exc:
        if find_size(store.storage, store.layout.quarantine(checkpoint_id)) is None:
            raise
        restore = as_command("restore", store.storage.url, store.run, checkpoint_id)
        raise CheckpointNotFoundError(
            f"checkpoint {checkpoint_id} of run {store.run!r} is in quarantine, since it was damaged; when its files are "
            f"repaired, {restore} returns it"
        ) from exc


def _only_id(store: CheckpointStore, beginning: str) -> str:
    if not beginning:  # every id begins with it, so an empty shell variable would name a run's only checkpoint
        raise ValueError("ID is empty: give an id as listed by ls, latest or best")
    matching = [checkpoint_id for checkpoint_id in store.ids() if checkpoint_id.startswith(beginning)]
    if not matching:
        raise CheckpointNotFoundError(
            f"run {store.run!r} in {store.storage.url} has no checkpoint whose id begins with {beginning!r}; "
            "give an id as listed by ls, latest or best"
        )
    if len(matching) > 1:
        raise ValueError(f"the ids of {len(matching)} checkpoints begin with {beginning!r}: {show_some(matching)}")
    return matching[0]


@dataclass(frozen=True, slots=True)
class Score:
    """A metric and whether a low or a high value is better."""

    metric: str
    order: Order


def resolve_score(store: CheckpointStore, metric: str | None, order: Order | None) -> Score:
    """Return the score of the options; a missing one is taken from the run's own training.

    Raises:
        click.UsageError: If neither defines it.

    """
    own = policy_of(newest_attempt(store))
    if metric is None:
        metric = own.checkpoint_score_attribute
        if metric is None:
            raise click.UsageError("give --metric: the training of this run has no checkpoint_score_attribute")
    if order is None:
        if metric != own.checkpoint_score_attribute:
            raise click.UsageError(f"give --order min or --order max: it is unknown whether a low or a high {metric} is better")
        order = own.checkpoint_score_order
    return Score(metric, order)


def policy_of(attempt: Attempt | None) -> RetentionPolicy:
    """Return the retention policy of a training's newest attempt, or, without an attempt, one that keeps everything."""
    return RetentionPolicy() if attempt is None else attempt.policy


def best_checkpoints_first(store: CheckpointStore, score: Score) -> list[Manifest]:
    """Return the checkpoints of a run, best first.

    Raises:
        ValueError: If there are some, and none has a number as this metric: the order would be arbitrary.

    """
    manifests = store.list()
    require_score(store.name, manifests, score.metric)
    return sort_by_score(manifests, score.metric, score.order)
