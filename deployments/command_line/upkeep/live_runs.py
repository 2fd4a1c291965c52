"""The error for changing a run that a training holds."""

import click
from prefect_torch.ckpt import RunBusyError
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.run import Run

ended_option = click.option(
    "--ended", is_flag=True, help="The training has ended, though no outcome says so; needed where it ran on another machine."
)


def check_not_live(run: Run, verb: str, *, has_ended: bool) -> None:
    """Raise if the newest attempt of `run` is under way, or may be on another machine.

    Args:
        run: The run.
        verb: What is to be done with it, for the error.
        has_ended: The user says that an attempt on another machine has ended.

    Raises:
        RunBusyError: If the attempt is, or may be, under way.

    """
    status = read_status(run)
    if status is None or not status.may_be_alive or (status.state == "unknown" and has_ended):
        return
    owner = status.attempt.owner
    where = f"process {owner.pid} on {owner.machine}"
    if status.state == "running":
        raise RunBusyError(f"run {run.name!r} is being trained by {where}: {verb} it when that has ended")
    raise RunBusyError(
        f"run {run.name!r} was trained by {where}, and no outcome says that it has ended: if it has, {verb} with --ended"
    )
