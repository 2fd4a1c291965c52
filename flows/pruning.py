"""The flow that applies retention policies to the runs of a storage, during trainings or after them."""

from typing import Annotated

from prefect import flow, get_run_logger
from prefect.futures import PrefectFuture
from prefect_torch.ckpt import CheckpointStore, Plan, StorageSpec
from prefect_torch.ckpt.checkpoint_store import list_runs
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.runs.standing import prune_limits, read_standing
from prefect_torch.tasks import CheckpointConfig, prune_checkpoints
from prefect_torch.tasks.options.run_form import shown_as
from prefect_torch.tasks.options.storage import StorageChoice, configured_storage
from pydantic import Field

from .monitoring.pages.runs_page import refresh_runs_page
from .short_tracebacks import short_tracebacks


@short_tracebacks
@flow(
    name="prune",
    description="Deletes the checkpoints that no retention policy keeps, and files that were never committed.",
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

    A run's latest checkpoint and its pinned ones are always kept. While the run is trained, so are the restored checkpoint and
    those whose reports are not in the history yet: the flow may run during trainings. A failed deletion fails the task of its
    run; the other runs are pruned nevertheless.

    Args:
        storage: The location of the runs.
        runs: The names of the runs to prune; all if None, but no trial of a sweep, which is pruned by its name.
        checkpoint: Which checkpoints are kept; each run's own policy if None.
        dry_run: Only log what would be deleted.

    Raises:
        StorageError: If a deletion failed; the next prune tries again.
        FileNotFoundError: If one of `runs` does not exist.

    """
    spec = configured_storage(storage)
    pruned = {run: _submit(spec, run, checkpoint, dry_run=dry_run) for run in (list_runs(spec) if runs is None else runs)}
    if not pruned:
        get_run_logger().warning("there are no runs in %s", spec.url)
    for future in pruned.values():
        future.wait()
    refresh_runs_page(spec)
    return {run: [manifest.id for manifest in future.result().drop] for run, future in pruned.items()}


def _submit(
    spec: StorageSpec, run: str, checkpoint: CheckpointConfig | None, *, dry_run: bool
) -> PrefectFuture[Plan[Manifest]]:
    store = CheckpointStore.open(spec, run)
    standing = read_standing(store)
    if standing is None:
        raise FileNotFoundError(f"there is no run {run!r} in {spec.url}")
    policy = standing.attempt.policy if checkpoint is None else checkpoint.policy()
    limits = prune_limits(store, standing)
    return prune_checkpoints.submit(spec, run, policy, limits.in_use, up_to=limits.up_to, dry_run=dry_run)
