"""`pin`, `unpin`, `restore`: exempt a checkpoint from retention policies, or return it from quarantine."""

from typing import Any

import click
from prefect_torch.deployments.command_line.arguments import (
    checkpoint_argument,
    metric_option,
    order_option,
    run_argument,
    storage_argument,
)
from prefect_torch.deployments.command_line.terminal import say

from .selection import find_checkpoint, open_training


@click.command
@storage_argument
@run_argument
@checkpoint_argument
@metric_option
@order_option
def pin(storage: str, run: str, checkpoint: str, metric: str | None, order: Any) -> None:
    """Keep a checkpoint regardless of retention policies."""
    store = open_training(storage, run)
    manifest = find_checkpoint(store, checkpoint, metric, order)
    store.pin(manifest.id)
    say(f"{manifest.id} is pinned")


@click.command
@storage_argument
@run_argument
@checkpoint_argument
@metric_option
@order_option
def unpin(storage: str, run: str, checkpoint: str, metric: str | None, order: Any) -> None:
    """Subject a checkpoint to the retention policies again.

    Does nothing if it is not pinned. Of a checkpoint in quarantine, or whose manifest is damaged, ID is the whole id.
    """
    store = open_training(storage, run)
    is_pinned = checkpoint in store.pinned()  # its pin may be all that can be read of it
    checkpoint_id = checkpoint if is_pinned else find_checkpoint(store, checkpoint, metric, order).id
    store.unpin(checkpoint_id)
    say(f"{checkpoint_id} is not pinned")


@click.command
@storage_argument
@run_argument
@click.argument("checkpoint", metavar="ID")
def restore(storage: str, run: str, checkpoint: str) -> None:
    """Return a checkpoint from quarantine to its run.

    ID is the whole id, as listed by show. Every byte is verified first. A damaged checkpoint stays in quarantine, and the
    command exits with 1 and names the damage. A policy may delete the checkpoint like any other, so pin it to keep it.
    """
    manifest = open_training(storage, run).restore(checkpoint)
    say(f"{manifest.id} is whole, and in run {run} again")
