"""The score of checkpoints: the metric of the options, else the one of the run's own training."""

from dataclasses import dataclass

import click
from prefect_torch.ckpt import CheckpointStore, Manifest
from prefect_torch.ckpt.runs.attempts import Attempt, newest_attempt
from prefect_torch.ckpt.runs.metrics import find_metric, flatten_metrics
from prefect_torch.ckpt.runs.retention import Order, RetentionPolicy, sort_by_score


@dataclass(frozen=True, slots=True)
class Score:
    """A metric and whether a low or a high value is better."""

    metric: str
    order: Order


def resolve_score(store: CheckpointStore, metric: str | None, order: Order | None) -> Score:
    """Return the score of the options; what they leave out is taken from the run's own training.

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
    """Return the retention policy of a training's newest attempt, or one that keeps everything without an attempt."""
    return RetentionPolicy() if attempt is None else attempt.policy


def best_first(manifests: list[Manifest], score: Score) -> list[Manifest]:
    """Return `manifests` best first.

    Raises:
        ValueError: If none of one or more manifests has the metric.

    """
    if manifests and all(find_metric(manifest.metrics, score.metric) is None for manifest in manifests):
        names = sorted({name for manifest in manifests for name, _ in flatten_metrics(manifest.metrics)})
        raise ValueError(f"no checkpoint has the metric {score.metric!r}; they have {', '.join(names) or 'none'}")
    return sort_by_score(manifests, score.metric, score.order)
