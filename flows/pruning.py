"""The flow that applies retention policies to the runs of a storage, during trainings or after them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner
from prefect_torch.ckpt import CheckpointError, CheckpointStore, RetentionPolicy, Storage, StorageSpec
from prefect_torch.ckpt.checkpoint_store import list_runs
from prefect_torch.ckpt.runs.attempts.begun import check_begun
from prefect_torch.ckpt.runs.attempts.status import read_status
from prefect_torch.ckpt.runs.whole.trials import is_sweep
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.parallel import read_all
from prefect_torch.ckpt.text import as_command, show_count
from prefect_torch.flows.calls.log_filter import shorten_logs
from prefect_torch.flows.calls.short_tracebacks import short_tracebacks
from prefect_torch.tasks import CheckpointConfig, prune_checkpoints
from prefect_torch.tasks.gang.termination import TerminationSwitch
from prefect_torch.tasks.options.run_form import shown_as
from prefect_torch.tasks.options.storage import StorageChoice, configured_storage
from prefect_torch.tasks.prefect_api.final_state import completed
from prefect_torch.tasks.prefect_api.outage import outlast_api_outages
from prefect_torch.tasks.prefect_api.tags import tags_beyond_caller
from prefect_torch.tasks.run_logs import get_run_logger
from pydantic import Field

from .monitoring.pages.runs_page import refresh_runs_page

_EIGHT_AT_ONCE: Any = ThreadPoolTaskRunner(max_workers=8)  # runs; each prune reads with threads of its own


@short_tracebacks
@flow(
    name="prune",
    description="Deletes the checkpoints that no retention policy keeps, and files that were never committed.",
    task_runner=_EIGHT_AT_ONCE,
    persist_result=False,
)
def prune(
    storage: Annotated[
        StorageChoice,
        shown_as(
            "Storage",
            "The location of the runs: a local path, a URL such as s3://bucket/prefix, 'block-type-slug/block-name', or a "
            "saved block.",
        ),
    ],
    runs: Annotated[
        Annotated[list[str], Field(title="These")] | Annotated[None, Field(title="All")],
        shown_as("Runs", "Which runs to prune, by name; otherwise all in the storage but the trials of sweeps."),
    ] = None,
    checkpoint: Annotated[
        Annotated[CheckpointConfig, Field(title="This")] | Annotated[None, Field(title="Each run's own")],
        shown_as("Policy", "Which checkpoints are kept; otherwise, each run's own policy, of its newest training."),
    ] = None,
    dry_run: Annotated[bool, shown_as("Dry run", "Only log what would be deleted.")] = False,
) -> dict[str, list[str]]:
    """Delete the checkpoints that no policy keeps, and uncommitted files; return the ids of the deleted checkpoints by run.

    A run's latest checkpoint and its pinned ones are always kept. While the run is trained, its restored checkpoint is kept
    too, and until the run has completed, so are checkpoints whose reports are not in the history yet: the flow may run during
    trainings. A failed deletion fails the task of its run; the other runs are pruned nevertheless.

    Args:
        storage: The location of the runs.
        runs: The names of the runs to prune; all if None, except the trials of sweeps, which are pruned only by name.
        checkpoint: Which checkpoints are kept; each run's own policy if None. If it does not set `evaluation_timeout_s`, a run
            with the same score keeps its own, and if it does not set `keep_quarantined_days`, every run does.
        dry_run: Only log what would be deleted.

    Raises:
        StorageError: If a deletion failed; the next prune tries again.
        CheckpointError: If a run cannot be read, such as one of a newer version; the others were pruned.
        PermissionError: If a run's own files may not be read; the others were pruned.
        FileNotFoundError: If one of `runs` does not exist; then nothing was deleted.
        ValueError: If no checkpoint of a run has the metric of `checkpoint`; nothing of it was deleted, the others were pruned.

    """
    shorten_logs()
    with outlast_api_outages(TerminationSwitch.is_thrown):
        return _prune(configured_storage(storage), runs, checkpoint, dry_run=dry_run)


def _prune(spec: StorageSpec, runs: list[str] | None, given: CheckpointConfig | None, *, dry_run: bool) -> dict[str, list[str]]:
    opened = open_storage(spec)
    names = list(list_runs(opened)) if runs is None else list(dict.fromkeys(runs))
    if not names:
        get_run_logger().warning("there are no runs in %s" if runs is None else "no run of %s was named", spec.url)
    policies, refused = _read_policies(opened, names, must_exist=runs is not None)
    with tags_beyond_caller():
        pruned = {  # every named run was found before the first is pruned
            run: prune_checkpoints.submit(opened, run, own if given is None else _policy(given, own), dry_run=dry_run)
            for run, own in policies.items()
        }
    for future in pruned.values():
        future.wait()
    refresh_runs_page(spec, in_place=True)
    found = {run: [manifest.id for manifest in future.result().drop] for run, future in pruned.items()}
    if refused:
        raise refused[0]
    dropped = show_count(sum(map(len, found.values())), "checkpoint")
    return completed(f"{show_count(len(found), 'run')}, {dropped} {'to delete' if dry_run else 'deleted'}", found)


def _policy(given: CheckpointConfig, own: RetentionPolicy) -> RetentionPolicy:
    """Return the policy of `given`, with the run's own times for evaluations of its score and in quarantine, if not given."""
    policy, said = given.policy(), given.model_fields_set
    if "evaluation_timeout_s" not in said and policy.checkpoint_score_attribute == own.checkpoint_score_attribute:
        policy = replace(policy, evaluation_timeout_s=own.evaluation_timeout_s)
    if "keep_quarantined_days" not in said:
        policy = replace(policy, keep_quarantined_days=own.keep_quarantined_days)
    return policy


def _read_policies(
    storage: Storage, names: Sequence[str], *, must_exist: bool
) -> tuple[dict[str, RetentionPolicy], list[Exception]]:
    """Return the policies of the runs that can be pruned, and the errors of the others, which are logged."""
    read = read_all(names, partial(_read_policy, storage, must_exist=must_exist))
    found = {name: it for name, it in zip(names, read, strict=True) if isinstance(it, RetentionPolicy)}
    return found, [it for it in read if isinstance(it, Exception)]


def _read_policy(storage: Storage, name: str, *, must_exist: bool) -> RetentionPolicy | Exception | None:
    """Return the policy of a run, or why it cannot be pruned, None if no attempt has begun it."""
    store = CheckpointStore.open(storage, name)
    try:
        status = read_status(store)
        if status is not None:
            if must_exist and is_sweep(store):
                listing = as_command("best", storage.url, name)
                get_run_logger().warning("run %r is a sweep: give its trials to prune, as %s names them", name, listing)
            return status.attempt.policy
        if must_exist:
            check_begun(store)
        get_run_logger().warning("run %r is not pruned: no attempt has begun it", name)
    except (CheckpointError, PermissionError) as exc:
        get_run_logger().error("run %r is not pruned: %s", name, exc)
        return exc
    return None
