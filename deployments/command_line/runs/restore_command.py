"""`restore`: return a quarantined checkpoint to its run after verifying it."""

import click
from prefect_torch.deployments.command_line.parameters import run_argument, storage_argument
from prefect_torch.deployments.command_line.terminal import say

from .selection import open_run


@click.command
@storage_argument
@run_argument
@click.argument("checkpoint", metavar="ID")
def restore(storage: str, run: str, checkpoint: str) -> None:
    """Return a checkpoint from quarantine to its run.

    ID is the whole id, as listed by show. Every byte is verified first. A damaged checkpoint stays in quarantine, and the
    command exits with 1 and names the damage. A policy may delete the checkpoint like any other, so pin it to keep it.
    """
    manifest = open_run(storage, run).restore(checkpoint)
    say(f"{manifest.id} is whole, and in run {run} again")
