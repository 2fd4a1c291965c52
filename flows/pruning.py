"""The flow that keeps the runs of a storage within their retention policies, beside trainings or long after them."""

from typing import Annotated

from prefect import flow, get_run_logger
from prefect.futures import PrefectFuture
from prefect_torch.ckpt import CheckpointStore, Plan, StorageSpec
from prefect_torch.ckpt.runs.attempts import newest_attempt
from prefect_torch.ckpt.runs.listing import list_runs
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.prune_limits import prune_limits
from prefect_torch.tasks import CheckpointConfig, prune_checkpoints
from prefect_torch.tasks.options.run_form import shown_as
from prefect_torch.tasks.options.settings import configured_storage
from prefect_torch.tasks.options.storage_choice import StorageChoice
from pydantic import Field


@flow(name="prune", persist_result=False)
def prune(
    storage: Annotated[
        StorageChoice,
        shown_as(
            "Storage",
            "Where the runs lie: a local path, a URL such as s3://bucket/prefix, 'block-type-slug/block-name', or a saved "
            "block.",
        ),
    ],
    runs: Annotated[
        Annotated[list[str], Field(title="These")] | Annotated[None, Field(title="All")],
        shown_as("Runs", "Which runs to prune, by name; all in the storage otherwise."),
    ] = None,
    checkpoint: Annotated[
        Annotated[CheckpointConfig, Field(title="This")] | Annotated[None, Field(title="Each run's own")],
        shown_as("Policy", "Which checkpoints are kept; otherwise, what each run's own training was told last."),
    ] = None,
    dry_run: Annotated[bool, shown_as("Dry run", "Only say in the log what would be deleted.")] = False,
) -> dict[str, list[str]]:
    """Delete the checkpoints that are not to be kept, and what nobody committed; return the ids deleted, by run.

    A run's latest checkpoint and its pinned ones are kept in any case, and while it is trained, the one that was restored and
    those whose reports are not in the history yet; so this may run beside trainings. What cannot be deleted fails its run's
    task; the other runs are pruned all the same.

    Args:
        storage: Where the runs lie.
        runs: Which ones; all if None.
        checkpoint: Which checkpoints are kept; each run's own policy if None.
        dry_run: Only decide, and say so in the log.

    Raises:
        StorageError: If something could not be deleted; the next prune tries again.
        FileNotFoundError: If one of `runs` does not exist.

    """
    spec = configured_storage(storage)
    pruned = {run: _submit(spec, run, checkpoint, dry_run=dry_run) for run in (list_runs(spec) if runs is None else runs)}
    if not pruned:
        get_run_logger().warning("there are no runs in %s", spec.url)
    for future in pruned.values():
        future.wait()
    return {run: [manifest.id for manifest in future.result().drop] for run, future in pruned.items()}


def _submit(
    spec: StorageSpec, run: str, checkpoint: CheckpointConfig | None, *, dry_run: bool
) -> PrefectFuture[Plan[Manifest]]:
    store = CheckpointStore.open(spec, run)
    attempt = newest_attempt(store)
    if attempt is None:
        raise FileNotFoundError(f"there is no run {run!r} in {spec.url}")
    policy = attempt.policy if checkpoint is None else checkpoint.policy()
    limits = prune_limits(store, attempt)
    return prune_checkpoints.submit(spec, run, policy, limits.in_use, up_to=limits.up_to, dry_run=dry_run)
