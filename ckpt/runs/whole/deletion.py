"""The deletion of a run, which is repeated where it was interrupted."""

from prefect_torch.ckpt.runs.deletion.pruning import delete_checkpoints
from prefect_torch.ckpt.runs.deletion.reserve import give_up_space
from prefect_torch.ckpt.runs.index.reading import list_manifests
from prefect_torch.ckpt.runs.run import Run, pinned_among
from prefect_torch.ckpt.text import show_some


def delete_run(run: Run) -> None:
    """Delete everything of a run that no process changes; its trials, if it is a sweep, are deleted before it.

    Manifests go before data, so a killed deletion leaves whole checkpoints and garbage.

    Raises:
        ValueError: If a checkpoint is pinned; those that are not are deleted then.

    """
    check_unpinned(run, delete_checkpoints(run, list_manifests(run)[1]))
    left = run.keys(f"{run.name}/")
    check_unpinned(run, pinned_among(key for key in left if key.startswith(run.layout.pins)))
    # Claims and the run's record go last: by them the run is still found and listed, and the deletion can be repeated.
    claims, run_info = [key for key in left if key.startswith(run.layout.attempts)], run.layout.run_info
    manifests = [key for key in left if key.startswith(run.layout.manifests)]
    run.storage.delete(manifests)
    run.storage.delete(key for key in left if key not in (*claims, run_info))
    run.storage.delete(claims)
    give_up_space(run)  # before the last object, with which the directory goes
    run.storage.delete([run_info])
    run.storage.remove_interrupted(f"{run.name}/", 0.0)


def check_unpinned(run: Run, pinned: frozenset[str]) -> None:
    """Raise if there are pinned checkpoints among those to delete.

    Args:
        run: Their run.
        pinned: The ids of the pinned ones.

    Raises:
        ValueError: If there are any.

    """
    if pinned:
        raise ValueError(
            f"{show_some(sorted(pinned))} of run {run.name!r} {'is' if len(pinned) == 1 else 'are'} pinned and not deleted: "
            "prefect-torch unpin first"
        )
