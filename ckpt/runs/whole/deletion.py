"""The deletion of a run, which is repeated where it was interrupted."""

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from prefect_torch.ckpt.runs.deletion.links import own_folder
from prefect_torch.ckpt.runs.deletion.pruning import delete_checkpoints
from prefect_torch.ckpt.runs.deletion.reserve import give_up_space
from prefect_torch.ckpt.runs.index.reading import list_manifests
from prefect_torch.ckpt.runs.layout import lies_in_checkpoint
from prefect_torch.ckpt.runs.run import Run, pinned_among
from prefect_torch.ckpt.storage.local_files.walk import remove_tree
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
    # Claims go last: by them the run is still found, and the deletion can be repeated.
    claims, run_info = [key for key in left if key.startswith(run.layout.attempts)], run.layout.run_info
    last = {*claims, run_info}
    manifests = [key for key in left if key.startswith(run.layout.manifests)]
    run.storage.delete(manifests)
    run.storage.delete(key for key in left if key not in last)
    if (unreported := own_folder(run, run.layout.all_unreported)) is not None:
        remove_tree(unreported, ignore_errors=True)  # of killed ranks; mostly empty directories, which hold no object
    give_up_space(run)  # before the last object, with which the directory goes
    run.storage.delete([run_info])
    run.storage.delete(claims)
    run.storage.remove_interrupted(f"{run.name}/", 0.0)


def check_holds_no_other(runs: Sequence[Run], keys: Iterable[str]) -> None:
    """Raise if one of `keys` is of a run of another storage, below the last of `runs`: somebody may train it.

    Args:
        runs: The runs to delete; those before the last are its trials.
        keys: All keys below the last of them.

    Raises:
        ValueError: If one is.

    """
    own = {each.layout.run_info for each in runs}
    files = tuple(prefix for each in runs for prefix in (each.layout.all_unreported, each.layout.manifests))
    for key in keys:
        if not key.endswith("/run.json") or key in own:  # nearly all, and a path object for each takes long
            continue
        if not key.startswith(files) and not lies_in_checkpoint(PurePath(key)):
            other = f"{runs[-1].storage.url}/{key.removesuffix('/run.json')}"
            raise ValueError(f"{other} is another run, in a storage below run {runs[-1].name!r}: move or delete it first")


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
