"""`logs`: what the ranks of a run have printed."""

import click
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.attempt import Attempt, list_attempts
from prefect_torch.ckpt.runs.evaluations import check_evaluation_name
from prefect_torch.ckpt.runs.log_files import read_logs
from prefect_torch.ckpt.text import show_some
from prefect_torch.deployments.command_line.arguments import run_argument, storage_argument
from prefect_torch.deployments.command_line.terminal import note, say_as_logged

from .selection import open_run


@click.command
@storage_argument
@run_argument
@click.option("--attempt", type=click.IntRange(min=1), help="The attempt; the newest if not given.")
@click.option("--evaluation", help="Print the log of the evaluation of this name instead of an attempt's.")
@click.option("--checkpoint", help="With --evaluation, the evaluated checkpoint; the newest that has a log if not given.")
@click.option("--rank", type=click.IntRange(min=0), help="Only the log of this rank.")
def logs(storage: str, run: str, attempt: int | None, evaluation: str | None, checkpoint: str | None, rank: int | None) -> int:
    """Print the log of an attempt, or of an evaluation.

    Prints the files logs/ATTEMPT/* beside the run where there are any, else the log of the flow run and of its ranks' task runs
    from Prefect's API (PREFECT_API_URL), which keeps them as long as it is configured to. A flow run that has led several
    attempts has one log for all of them. An evaluation has files if its log_ranks or log_level, or PREFECT_LOGGING_LEVEL, keep
    lines out of Prefect's log.
    """
    if (evaluation is None and checkpoint is not None) or (evaluation is not None and attempt is not None):
        raise click.UsageError("--attempt is of a training, --checkpoint goes with --evaluation")
    store = open_run(storage, run)
    if evaluation is not None:
        _print_evaluation(store, evaluation, checkpoint, rank)
        return 0
    chosen = _chosen(store, attempt)
    if _print_files(store, store.layout.logs(chosen.number), rank):
        return 0
    flow_run_id = chosen.owner.flow_run_id
    if flow_run_id is None:
        raise FileNotFoundError(
            f"attempt {chosen.number} of run {run!r} was led by no flow run, and no log lies beside the run: with log_ranks or "
            "log_level, a training stores its logs there"
        )
    from .prefect_logs import read_lines  # noqa: PLC0415 - imports prefect, for this command only

    count = 0
    for line in read_lines(flow_run_id, rank):
        say_as_logged(line)
        count += 1
    if not count:
        of_rank = "" if rank is None else f"rank {rank} in "
        note(f"Prefect has no log lines of {of_rank}flow run {flow_run_id}")
    return 0 if count else 1


def _chosen(store: CheckpointStore, number: int | None) -> Attempt:
    attempts = list(list_attempts(store))
    found = [it for it in attempts if number in (None, it.number)]
    if not found:
        known = ", ".join(str(it.number) for it in attempts) or "none"
        raise FileNotFoundError(f"run {store.run!r} has no attempt{'' if number is None else f' {number}'}; it has {known}")
    return found[-1]


def _print_evaluation(store: CheckpointStore, name: str, checkpoint: str | None, rank: int | None) -> None:
    folder = store.layout.evaluations_logs(check_evaluation_name(name))
    logged = sorted(store.storage.folders(folder))
    chosen = logged[-1:] if checkpoint is None else [it for it in logged if it.startswith(checkpoint)]
    if not chosen:
        where = "" if checkpoint is None else f" of checkpoint {checkpoint}"
        raise FileNotFoundError(
            f"no log of evaluation {name!r}{where} lies beside run {store.run!r}: it has one where log_ranks or log_level keep "
            "lines out of Prefect's log, which has the others"
        )
    for checkpoint_id in chosen:
        _print_files(store, store.layout.evaluation_logs(name, checkpoint_id), rank)


def _print_files(store: CheckpointStore, folder: str, rank: int | None) -> bool:
    has_files = False
    for name, line in read_logs(store, folder, rank):
        has_files = True
        say_as_logged(f"{name}: {line}")
    if not has_files and rank is not None and (keys := store.keys(folder)):
        known = sorted({key.removeprefix(folder).partition(".")[0] for key in keys})
        raise FileNotFoundError(f"no log of rank {rank} lies beside run {store.run!r}; there are {show_some(known)}")
    return has_files
