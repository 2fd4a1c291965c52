"""`restore`: a quarantined checkpoint back into its run, once every byte of it is proven."""

import click
from prefect_torch.deployments.command_line.parameters import run_argument, storage_argument
from prefect_torch.deployments.command_line.terminal import say

from .selection import open_run


@click.command
@storage_argument
@run_argument
@click.argument("checkpoint", metavar="ID")
def restore(storage: str, run: str, checkpoint: str) -> None:
    """Bring a checkpoint back from quarantine.

    ID is the whole id, as show lists it. Every byte is read first. What is damaged stays where it is, and the command exits
    with 1 and says why. A policy may drop the checkpoint like any other, so pin it to keep it.
    """
    manifest = open_run(storage, run).restore(checkpoint)
    say(f"{manifest.id} is whole, and back in run {run}")
