"""`prefect-torch agent`: start ranks on this machine for a training that another machine leads."""

import click
from prefect_torch.tasks.gang.machine.agent import main


@click.command()
@click.argument("leader", metavar="HOST:PORT")
@click.option("--name", help="This machine's name in messages; its host name by default.")
@click.option("--slots", type=click.IntRange(min=1), help="The most ranks to start; by default 1, or with --gpus one per GPU.")
@click.option("--gpus", is_flag=True, help="Take a free GPU for each rank, and start no rank without one.")
def agent(leader: str, name: str | None, slots: int | None, *, gpus: bool) -> int:
    """Start ranks on this machine, as requested by the flow at HOST:PORT.

    A cluster runs this on each of its machines (see ScalingConfig.cluster). The key of the attempt is in
    PREFECT_TORCH_AGENT_KEY, or is the first line of stdin. The agent ends, and its ranks with it, when the flow does.
    """
    options = [*(["--name", name] if name else []), *(["--slots", str(slots)] if slots else []), *(["--gpus"] if gpus else [])]
    return main([leader, *options])
