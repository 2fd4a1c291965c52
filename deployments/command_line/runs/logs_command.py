"""`logs`: what the ranks of a run have printed."""

import click
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts import Attempt, list_attempts
from prefect_torch.ckpt.runs.log_files import read_logs
from prefect_torch.deployments.command_line.arguments import run_argument, storage_argument
from prefect_torch.deployments.command_line.terminal import note, say

from .selection import open_run


@click.command
@storage_argument
@run_argument
@click.option("--attempt", type=click.IntRange(min=1), help="The attempt; the newest if not given.")
@click.option("--rank", type=click.IntRange(min=0), help="Only the log of this rank.")
def logs(storage: str, run: str, attempt: int | None, rank: int | None) -> int:
    """Print the log of an attempt.

    Prints the files logs/ATTEMPT/* beside the run where there are any, else the log of the flow run and of its ranks' task runs
    from Prefect's API (PREFECT_API_URL), which keeps them as long as it is configured to. A flow run that has led several
    attempts has one log for all of them.
    """
    store = open_run(storage, run)
    chosen = _chosen(store, attempt)
    if _print_files(store, chosen, rank):
        return 0
    flow_run_id = chosen.owner.flow_run_id
    if flow_run_id is None:
        raise FileNotFoundError(
            f"attempt {chosen.number} of run {run!r} was led by no flow run, and no log lies beside the run"
        )
    from .prefect_logs import read_lines  # noqa: PLC0415 - imports prefect, for this command only

    count = 0
    for line in read_lines(flow_run_id, rank):
        say(line)
        count += 1
    if not count:
        note(f"Prefect has no log lines of flow run {flow_run_id}")
    return 0 if count else 1


def _chosen(store: CheckpointStore, number: int | None) -> Attempt:
    attempts = list(list_attempts(store))
    found = [it for it in attempts if number in (None, it.number)]
    if not found:
        known = ", ".join(str(it.number) for it in attempts) or "none"
        raise FileNotFoundError(f"run {store.run!r} has no attempt{'' if number is None else f' {number}'}; it has {known}")
    return found[-1]


def _print_files(store: CheckpointStore, attempt: Attempt, rank: int | None) -> bool:
    has_files = False
    for name, line in read_logs(store, attempt.number, rank):
        has_files = True
        say(f"{name}: {line}")
    return has_files
