"""By which metric checkpoints are ranked: what a person says, else what the run's own training says."""

from dataclasses import dataclass

import click
from prefect_torch.ckpt import CheckpointStore, Manifest
from prefect_torch.ckpt.runs.attempts import Attempt, newest_attempt
from prefect_torch.ckpt.runs.metrics import find_metric, flatten_metrics
from prefect_torch.ckpt.runs.retention import Order, RetentionPolicy, rank_best


@dataclass(frozen=True, slots=True)
class Ranking:
    """By which metric checkpoints are better or worse."""

    metric: str
    order: Order


def settle_ranking(store: CheckpointStore, metric: str | None, order: Order | None) -> Ranking:
    """Return what to rank by; what was not said, the run's own training says.

    Raises:
        click.UsageError: If neither says it.

    """
    own = policy_of(newest_attempt(store))
    if metric is None:
        metric = own.checkpoint_score_attribute
        if metric is None:
            raise click.UsageError("give --metric: the training of this run ranks its checkpoints by none")
    if order is None:
        if metric != own.checkpoint_score_attribute:
            raise click.UsageError(f"give --order min or --order max: nothing says which {metric} is better")
        order = own.checkpoint_score_order
    return Ranking(metric, order)


def policy_of(attempt: Attempt | None) -> RetentionPolicy:
    """Return the retention policy of a training's newest attempt; one that keeps everything if it has none."""
    return RetentionPolicy() if attempt is None else attempt.policy


def rank(manifests: list[Manifest], ranking: Ranking) -> list[Manifest]:
    """Return `manifests` best first.

    Raises:
        ValueError: If there are some and none has the metric.

    """
    if manifests and all(find_metric(manifest.metrics, ranking.metric) is None for manifest in manifests):
        names = sorted({name for manifest in manifests for name, _ in flatten_metrics(manifest.metrics)})
        raise ValueError(f"no checkpoint has the metric {ranking.metric!r}; they have {', '.join(names) or 'none'}")
    return rank_best(manifests, ranking.metric, ranking.order)
